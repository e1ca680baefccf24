"""What the segments of a model cost on a position's devices: simulated steps of few microbatches and layers."""
