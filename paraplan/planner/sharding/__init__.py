"""Sharding of every kind on one mesh: the option space, its prices, the ILP and its certificate."""
