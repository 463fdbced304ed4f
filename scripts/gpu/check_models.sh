#!/bin/sh
# Exactness of the reference models on CUDA, one process per model: sh scripts/gpu/check_models.sh "ARGS of check_exactness"
out="${OUT:-outputs}"
for model in deepseek_v2_mini qwen2_moe_mini phimoe_mini; do
    timeout "${LIMIT:-200}" "${PYTHON:-python3}" -u scripts/check_exactness.py --device cuda --model "reference/$model" $1 >"$out/$model.log" 2>&1 &
done
wait
for model in deepseek_v2_mini qwen2_moe_mini phimoe_mini; do
    echo "== $model"
    tail -n "${LINES_SHOWN:-12}" "$out/$model.log"
done
