"""Triton kernels that put codes and residuals together again."""
