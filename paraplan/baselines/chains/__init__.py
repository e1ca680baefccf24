"""Strategies for chains of blocks: dynamic programs and closed forms of checkpointing."""
