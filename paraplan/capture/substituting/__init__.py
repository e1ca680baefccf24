"""Replaces what was recorded by canonical ops, which rules and kernels exist for."""
