"""What only a CUDA device can tell, in parts of a few minutes each; `python -m benchmarks.gpu` says how."""
