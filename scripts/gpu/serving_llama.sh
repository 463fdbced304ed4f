#!/bin/sh
# Unpacks llama.cpp's packages (PACKED/llama.tar.xz and wheels) on a machine without internet; prints the interpreter.
# sh scripts/gpu/serving_llama.sh PACKED SITE
set -e
packed=$1 site=$2
mkdir -p "$site"
tar xJf "$packed/llama.tar.xz" -C "$site"
for wheel in "$packed"/*.whl; do python3 -m zipfile -e "$wheel" "$site"; done
libraries=$(python3 -c 'import glob, nvidia; print(":".join(glob.glob(list(nvidia.__path__)[0] + "/*/lib")))')
cat > "$site/python" <<END
#!/bin/sh
LD_LIBRARY_PATH=$libraries:\$LD_LIBRARY_PATH PYTHONPATH=$site:\$PYTHONPATH exec python3 "\$@"
END
chmod +x "$site/python"
echo "$site/python"
