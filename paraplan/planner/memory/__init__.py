"""Training within a byte budget: what to keep, recompute or move away, op by op."""
