"""The steps of one rank, part by part: what the loss divides by, its gradient, and the loss itself.

A group of ranks deals with the terms of the loss whose numerators it makes. Where several groups hold stages, each
sends its share of the loss to the others and adds up what it gets, in the order of the groups, so that the loss is
whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paraplan.ir.execution import names as outer_names
from paraplan.ir.execution.name import Name
from paraplan.ir.execution.names import LOSS, LOSS_SCALE
from paraplan.ir.execution.rank_program import StepKind
from paraplan.ir.machine.mesh import Layout, R
from paraplan.ir.machine.reshard import reshard_path
from paraplan.ir.model.program import LossTerm
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.blocks.grad_reduction import Reductions
from paraplan.lowering.blocks.small_blocks import count_block, loss_block, tangent_block
from paraplan.lowering.rank_group import RankGroup
from paraplan.lowering.steps.step_writer import StepWriter, Transfer
from paraplan.lowering.transfers.bundled_transfers import BundledValue


class LossSteps:
    """Writes the steps of the loss.

    Args:
        rank, writer: whose steps are written.

    Attributes:
        numerators: those made here -> their terms.
        tangent_of: their gradients.
    """

    def __init__(self, rank: RankGroup, writer: StepWriter) -> None:
        self._rank, self._writer = rank, writer
        self.numerators = {
            term.numerator: index
            for index, term in enumerate(rank.program.loss)
            if rank.group in rank.lowered.groups_of(rank.lowered.maker[term.numerator])
        }
        self.tangent_of: dict[str, Name] = {}
        self._waits: list[Callable[[], None]] = []  # what ends the denominators

    @property
    def terms(self) -> dict[int, LossTerm]:
        """The terms whose numerators are made here, by their index."""
        made = set(self.numerators.values())
        return {index: term for index, term in enumerate(self._rank.program.loss) if index in made}

    def denominators(self) -> dict[int, Layout]:
        """Counts what the loss divides by, partial sums; how each lies."""
        layouts = {}
        needed = {term.denominator for term in self.terms.values()}
        batch = self._rank.lowered.routes[0].parts[self._rank.group].given
        for index, denominator in enumerate(self._rank.program.denominators):
            if index not in needed:
                continue
            given = tuple(batch[name].layout for name in denominator.inputs)
            block, layout = count_block(
                f"den{index}", denominator, self._rank.lowered.micro.denominators[index], given, self._rank.extended
            )
            layouts[index] = layout
            named = dict(zip(denominator.graph.inputs, denominator.inputs, strict=True))
            for m in range(self._rank.m):
                args = tuple(self._rank.at(named[local], m) for local in block.inputs)
                count = outer_names.denominator(index, m)
                self._writer.call(block, args, (count,), m)
                self._writer.add(StepKind.ACCUMULATE, args=(outer_names.denominator(index), count), microbatch=m)
        return layouts

    def tangents(self, layouts: dict[int, Layout]) -> None:
        """Begin whole denominators, and the gradient of every numerator."""
        scaled = self._rank.program.precision == "fp16"
        for index, term in self.terms.items():
            spec, d = self._rank.lowered.spec_of(term.numerator), term.denominator
            block = tangent_block(
                f"tangent{index}",
                spec,
                None if d is None else layouts[d],
                self._rank.extended,
                scaled=scaled,
                share=1.0 / self._rank.program.apart,
            )
            sources = {"scale": LOSS_SCALE} | ({} if d is None else {"count": outer_names.denominator(d)})
            total = None if d is None else outer_names.total(index)
            self.tangent_of[term.numerator] = outer_names.tangent(index)
            transfer = Transfer(block, sources, (total, outer_names.tangent(index)))
            self._waits.append(self._writer.issue(transfer).wait)

    def end_waits(self) -> None:
        """Denominators are whole and gradients of numerators known from here on."""
        while self._waits:
            self._waits.pop(0)()

    def joining(self, reductions: Reductions) -> tuple[BundledValue, ...]:
        """Numerators of the loss that are summed along with gradients rather than by themselves.

        None where another one is summed by itself: the loss is begun with that sum, before gradients are.
        """
        whole = (R,) * len(self._rank.extended)
        found = []
        for index, term in self.terms.items():
            spec, layout = self._rank.lowered.spec_of(term.numerator), (R, *self._rank.made(term.numerator).layout[1:])
            path = reshard_path(spec.shape, layout, whole, self._rank.extended, frozen=1)
            if reductions.takes(spec, path):
                made = outer_names.numerator(index)
                found.append(BundledValue(made, made.moved, spec, path))
            elif path:
                return ()
        return tuple(found)

    def begin_loss(self, joined: Sequence[BundledValue]) -> Callable[[], None]:
        """The loss from what the microbatches say, begun; what ends it. `joined` are whole by then.

        Of several terms one may be divided before another's sum is begun: the ends of denominators come first.
        """
        if not self.terms:
            return lambda: None
        rank = self._rank
        indices, terms = tuple(self.terms), tuple(self.terms.values())
        specs = tuple(rank.lowered.spec_of(term.numerator) for term in terms)
        came = {value.source: value.result for value in joined}
        layouts = tuple(
            (R,) * len(rank.extended) if outer_names.numerator(i) in came else rank.made(term.numerator).layout
            for i, term in self.terms.items()
        )
        block = loss_block("loss", terms, specs, layouts, rank.extended, 1.0 / rank.program.apart)
        divides = {f"denominator{at}" for at in range(len(indices))}
        while self._waits and block[0] is not None and not divides.isdisjoint(block[0].inputs):
            self._waits.pop(0)()
        made = [outer_names.numerator(i) for i in indices]
        names = {f"numerator{at}": came.get(each, each) for at, each in enumerate(made)}
        names |= {f"denominator{at}": outer_names.total(i) for at, i in enumerate(indices)}
        shares = tuple(self.share_of(name, self._rank.group) for name in self.losses(self._rank.group))
        return self._writer.issue(Transfer(block, names, shares)).wait

    @property
    def metrics(self) -> dict[str, Name]:
        """Each of several losses: name -> outer name."""
        named = dict.fromkeys(term.name for term in self._rank.program.loss)
        return {name: outer_names.loss(name) for name in named if name}

    def losses(self, group: int) -> tuple[Name, ...]:
        """The outer names of the loss and of each of several losses that a group has a share of."""
        lowered = self._rank.lowered
        terms = [term for term in self._rank.program.loss if group in lowered.groups_of(lowered.maker[term.numerator])]
        named = [outer_names.loss(name) for name in dict.fromkeys(term.name for term in terms) if name]
        return (LOSS, *named) if terms else ()

    def share_of(self, name: Name, group: int) -> Name:
        """The outer name of a group's share of a loss: that of the loss where nobody else has one."""
        return name if self.sharers(name) == (group,) == (self._rank.group,) else name.of_group(group)

    def sharers(self, name: Name) -> tuple[int, ...]:
        """The groups that have a share of a loss, in order."""
        return tuple(group for group in range(len(self._rank.lowered.held)) if name in self.losses(group))

    def loss_spec(self) -> TensorSpec:
        """The spec of the loss and of every share of it."""
        return self._rank.lowered.spec_of(self._rank.program.loss[0].numerator)

    def add_loss(self) -> None:
        """Add up the shares of the loss, all of which are here."""
        for name in (LOSS, *self.metrics.values()):
            for group in self.sharers(name):
                if self.share_of(name, group) != name:
                    self._writer.add(StepKind.ACCUMULATE, args=(name, self.share_of(name, group)))
