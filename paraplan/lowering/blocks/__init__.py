"""A kind under one choice -> its blocks: forward, backward or two halves of it, changes of layout, order."""
