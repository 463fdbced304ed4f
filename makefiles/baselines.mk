# Environments of the systems that cannot share ours: .venvs/<name>, from baselines/<folder>/requirements.txt.
# PYTHON_VLLM: vLLM 0.25.1 has wheels for Python 3.10 to 3.13. CUDA=1: llama.cpp with its CUDA kernels (nvcc, about an hour).
PYTHON_VLLM ?= $(PYTHON)
LLAMA_CMAKE = $(if $(CUDA),-DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=$(or $(CUDA_ARCH),native)) -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF
.PHONY: baseline-vllm baseline-llama

baseline-vllm: .venvs/vllm/.installed  ## .venvs/vllm: vLLM with its own torch (about 9 GB; needs a GPU to run)

baseline-llama: .venvs/llama_cpp/.installed  ## .venvs/llama_cpp: llama.cpp, built from source (10 to 30 min; CUDA=1 for a GPU)

.venvs/vllm/.installed: baselines/vllm_offload/requirements.txt
	$(PYTHON_VLLM) -m venv .venvs/vllm
	.venvs/vllm/bin/python -m pip install --quiet -r $<
	@touch $@

.venvs/llama_cpp/.installed: baselines/llama_cpp_offload/requirements.txt
	$(PYTHON) -m venv .venvs/llama_cpp
	CMAKE_ARGS="$(LLAMA_CMAKE)" .venvs/llama_cpp/bin/python -m pip install --quiet -r $<
	@touch $@
