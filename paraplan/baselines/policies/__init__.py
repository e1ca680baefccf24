"""Online policies: ops run in order, and when memory is short something is evicted."""
