"""Attention on CUDA devices: tiles of our own in Triton, and torch's three kernels."""
