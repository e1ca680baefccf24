"""What a kind may recompute: from keeping everything to keeping nothing, the options worth having.

For a price per byte λ, the least of (seconds recomputed) + λ (bytes saved) is a minimum cut. Every forward op i has a
node a_i (executed again in the backward?), every value v it makes a node n_v (wanted in the backward?):

    a_i yes                    costs the op's seconds
    n_v yes, a_i no            costs λ times the bytes of v's storage: v is saved
    v read by the backward  =>  n_v yes         a_i yes  =>  n_u yes for every u that op i reads

The answers over all λ are the lower convex hull of (bytes saved, seconds), found by asking for the λ at which two known
points cost the same until nothing lies below. What is held outside of the segment anyhow (its inputs, parameters,
outputs and views of them) is free.

Limits: a value is recomputed at most once, and what recomputing holds for a moment is left to the simulator.
Source: min-cut partitioning of joint graphs (Zheng et al. 2022, "Sequential/min-cut rematerialization" in functorch),
here with measured seconds against bytes in place of a ban on dear ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paraplan.ir.model.graph import Phase
from paraplan.ir.model.program import SegmentKind
from paraplan.lowering.blocks.remat import RECOMPUTE, RERUN, read_by_backward, recomputable, remat_of
from paraplan.planner.solvers.min_cut import sink_side
from paraplan.rules.storage_roots import storage_roots

MOST_OPTIONS = 12
"""Of a kind: the hull of a transformer's half block has fewer."""

MOST_AWAY = 6
"""How many sets of an option's values may be away."""


_SOURCE, _SINK = 0, 1


@dataclass(frozen=True)
class RematOption:
    """What one instance of a kind may do.

    Attributes:
        recomputed: the values made again.
        rerun: those whose ops are executed again for nothing.
        deferred_bytes: what it holds between the halves of a backward in two, where that was asked for.
        saved_bytes: what it holds on the device from its forward to its backward.
        extra_s: seconds of executing ops again.
        away: the values that wait on `tier`.
        tier: "" where none do.
        away_bytes: what they take there.
        copy_s: seconds of copying them, each way.
    """

    recomputed: tuple[str, ...]
    saved_bytes: int
    extra_s: float
    away: tuple[str, ...] = ()
    tier: str = ""
    away_bytes: int = 0
    copy_s: float = 0.0
    rerun: tuple[str, ...] = ()
    deferred_bytes: int = 0

    @property
    def activations(self) -> dict[str, str]:
        """As `KindChoice.activations`."""
        again = dict.fromkeys(self.recomputed, RECOMPUTE) | dict.fromkeys(self.rerun, RERUN)
        return again | dict.fromkeys(self.away, self.tier)


def kind_options(
    kind: SegmentKind,
    op_s: Sequence[float],
    nbytes: Mapping[str, int],
    pinned: Mapping[str, str] | None = None,
    roots: Mapping[str, str] | None = None,
) -> tuple[RematOption, ...]:
    """The hull of (bytes saved, seconds recomputed), most bytes first.

    Args:
        kind: whose.
        op_s: seconds of every op of the joint graph under its strategy; those of forward ops are read.
        nbytes: local bytes of every value the forward makes, and of the storages that `roots` names beside.
        pinned: the fates of its values, if they are not to be chosen.
        roots: of every value, what names its storage; None: a view's is what it views.
    """
    cuts = _Cuts(kind, op_s, nbytes, roots)
    if pinned is not None:
        return (cuts.option(*(tuple(n for n, of in pinned.items() if of == fate) for fate in (RECOMPUTE, RERUN))),)
    most, least = cuts.option(()), cuts.leanest()
    found = {(option.saved_bytes, option.extra_s): option for option in (most, least)}
    pending = [(most, least)]
    while pending and len(found) < MOST_OPTIONS:
        high, low = pending.pop(0)
        if low.saved_bytes >= high.saved_bytes:
            continue
        between = cuts.cut((low.extra_s - high.extra_s) / (high.saved_bytes - low.saved_bytes))
        if _below(between, high, low):
            found[between.saved_bytes, between.extra_s] = between
            pending += [(high, between), (between, low)]
    return tuple(sorted(found.values(), key=lambda option: (-option.saved_bytes, option.extra_s)))


def away_options(
    kind: SegmentKind,
    nbytes: Mapping[str, int],
    options: Sequence[RematOption],
    tier: str,
    copy_s: Callable[[int], float],
    handed: Sequence[str] = (),
    roots: Mapping[str, str] | None = None,
) -> tuple[RematOption, ...]:
    """Each option with some of what it saves on a tier instead: the largest storages, more and more of them.

    A copy costs its latency and its bytes over the link's bandwidth, so of two sets of equal bytes the one of fewer,
    larger storages is dearer nowhere. A storage leaves the device only if all values saved in it do.

    Args:
        kind, nbytes, roots: as for `kind_options`.
        options: which keep or recompute.
        tier: where to.
        copy_s: seconds of one copy of so many bytes.
        handed: outputs of the kind that may leave as well; what the options save counts them.
    """
    cuts = _Cuts(kind, (0.0,) * len(kind.graph.ops), nbytes, roots)
    found = []
    for option in options:
        # What only looks at another value's storage is looked up again, not copied beside it.
        looks = tuple(
            n for n in cuts.allowed if n in cuts.nbytes and cuts.roots[n] != n and cuts.roots[n] in cuts.allowed
        )
        again = cuts.option((*option.recomputed, *looks), option.rerun).recomputed
        option = replace(option, recomputed=again)
        together: dict[str, list[str]] = {}
        saved = remat_of(kind, option.activations).saved
        for name in saved:
            if name in cuts.nbytes:
                together.setdefault(cuts.roots[name], []).append(name)
        looked = {cuts.roots[name] for name in saved}
        fixed = {cuts.roots[name] for name in saved if name in cuts.nbytes and name not in cuts.allowed}
        together = {root: names for root, names in together.items() if root not in fixed}
        together |= {name: [name] for name in handed if cuts.roots.get(name) == name and name not in looked}
        order = sorted(together, key=lambda root: (-nbytes[root], root))
        counts = {math.ceil(len(order) * share / MOST_AWAY) for share in range(1, MOST_AWAY + 1)} - {0}
        for count in sorted(counts):
            names = [name for root in order[:count] for name in together[root]]
            held = option.saved_bytes - sum(nbytes[root] for root in order[:count])
            moved = [nbytes[name] for name in names]
            found.append(
                replace(
                    option,
                    saved_bytes=held,
                    away=tuple(names),
                    tier=tier,
                    away_bytes=sum(moved),
                    copy_s=sum(map(copy_s, moved)),
                )
            )
    return tuple(found)


