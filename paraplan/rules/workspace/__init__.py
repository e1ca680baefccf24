"""Bytes that kernels allocate and drop inside, from local shapes: formulas by family of ops."""
