"""What no combination is faster than: bounds over cuts, shardings and orders. The joint search alone comes in."""
