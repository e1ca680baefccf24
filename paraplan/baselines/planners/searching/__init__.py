"""Planners that search: one file a system or a family of them, each named in its head with its costs and its source.

A planner is a function from a task to its answers, the best by its own costs first. Only `registry` imports them.
"""
