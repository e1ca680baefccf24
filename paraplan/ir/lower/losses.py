"""The steps of one rank, part by part: what the loss divides by, its gradient, and the loss itself.

A group of ranks deals with the terms of the loss whose numerators it makes. Where several groups hold stages, each
sends its share of the loss to the others and adds up what it gets, in the order of the groups, so that the loss is
whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paraplan.ir import names as outer_names
from paraplan.ir.lower.flights import Flight
from paraplan.ir.lower.parcels import Parcel
from paraplan.ir.lower.tail import TailSteps
from paraplan.ir.lower.updates import count_block, loss_block, tangent_block
from paraplan.ir.mesh import Layout, R
from paraplan.ir.names import LOSS, LOSS_SCALE, Name
from paraplan.ir.program import LossTerm
from paraplan.ir.rank_program import StepKind
from paraplan.ir.reshard import reshard_path
from paraplan.ir.tensor import TensorSpec


class LossSteps(TailSteps):
    """The part of `RankSteps` that deals with the loss."""

    @property
    def terms(self) -> dict[int, LossTerm]:
        """The terms whose numerators are made here, by their index."""
        made = set(self.numerators.values())
        return {index: term for index, term in enumerate(self.program.loss) if index in made}

    def denominators(self) -> dict[int, Layout]:
        """Counts what the loss divides by, partial sums; how each lies."""
        layouts = {}
        needed = {term.denominator for term in self.terms.values()}
        batch = self.lowered.routes[0].parts[self.group].given
        for index, denominator in enumerate(self.program.denominators):
            if index not in needed:
                continue
            given = tuple(batch[name].layout for name in denominator.inputs)
            block, layout = count_block(
                f"den{index}", denominator, self.lowered.micro.denominators[index], given, self.extended
            )
            layouts[index] = layout
            named = dict(zip(denominator.graph.inputs, denominator.inputs, strict=True))
            for m in range(self.m):
                args = tuple(self._at(named[local], m) for local in block.inputs)
                count = outer_names.denominator(index, m)
                self.add(StepKind.CALL, block, args=args, outs=(count,), microbatch=m)
                self.add(StepKind.ACCUMULATE, args=(outer_names.denominator(index), count), microbatch=m)
        return layouts

    def tangents(self, layouts: dict[int, Layout]) -> list[Callable[[], None]]:
        """Whole denominators, and the gradient of every numerator; begun, with what ends each."""
        ends = []
        scaled = self.program.precision == "fp16"
        for index, term in self.terms.items():
            spec, d = self.lowered.spec_of(term.numerator), term.denominator
            block = tangent_block(
                f"tangent{index}", spec, None if d is None else layouts[d], self.extended, scaled=scaled,
                share=1.0 / self.program.apart,
            )  # fmt: skip
            sources = {"scale": LOSS_SCALE} | ({} if d is None else {"count": outer_names.denominator(d)})
            total = None if d is None else outer_names.total(index)
            self.tangent_of[term.numerator] = outer_names.tangent(index)
            ends.append(self.writer.issue(Flight(block, sources, (total, outer_names.tangent(index)))))
        return ends

    def joining(self) -> tuple[Parcel, ...]:
        """Numerators of the loss that are summed along with gradients rather than by themselves.

        None where another one is summed by itself: the loss is begun with that sum, before gradients are.
        """
        whole = (R,) * len(self.extended)
        parcels = []
        for index, term in self.terms.items():
            spec, layout = self.lowered.spec_of(term.numerator), (R, *self.made(term.numerator).layout[1:])
            path = reshard_path(spec.shape, layout, whole, self.extended, frozen=1)
            if self.reductions.takes(spec, path):
                made = outer_names.numerator(index)
                parcels.append(Parcel(made, made.moved, spec, path))
            elif path:
                return ()
        return tuple(parcels)

    def begin_loss(self, joined: Sequence[Parcel], waits: list[Callable[[], None]]) -> Callable[[], None]:
        """The loss from what the microbatches say, begun; what ends it. `joined` are whole by then.

        Of several terms one may be divided before another's sum is begun: `waits`, which end denominators, come first.
        """
        if not self.terms:
            return lambda: None
        indices, terms = tuple(self.terms), tuple(self.terms.values())
        specs = tuple(self.lowered.spec_of(term.numerator) for term in terms)
        came = {parcel.source: parcel.result for parcel in joined}
        layouts = tuple(
            (R,) * len(self.extended) if outer_names.numerator(i) in came else self.made(term.numerator).layout
            for i, term in self.terms.items()
        )
        block = loss_block("loss", terms, specs, layouts, self.extended, 1.0 / self.program.apart)
        divides = {f"denominator{at}" for at in range(len(indices))}
        while waits and block[0] is not None and not divides.isdisjoint(block[0].inputs):
            waits.pop(0)()
        made = [outer_names.numerator(i) for i in indices]
        names = {f"numerator{at}": came.get(each, each) for at, each in enumerate(made)}
        names |= {f"denominator{at}": outer_names.total(i) for at, i in enumerate(indices)}
        shares = tuple(self.share_of(name, self.group) for name in self.losses(self.group))
        return self.writer.issue(Flight(block, names, shares))

    @property
    def metrics(self) -> dict[str, Name]:
        """Each of several losses: name -> outer name."""
        named = dict.fromkeys(term.name for term in self.program.loss)
        return {name: outer_names.loss(name) for name in named if name}

    def losses(self, group: int) -> tuple[Name, ...]:
        """The outer names of the loss and of each of several losses that a group has a share of."""
        terms = [
            term for term in self.program.loss if group in self.lowered.groups_of(self.lowered.maker[term.numerator])
        ]
        named = [outer_names.loss(name) for name in dict.fromkeys(term.name for term in terms) if name]
        return (LOSS, *named) if terms else ()

    def share_of(self, name: Name, group: int) -> Name:
        """The outer name of a group's share of a loss: that of the loss where nobody else has one."""
        return name if self.sharers(name) == (group,) == (self.group,) else name.of_group(group)

    def sharers(self, name: Name) -> tuple[int, ...]:
        """The groups that have a share of a loss, in order."""
        return tuple(group for group in range(len(self.lowered.held)) if name in self.losses(group))

    def loss_spec(self) -> TensorSpec:
        """The spec of the loss and of every share of it."""
        return self.lowered.spec_of(self.program.loss[0].numerator)

    def add_loss(self) -> None:
        """Add up the shares of the loss, all of which are here."""
        for name in (LOSS, *self.metrics.values()):
            for group in self.sharers(name):
                if self.share_of(name, group) != name:
                    self.add(StepKind.ACCUMULATE, args=(name, self.share_of(name, group)))
