"""Plans told to people: words, HTML, SVG, timelines, memory. Rows that text, pages and the terminal share.

No torch; `api`, `terminal` and `cli` come in.
"""
