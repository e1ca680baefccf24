"""This process: its cores, its garbage collector, what it made lately, what it loads on first use."""
