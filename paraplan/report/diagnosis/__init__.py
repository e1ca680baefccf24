"""Why a plan takes what it takes, computed: what binds, what more would be worth, beside what else was tried.

`explaining` comes in, the terminal and the HTML read the records.
"""
