"""torch.export of a fake model: what it would not follow is done in a way it does, and is put back."""
