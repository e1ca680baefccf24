"""One search over degrees, microbatches, schedules and stages a position: all are priced, the best are planned.

Used by `planner.search`; uses the pipeline's and the sharding's rooms.
"""
