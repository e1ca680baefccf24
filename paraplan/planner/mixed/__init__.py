"""Clusters whose groups of nodes differ: which groups a plan uses, and pipelines whose positions differ as they do.

`planner.search` and `planner.fits` come in; uses the joint search's and the pipeline's rooms.
"""
