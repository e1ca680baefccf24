"""What no plan of an option space is faster than; `solve` and the joint search come in."""
