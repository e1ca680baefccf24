"""Bounds from below on training within a byte budget: critical instants, bursts, the least budget."""
