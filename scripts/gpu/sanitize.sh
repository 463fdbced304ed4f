#!/bin/sh
# compute-sanitizer over the kernel checks and a short generation: sh scripts/gpu/sanitize.sh [SECONDS PER TOOL]
# Compiles without the tool first. Every allocation is its own (no caching allocator), so that memcheck sees its ends.
limit="${1:-40}"
out="${OUT:-outputs}"
python="${PYTHON:-python3}"
tool="${SANITIZER:-compute-sanitizer}"
mkdir -p "$out"
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 CUDA_MODULE_LOADING=LAZY PYTHONUNBUFFERED=1
kernels="-m scripts.gpu.sanitize_kernels"
generation="-m scripts.gpu.sanitize_generation"
$python $kernels >"$out/sanitize_plain.log" 2>&1
tail -n 1 "$out/sanitize_plain.log"
# name, tool, program
check() {
    timeout -s INT "$((limit + 25))" "$tool" --tool "$2" --target-processes all --print-limit 20 --error-exitcode 9 \
        "$python" $3 --limit-s "$limit" >"$out/sanitize_$1.log" 2>&1
    echo "$1: exit $?; $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$out/sanitize_$1.log" | tail -n 1)"
    grep -E '^(ok|FAIL) ' "$out/sanitize_$1.log" | wc -l
    tail -n 2 "$out/sanitize_$1.log"
}
check memcheck memcheck "$kernels" &
check racecheck racecheck "$kernels" &
check generation memcheck "$generation" &
wait
