"""Readers of other systems' problem instances, one per format."""
