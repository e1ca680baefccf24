"""What the canonical ops compute, as plain functions of tensors: traced by capture, executed by the runtime.

Reference kernels here, those of CUDA devices in `gpu/`. Imports torch, and of ours `ir` alone.
"""
