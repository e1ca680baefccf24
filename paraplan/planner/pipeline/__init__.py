"""Stages, groups of devices, microbatches and schedules: which pipelines are tried, and each one searched."""
