"""The storages of a block: who owns what, and when the block lets go of it.

A value's storage is that of the value it is a view of, all the way down; a block's input owns its own as far as the
block is concerned. What a block holds of a storage ends with the last of its names (`ir.execution.rank_program` has
the rule).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from paraplan.ir.execution.rank_program import Block
from paraplan.ir.model.graph import refs

BEGIN = -1


@dataclass(frozen=True)
class BlockStorages:
    """A block's storages."""

    block: Block

    @cached_property
    def results(self) -> tuple[str | None, ...]:
        """Local names behind a CALL's `outs`: outputs, then saved values."""
        return (*self.block.outputs, *self.block.saved)

    @cached_property
    def owners(self) -> dict[str, str]:
        """For every name, the name that owns its storage; inputs own theirs."""
        inputs, values = frozenset(self.block.inputs), self.block.values
        found: dict[str, str] = {}
        for name in values:
            root = name
            while root not in inputs and values[root].base != root:
                root = values[root].base
            found[name] = root
        return found

    @cached_property
    def released(self) -> dict[str, int]:
        """Per name: the instruction after which the block no longer holds it; BEGIN: an input it never reads.

        A name in no `frees` is held to its last use if it is an input, else to the end (index len(instrs)).
        """
        last_use = dict.fromkeys(self.block.inputs, BEGIN)
        end = len(self.block.instrs)
        found: dict[str, int] = {}
        for index, instr in enumerate(self.block.instrs):
            for name in refs((instr.args, tuple(instr.kwargs.values()))):
                if name in last_use:
                    last_use[name] = index
            found |= {name: end for name in instr.outs if name is not None}
            for name in instr.frees:
                found[name] = index
        return last_use | found

    @cached_property
    def last_hold(self) -> dict[str, int]:
        """Per owner: the instruction at which the block's last name of its storage goes."""
        found: dict[str, int] = {}
        for name, index in self.released.items():
            owner = self.owners[name]
            found[owner] = max(found.get(owner, BEGIN), index)
        return found

    @cached_property
    def fresh(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """Per instruction, the storages it makes: (owner, bytes)."""
        values, owners = self.block.values, self.owners
        return tuple(
            tuple((name, values[name].storage_bytes) for name in instr.outs if name and owners[name] == name)
            for instr in self.block.instrs
        )

    @cached_property
    def storage_bytes(self) -> dict[str, int]:
        """Bytes of every storage the block makes, by owner."""
        return {owner: size for made in self.fresh for owner, size in made}
