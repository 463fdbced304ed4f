#!/bin/sh
# Joins and unpacks vLLM's packages (PACKED/vllm.part*) on a machine without internet; prints the interpreter.
# sh scripts/gpu/serving_vllm.sh PACKED SITE
set -e
packed=$1 site=$2
mkdir -p "$site"
cat "$packed"/vllm.part* | xz -dc -T0 | tar x -C "$site"
python3 -m compileall -q -j 0 "$site" >/dev/null 2>&1 || true
cat > "$site/python" <<END
#!/bin/sh
PYTHONPATH=$site:\$PYTHONPATH VLLM_CACHE_ROOT=$site/cache exec python3 "\$@"
END
chmod +x "$site/python"
echo "$site/python"
