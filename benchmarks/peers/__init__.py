"""Comparisons with other planners run here: `python -m benchmarks.peers.<name>`. Nothing of ours needs them."""
