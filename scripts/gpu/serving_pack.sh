#!/bin/sh
# Packs vLLM 0.25.1 for a GPU machine that has Python 3.12, torch 2.11 with CUDA 13 and transformers 5, but no internet:
#     sh scripts/gpu/serving_pack.sh FOLDER PIECE_BYTES       -> FOLDER/vllm.part0, vllm.part1, … (37 MB in all)
# Left out: what runs on other cards than Hopper (FlashAttention 2, SM100 kernels, their machine code in libraries with
# code for several cards: one_card.py), headers, other Pythons, static libraries.
# llama.cpp: a wheel built there with `make baseline-llama CUDA=1`, unpacked and packed as FOLDER/llama.tar.xz.
set -e
mkdir -p "$1"
folder=$(cd "$1" && pwd) piece=$2 here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
python3 -m pip install --quiet --no-deps --no-compile --target "$work/site" --only-binary=:all: --implementation cp \
    --python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    vllm==0.25.1 apache-tvm-ffi==0.1.9 blake3 cachetools cbor2 compressed-tensors==0.17.0 distro 'fastapi<0.137' httpx2 jiter \
    'llguidance>=1.7,<1.8' msgspec openai openai-harmony partial-json-parser pybase64 pydantic pydantic-core annotated-types \
    pyzmq setproctitle sniffio 'starlette>=1' typing-inspection xgrammar==0.2.1
cd "$work/site"
rm -rf vllm/vllm-rs vllm/_qutlass_C.abi3.so vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so vllm/third_party/fmha_sm100 \
    vllm/third_party/deep_gemm/include vllm/entrypoints/serve/instrumentator/static xgrammar/lib/*.a bin
find . -name '*.cpython-31[0134]-*.so' -delete
strip --strip-unneeded xgrammar/*.so
python3 "$here/one_card.py" 90 vllm/*.so
tar c . | xz -6 -T0 > "$work/vllm.tar.xz"
split -b "$piece" -d -a 1 "$work/vllm.tar.xz" "$folder/vllm.part"
rm -rf "$work"
ls -l "$folder"
