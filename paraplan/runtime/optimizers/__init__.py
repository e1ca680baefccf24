"""The user's optimizer over shards: fused, streamed, delayed, scaled, its gradients measured and clipped."""
