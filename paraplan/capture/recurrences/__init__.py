"""Loops over time: where they begin and end is marked while exporting, and each becomes one op."""
