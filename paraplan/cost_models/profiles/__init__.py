"""Measured times: profile files, monotone curves between measurements, what a recorded run teaches."""
