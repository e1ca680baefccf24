"""Schedules made better or made to fit: eviction, local search, merging by integer programs, exact for small steps."""
