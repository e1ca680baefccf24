"""Rows by index on CUDA devices: experts' tokens, products grouped by matrix, rows of tables."""
