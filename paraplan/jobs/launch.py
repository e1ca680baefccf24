"""Starting a plan's ranks on this machine; a name of the api's for what the runtime does."""

from paraplan.runtime.launch import spawn_local as start_ranks

__all__ = ["start_ranks"]
