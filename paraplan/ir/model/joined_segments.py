"""A program in which several segments are one: what runs once runs as before, under fewer borders.

Problem: a decision made of a segment as a whole (its inputs kept, all else made again) ends at its border. Method: the
joint graphs of a run of segments become one, forwards in order, then backwards in reverse; what passes between them is
a value inside, whose gradient is the sum of what its readers give back. Runs of equal kinds wired alike become
instances of one kind. Values keep their names in the program, random numbers their seeds.

Limits: a run stays as it is in which one parameter is read by two segments, an output is handed on under two names, or
a backward reads the gradient of an output that nothing gives one to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from paraplan.ir.model.graph import Graph, Op, Phase, map_refs
from paraplan.ir.model.program import Program, Segment, SegmentKind
from paraplan.ir.model.tensor import TensorSpec


class _Wiring(NamedTuple):
    """How segments of a run hang together; equal ones are instances of one kind.

    Attributes:
        kinds: of each.
        inputs: per segment and input, (segment, output) of the run that makes it, or (-1, which of what comes from
            outside).
        fates: per segment and output, "out" where anything beyond the run reads it, "aside" where only auxiliary
            outputs do, else "".
    """

    kinds: tuple[int, ...]
    inputs: tuple[tuple[tuple[int, int], ...], ...]
    fates: tuple[tuple[str, ...], ...]


def join(program: Program, runs: Sequence[range]) -> tuple[Program, tuple[int, ...]]:
    """The program with runs of segments joined.

    Args:
        program: whose segments.
        runs: in order, without overlap.
    Returns:
        The program, and per segment of the old one its segment there.
    """
    readers = _readers(program)
    known: dict[_Wiring, int | None] = {}
    kinds: list[SegmentKind] = []
    segments: list[Segment] = []
    place: list[int] = []

    def add(run: range) -> bool:
        """Join a run; False: it stays as it is."""
        wiring, outside = _wiring(program, run, readers)
        if wiring not in known:
            kind = _JoinedKind(program, wiring).made(f"k{len(kinds)}")
            known[wiring] = None if kind is None else len(kinds)
            kinds.extend([] if kind is None else [kind])
        at = known[wiring]
        if at is not None:
            segments.append(_instance(program, run, wiring, outside, at))
            place.extend([len(segments) - 1] * len(run))
        return at is not None

    for run in _covering(runs, len(program.segments)):
        if _reads_twice(program, run) or not add(run):
            for index in run:
                add(range(index, index + 1))
    return msgspec.structs.replace(program, kinds=tuple(kinds), segments=tuple(segments)), tuple(place)


def _covering(runs: Sequence[range], count: int) -> Iterator[range]:
    """The runs, and every segment between them by itself."""
    done = 0
    for run in (*runs, range(count, count)):
        yield from (range(index, index + 1) for index in range(done, run.start))
        if run:
            yield run
        done = run.stop


def _reads_twice(program: Program, run: range) -> bool:
    names = [name for index in run for name in program.segments[index].params]
    return len(run) > 1 and len(set(names)) < len(names)


class _Readers(NamedTuple):
    """Per value, the last segment that reads it in training (infinity where the loss or a buffer does); and those that
    auxiliary outputs read."""

    last: dict[str, float]
    outputs: frozenset[str]


def _readers(program: Program) -> _Readers:
    last: dict[str, float] = {}
    for index, segment in enumerate(program.segments):
        last |= dict.fromkeys(segment.inputs, index)
    ends = [*(term.numerator for term in program.loss), *program.buffer_updates.values()]
    outputs = frozenset(name for output in program.outputs.values() for name in output.inputs)
    return _Readers(last | dict.fromkeys(ends, float("inf")), outputs)


def _wiring(program: Program, run: range, readers: _Readers) -> tuple[_Wiring, tuple[str, ...]]:
    """How a run hangs together, and what it reads from outside."""
    made: dict[str, tuple[int, int]] = {}
    outside: dict[str, int] = {}
    inputs, fates = [], []
    for at, index in enumerate(run):
        segment = program.segments[index]
        inputs.append(
            tuple(made[n] if n in made else (-1, outside.setdefault(n, len(outside))) for n in segment.inputs)
        )
        made |= {name: (at, output) for output, name in enumerate(segment.outputs)}
        fates.append(tuple(_fate(name, index, run, readers) for name in segment.outputs))
    kinds = tuple(program.segments[index].kind for index in run)
    return _Wiring(kinds, tuple(inputs), tuple(fates)), tuple(outside)


def _fate(name: str, index: int, run: range, readers: _Readers) -> str:
    if index == run[-1] or readers.last.get(name, -1) > run[-1]:
        return "out"
    return "aside" if name in readers.outputs else ""


def _instance(program: Program, run: range, wiring: _Wiring, outside: tuple[str, ...], kind: int) -> Segment:
    """The segment that a run becomes."""
    every = [program.segments[index] for index in run]

    def with_fate(fate: str) -> list[str]:
        pairs = [zip(each.outputs, fates, strict=True) for each, fates in zip(every, wiring.fates, strict=True)]
        return [name for pair in pairs for name, found in pair if found == fate]

    return Segment(
        kind=kind,
        params=tuple(name for each in every for name in each.params),
        inputs=outside,
        outputs=tuple(with_fate("out")),
        asides=(*(name for each in every for name in each.asides), *with_fate("aside")),
        seeds=tuple(number for each in every for number in each.seeds),
    )


class _JoinedKind:
    """The kind of a run, built part by part.

    Attributes:
        names: per part, local name of its kind -> name in the joined graph.
        values: of the joined graph.
        ops: likewise.
        grads: per value that a part reads ((part, output), or (-1, input)), what readers give back.
    """

    def __init__(self, program: Program, wiring: _Wiring) -> None:
        self.wiring = wiring
        self.parts = [program.kinds[kind] for kind in wiring.kinds]
        self.names: list[dict[str, str]] = []
        self.values: dict[str, TensorSpec] = {}
        self.ops: list[Op] = []
        self.sources: dict[str, int] = {}
        self.grads: dict[tuple[int, int], list[str]] = {}

    def made(self, name: str) -> SegmentKind | None:
        """The kind; None where the parts cannot be one."""
        if len(self.parts) == 1:
            return msgspec.structs.replace(self.parts[0], name=name)
        given = self._given()
        for at in range(len(self.parts)):
            self._write(at, Phase.FORWARD)
        outputs = self._outputs("out")
        tangents = {spot: f"g{n}" if self._tangent(spot) else None for n, spot in enumerate(outputs)}
        if len(set(outputs.values())) < len(outputs) or not self._backwards(tangents):
            return None
        param_grads = tuple(self._named(at, grad) for at, part in enumerate(self.parts) for grad in part.param_grads)
        input_grads = tuple(self._summed((-1, at)) for at in range(len(given[1])))
        inside = [given[0], given[1], given[2], tuple(text for text in tangents.values() if text)]
        results = (*outputs.values(), *param_grads, *input_grads)
        graph = Graph(
            inputs=tuple(text for names in inside for text in names),
            outputs=results,
            values=self.values,
            ops=tuple(self.ops),
            sources=tuple(self.sources),
        )
        asides = [names[local] for part, names in zip(self.parts, self.names, strict=True) for local in part.asides]
        return SegmentKind(
            name=name,
            graph=graph,
            params=given[0],
            inputs=given[1],
            seeds=given[2],
            outputs=tuple(outputs.values()),
            tangents=tuple(tangents.values()),
            input_grads=input_grads,
            param_grads=param_grads,
            asides=(*asides, *self._outputs("aside").values()),
            own_backward=any(part.own_backward for part in self.parts),
        )

    def _given(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Names the parameters, inputs and seeds, and every part's own values."""
        found: tuple[dict[str, TensorSpec], ...] = ({}, {}, {})
        for at, (part, reads) in enumerate(zip(self.parts, self.wiring.inputs, strict=True)):
            names = {local: f"{local}_{at}" for local in part.graph.values}
            for kind, prefix, locals_ in ((0, "p", part.params), (2, "seed", part.seeds)):
                for local in locals_:
                    names[local] = f"{prefix}{len(found[kind])}"
                    found[kind][names[local]] = part.graph.values[local]
            for local, (maker, number) in zip(part.inputs, reads, strict=True):
                names[local] = f"x{number}" if maker < 0 else self._out(maker, number)
                if maker < 0:
                    found[1][names[local]] = part.graph.values[local]
            self.names.append(names)
        for each in found:
            self.values |= each
        return tuple(found[0]), tuple(found[1]), tuple(found[2])

    def _out(self, part: int, output: int) -> str:
        return self.names[part][self.parts[part].outputs[output]]

    def _outputs(self, fate: str) -> dict[tuple[int, int], str]:
        """Where outputs of some fate are made -> their names."""
        spots = [(at, n) for at, fates in enumerate(self.wiring.fates) for n, of in enumerate(fates) if of == fate]
        return {spot: self._out(*spot) for spot in spots}

    def _tangent(self, spot: tuple[int, int]) -> str | None:
        return self.parts[spot[0]].tangents[spot[1]]

    def _named(self, part: int, local: str | None) -> str | None:
        return None if local is None else self.names[part][local]

    def _write(self, at: int, phase: Phase) -> None:
        """A part's ops of one phase."""
        part, names = self.parts[at], self.names[at]
        for op in part.graph.ops:
            if op.phase is not phase:
                continue
            source = self.sources.setdefault(part.graph.sources[op.source], len(self.sources)) if op.source >= 0 else -1
            self.ops.append(
                msgspec.structs.replace(
                    op,
                    args=map_refs(op.args, names.__getitem__),
                    kwargs={key: map_refs(arg, names.__getitem__) for key, arg in op.kwargs.items()},
                    outs=tuple(self._named(at, out) for out in op.outs),
                    source=source,
                )
            )
            self.values |= {names[out]: part.graph.values[out] for out in op.outs if out is not None}

    def _backwards(self, tangents: dict[tuple[int, int], str | None]) -> bool:
        """All backwards, the last part's first; False where a gradient is missing that one reads."""
        for spot, name in tangents.items():
            if name is not None:
                self.grads[spot] = [name]
                self.values[name] = self.values[self._out(*spot)]
        for at in reversed(range(len(self.parts))):
            part = self.parts[at]
            for output, tangent in enumerate(part.tangents):
                total = self._summed((at, output))
                if (total is None) != (tangent is None):
                    return False
                if tangent is not None and total is not None:
                    self.names[at][tangent] = total
            self._write(at, Phase.BACKWARD)
            for grad, spot in zip(part.input_grads, self.wiring.inputs[at], strict=True):
                if grad is not None:
                    self.grads.setdefault(spot, []).append(self.names[at][grad])
        return True

    def _summed(self, spot: tuple[int, int]) -> str | None:
        """All that is given back to a value, added."""
        total: str | None = None
        for grad in self.grads.pop(spot, []):
            if total is None:
                total = grad
                continue
            made = f"sum{len(self.ops)}"
            self.ops.append(
                Op(target="aten.add.Tensor", args=(f"%{total}", f"%{grad}"), outs=(made,), phase=Phase.BACKWARD)
            )
            self.values[made], total = self.values[total], made
        return total
