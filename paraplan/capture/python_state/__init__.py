"""What a forward reads and leaves in Python: settings, code, attributes, writes, and the shape of what it returns.

The runtime holds a model against it before every step, so it comes in here too.
"""
