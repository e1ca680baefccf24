"""The named families of pipeline schedules, each a function to orders of computations."""