def _below(point: RematOption, high: RematOption, low: RematOption) -> bool:
    """Whether a point lies strictly under the line between two others."""
    if not low.saved_bytes < point.saved_bytes < high.saved_bytes:
        return False
    share = (high.saved_bytes - point.saved_bytes) / (high.saved_bytes - low.saved_bytes)
    line = high.extra_s + share * (low.extra_s - high.extra_s)
    return point.extra_s < line - 1e-9 * max(low.extra_s, 1e-12)


class _Arcs(NamedTuple):
    """A network: per arc its ends, and the seconds and bytes that cutting it costs; per op, its node."""

    ops: dict[int, int]
    tails: npt.NDArray[np.int64]
    heads: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]
    nbytes: npt.NDArray[np.float64]


class _Cuts:
    """The cut problem of a kind, solved for one price per byte after another."""

    def __init__(
        self,
        kind: SegmentKind,
        op_s: Sequence[float],
        nbytes: Mapping[str, int],
        roots: Mapping[str, str] | None = None,
    ) -> None:
        self.kind, self.op_s = kind, op_s
        self.roots = storage_roots(kind) if roots is None else roots
        self.free = {*kind.graph.inputs, *kind.outputs}
        self.free |= {name for name, root in self.roots.items() if root in self.free}
        self.free |= {name for name, root in self.roots.items() if root in {self.roots.get(o) for o in kind.outputs}}
        self.nbytes = {
            name: nbytes[self.roots[name]] for name in self.roots if name in nbytes and name not in self.free
        }
        self._sizes = {self.roots[name]: size for name, size in self.nbytes.items()}
        self.allowed = frozenset(recomputable(kind))
        self.forward = [index for index, op in enumerate(kind.graph.ops) if op.phase is Phase.FORWARD]
        self.makers = {out: index for index in self.forward for out in kind.graph.ops[index].outs if out is not None}

    def option(self, recomputed: tuple[str, ...], rerun: tuple[str, ...] = ()) -> RematOption:
        """What recomputing some values comes to."""
        remat = remat_of(self.kind, dict.fromkeys(recomputed, RECOMPUTE) | dict.fromkeys(rerun, RERUN))
        held = {self.roots[name] for name in remat.saved if name in self.nbytes}
        again = {out for index in remat.again for out in self.kind.graph.ops[index].outs if out is not None}
        return RematOption(
            tuple(name for name in self.kind.graph.values if name in again),
            sum(self._sizes.get(root, 0) for root in held),
            sum(self.op_s[index] for index in (*remat.again, *remat.rerun)),
            rerun=rerun,
        )

    def leanest(self) -> RematOption:
        """The least of bytes, and of seconds among those: at a price at which the least that two sets of values differ
        by costs more than all ops."""
        nbytes = [int(each) for each in self._arcs.nbytes if each]
        return self.cut((2 * sum(self.op_s) or 1.0) / math.gcd(*nbytes)) if nbytes else self.option(())

    def cut(self, price: float) -> RematOption:
        """The least of seconds + price · bytes."""
        arcs = self._arcs
        again = sink_side(arcs.tails, arcs.heads, arcs.seconds + price * arcs.nbytes, _SOURCE, _SINK)
        return self.option(
            tuple(out for out, index in self.makers.items() if arcs.ops[index] in again and out in self.allowed)
        )

    @cached_property
    def _arcs(self) -> _Arcs:
        """The network: what is cut costs the seconds, and so much a byte."""
        graph, found = self.kind.graph, list[tuple[int, int, float, int]]()
        ops = {index: 2 + at for at, index in enumerate(self.forward)}
        values = {name: 2 + len(ops) + at for at, name in enumerate(self.makers)}
        wanted = read_by_backward(self.kind)
        for index in self.forward:
            outs = [out for out in graph.ops[index].outs if out is not None]
            once = not self.allowed.issuperset(outs)
            found.append((_SOURCE, ops[index], math.inf if once else self.op_s[index], 0))
            found += [(ops[index], values[out], 0.0, self.nbytes.get(out, 0)) for out in outs]
            read = [name for name in graph.ops[index].tensors if name in self.makers and name not in self.free]
            found += [(values[name], ops[index], math.inf, 0) for name in read]
        found += [(values[n], _SINK, math.inf, 0) for n in self.makers if n in wanted and n not in self.free]
        tails, heads, seconds, nbytes = (np.array(column) for column in zip(*found, strict=True))
        return _Arcs(ops, tails, heads, seconds.astype(float), nbytes.astype(float))
