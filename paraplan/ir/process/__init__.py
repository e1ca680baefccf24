"""This process: its cores, garbage collector, what it made lately or loads on first use; and processes beside it."""
