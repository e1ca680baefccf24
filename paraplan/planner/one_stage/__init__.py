"""Plans without a pipeline: on one mesh, and what is said where there are none; `search` comes in."""
