"""What segments hold of each other's results: inputs that a backward reads, and outputs that their own reads.

A program's value is held once however many segments read it, so each of those whose backward does has its share; a kind
has the mean of its instances'. What comes from the batch, parameters and buffers is held anyhow.

Limits: a pipeline holds a value that several of its stages read on each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from paraplan.ir.model.program import Program, SegmentKind, Source, source_of
from paraplan.lowering.blocks.remat import read_by_backward, remat_of
from paraplan.planner.recompute.kind_options import RematOption
from paraplan.planner.recompute.local_storages import Storages
from paraplan.planner.recompute.split_backward import deferred_bytes

Shares = Mapping[str, float]
"""Of a kind: local bytes of its inputs and outputs, each divided by the segments that hold it."""


def held_shares(program: Program, storages: Sequence[Storages]) -> tuple[Shares, ...]:
    """Per kind, what an instance has of every input and output.

    Args:
        program: the model.
        storages: per kind, those of its values in all phases.
    """
    sizes = {
        value: storages[segment.kind].nbytes.get(name, 0)
        for segment in program.segments
        for value, name in zip(segment.outputs, program.kinds[segment.kind].outputs, strict=True)
    }
    kinds = zip(program.kinds, storages, strict=True)
    reads = [_outside(kind, lies.roots, read_by_backward(kind)) for kind, lies in kinds]
    holders: Counter[str] = Counter()
    for segment in program.segments:
        names = dict(_values(program, segment.kind, segment.inputs, segment.outputs))
        holders.update({names[name] for name in reads[segment.kind] if name in names})
    found = [dict[str, float]() for _ in program.kinds]
    instances = Counter(segment.kind for segment in program.segments)
    for segment in program.segments:
        of = found[segment.kind]
        for name, value in _values(program, segment.kind, segment.inputs, segment.outputs):
            share = sizes.get(value, 0) / max(holders[value], 1)
            of[name] = of.get(name, 0.0) + share / instances[segment.kind]
    return tuple(found)


def with_inputs(
    kind: SegmentKind, shares: Shares, storages: Storages, options: Sequence[RematOption]
) -> tuple[RematOption, ...]:
    """A kind's options with what each holds of the results of other segments, and between the halves of a backward in
    two, most bytes saved first.

    Args:
        kind: whose.
        shares: of its inputs and outputs.
        storages: of its values in all phases.
        options: what an instance may do.
    """
    tangents = zip(kind.tangents, kind.outputs, strict=True)
    sizes = storages.nbytes
    counted = {**sizes, **shares, **{name: sizes.get(out, 0) for name, out in tangents if name is not None}}
    ops, found = kind.graph.ops, []
    for option in options:
        again = remat_of(kind, option.activations).again
        read = _outside(kind, storages.roots, read_by_backward(kind).union(*(ops[at].tensors for at in again)))
        saved = option.saved_bytes + int(sum(shares.get(name, 0.0) for name in read))
        found.append(
            replace(option, saved_bytes=saved, deferred_bytes=int(deferred_bytes(kind, counted, storages.roots, again)))
        )
    return tuple(sorted(found, key=lambda each: (-each.saved_bytes, each.extra_s)))


def _outside(kind: SegmentKind, roots: Mapping[str, str], names: set[str]) -> set[str]:
    """Of the values read, the inputs and outputs whose storage they lie in."""
    outside = {roots.get(name, name): name for name in (*kind.outputs, *kind.inputs)}
    return {outside[root] for root in (roots.get(name, name) for name in names) if root in outside}


def _values(program: Program, kind: int, inputs: Sequence[str], outputs: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name in the kind's graph, value of the program) of an instance's results of segments."""
    named = program.kinds[kind]
    for name, value in (*zip(named.inputs, inputs, strict=True), *zip(named.outputs, outputs, strict=True)):
        if source_of(value)[0] is Source.SEGMENT:
            yield name, value
