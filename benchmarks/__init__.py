"""Measurements behind what the documents claim: `python -m benchmarks.<name> [--only PATTERN] [--json FILE]`."""
