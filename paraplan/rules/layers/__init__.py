"""Rules of canonical ops that a layer is made of: attention, norms, convolutions, lookups, experts, float8."""
