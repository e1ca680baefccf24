"""Rules for ops nobody wrote a rule for, found by running them on small tensors, whole and in shards."""
