"""Where a chain of segments is cut into stages: arithmetic on seconds and bytes. Pipelines and their bounds come in."""
