"""Plain modules to plan for: `paraplan plan examples.models.mlp:factory local:4`."""
