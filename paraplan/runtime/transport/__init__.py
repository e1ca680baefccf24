"""How ranks exchange tensors, and how tensors get to tiers and back: collectives, process groups, copies, files."""
