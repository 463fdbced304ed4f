"""Fused multi-expert INT4 kernels for CUDA devices, in Triton (paper, "Fused multi-expert draft kernel")."""
