"""Clusters whose groups of nodes differ: which groups a plan uses. `planner.search` and `planner.fits` come in."""
