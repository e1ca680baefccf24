"""What a run goes on from: parameters and their shards, weights' sources, checkpoints, a model's captured settings."""
