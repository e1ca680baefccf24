"""What moving bytes costs: collectives over mesh axes, messages between meshes, copies to and from tiers."""
