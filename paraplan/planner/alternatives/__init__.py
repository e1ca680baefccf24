"""Other plans of a job: what a search tried, and what a plan file's job comes to with other pins or more memory.

Searches record what they try (`tried`); `explaining` comes in for the rest.
"""
