"""Python state that forward's code reaches outside of its model: what a trace changes there, undone and told of."""
