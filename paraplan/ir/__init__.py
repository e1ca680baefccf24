"""What things are: structs, options, errors, the plan, and by folder the model, the machine and what is executed.

Frozen, strict data and text forms, which every room reads; no torch, and nothing of ours is imported here.
"""
