"""Rules of ops on tensors as torch has them: elementwise, products, reductions, views, indexing, sorting, creation."""
