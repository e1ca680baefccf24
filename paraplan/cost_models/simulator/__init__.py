"""A plan's step in time and in memory, entry by entry as ranks execute it: streams, messages, storages, allocator."""
