"""Plans that recompute: what a kind may, what a stage should, and layouts chosen along with it."""
