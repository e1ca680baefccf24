"""What makes a plan faster in the same layouts, or leaves its device: tried by simulation, kept where it helps."""
