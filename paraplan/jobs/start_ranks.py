"""Starting and leaving ranks, for the command: the runtime's own."""

from paraplan.runtime.transport.launch import leave_job, prepare_ranks
from paraplan.runtime.transport.launch import spawn_local as start_ranks

__all__ = ["leave_job", "prepare_ranks", "start_ranks"]
