"""What is trained: graphs of named values, segments of a few kinds, the program they make up, and its digests.

Written by capture, read by every room; no torch.
"""
