"""Triton kernels of verification: routed experts as grouped products over cache slots, in any order of arrival."""
