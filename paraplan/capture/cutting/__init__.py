"""Cuts the forward graph into segments and finds the kinds among them, the loss's terms and the outputs."""
