"""Calls of torch's functions that a forward makes again and again, traced once."""
