"""What a rank did, one line at a time: the sequence prediction and recording share.

`cost_models.simulator.live_bytes.entries` derives it from a `RankProgram`; the runtime's recorder writes it while
running.
The two are equal, entry by entry, in everything but `note`. The rules both follow:

* One entry per executed `Instr` (op, collective, copy, wait), one per ACCUMULATE, UPDATE, SEND, RECV and AWAIT, in
  order.
* One entry with target "drop" wherever storage dies outside of those, and only if that frees more than 0
  bytes anywhere: in a DROP step; as a call begins (names in the step's `drops` that the block never reads); as a
  call ends (values the block neither freed nor returned, results nobody takes, an outer name bound anew).
* `allocated_bytes`: storage bytes of the fresh storages among the outputs (`LocalValue.storage_bytes` of
  outputs that are their own base); what RECV receives into, and what SEND copies. 0 for ACCUMULATE, UPDATE, "drop",
  WAIT and AWAIT. Workspace is not counted.
* `freed_bytes`: bytes of the storages that died because of this entry. A storage dies when the last name
  that holds it goes: names of the outer namespace and names of the running block alike, views included. An
  input given up by the outer namespace (`Step.drops`) dies where the block lets go of it: at the
  instruction whose `frees` names it (or, where none does, at the last instruction that reads it).
* Both count the device alone. What an entry does to a tier (`ir.machine.tiers.TIERS`) is said by `tiers`, by the same
  rules: an offload allocates there, and the wait of a prefetch commonly frees.
* ACCUMULATE that finds no accumulator moves the addend and frees nothing; one that adds frees the addend.
"""

from __future__ import annotations

from paraplan.ir.struct import Value


class Entry(Value, frozen=True, kw_only=True):
    """One thing a rank did.

    Attributes:
        action: the schedule's action it belongs to, e.g. "0F1".
        segment: whose instance ran; -1 for none.
        microbatch: -1 outside of microbatches.
        target: the op or collective; "wait", "accumulate", "update" or "drop" for the others.
        shapes: local shapes of the outputs that exist, in order; ACCUMULATE: the accumulator's; SEND and RECV: of what
            they allocate; else ().
        allocated_bytes, freed_bytes: see the module's head.
        collective: "<target>@<mesh axis>" for a COLLECTIVE, a message's name for SEND, RECV and AWAIT, else "".
        tiers: (tier, bytes allocated, bytes freed) of every tier where either is not 0, by name.
        note: for people ("k2.0.F[17]"); never compared.
    """

    action: str
    segment: int
    microbatch: int
    target: str
    shapes: tuple[tuple[int, ...], ...] = ()
    allocated_bytes: int = 0
    freed_bytes: int = 0
    collective: str = ""
    tiers: tuple[tuple[str, int, int], ...] = ()
    note: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """What prediction and recording must agree on."""
        return (
            self.action,
            self.segment,
            self.microbatch,
            self.target,
            self.shapes,
            self.allocated_bytes,
            self.freed_bytes,
            self.collective,
            self.tiers,
        )
