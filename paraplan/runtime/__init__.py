"""Runs plans: trainers over the user's model, optimizer and batches, distributed or all ranks in one process.

Imports torch; executes rank programs as they are, and plans nothing. `api`, `fitting`, `codegen` and `jobs` come in.
"""
