"""A plan held against one device: the captured program's steps, and the user's eager model's."""
