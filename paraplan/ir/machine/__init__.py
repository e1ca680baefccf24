"""What it is trained on: cluster, meshes with named axes, layouts and moves between them, collectives, memory tiers.

Records that a new collective, tier or kind of device adds to; no torch.
"""
