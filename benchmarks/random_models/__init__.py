"""Whole models drawn at random: source text of layers, losses, buffers and ties, and plans for them."""
