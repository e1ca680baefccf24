"""Strategies that swap to a slower tier: by free time, by layer, by cost, by genetic search."""
