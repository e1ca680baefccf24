"""What to do: the search over meshes, layouts, stages, recomputation and places.

The constraints a user gives come in by `constraints`; `search` is the loop. No torch; `api`, `fitting` and baselines
come in.
"""
