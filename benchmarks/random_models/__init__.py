"""Whole models drawn at random: source text of layers, losses, buffers and ties, and the plans they are trained under."""
