"""Triton kernels of the decoder for CUDA: row-invariant, graph-safe, on preallocated tensors.

Every function writes into tensors it is given, allocates nothing, never waits for the device and launches
a grid that depends on shapes alone, so it can be captured in a CUDA graph. A row's bits depend on that row
alone: tiles, reduction orders and instruction shapes are chosen per weight shape (`tiles.py`), never by
the number of rows.
"""
