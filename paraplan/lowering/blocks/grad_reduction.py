"""Bringing gradients to where they accumulate and to the layout the optimizer updates in, while the backward goes on.

`Partials` takes the gradients that blocks leave as they are made (see `forward`), small and in need of a sum over
ranks, brings those of several segments to the accumulator's layout at once, and adds them up. `Reductions` follows: a
gradient is final when the last microbatch's backward has passed the first segment that uses its parameter, and
everything has been added. Its reduction is issued there and waited for after the backward; large ones are reduced in
place, as nobody else reads the accumulator any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from paraplan.ir.execution.name import Name
from paraplan.ir.execution.names import accumulator, grad
from paraplan.ir.execution.rank_program import BlockRole
from paraplan.ir.machine.mesh import Layout, R, parse_layout
from paraplan.ir.machine.reshard import Move, reshard_path
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.blocks.bundle import bundle_key
from paraplan.lowering.rank_group import RankGroup
from paraplan.lowering.steps.step_writer import StepWriter
from paraplan.lowering.transfers.bundled_transfers import IN_FLIGHT, BundleBlocks, BundledTransfers, BundledValue
from paraplan.lowering.transfers.transfer_queue import TransferQueue


class Reductions(BundledTransfers):
    """The gradient reductions of a step.

    Args:
        rank, writer: whose steps are written.
        accumulates: the dtype of every accumulator.
        reduced: told of every parameter and its gradient, once that is in the optimizer's layout.

    Attributes:
        grads: parameter -> outer name of its reduced gradient.
    """

    def __init__(
        self, rank: RankGroup, writer: StepWriter, accumulates: Mapping[str, str], reduced: Callable[[str, Name], None]
    ) -> None:
        plan = rank.plan
        self._layouts, self._accumulates, self._wire_dtype = rank.holding.params, accumulates, plan.wire_dtype
        self._specs = {name: rank.grad_spec(name) for name in accumulates}
        self._extended, self._reduced = (1, *rank.holding.mesh.shape), reduced
        blocks = BundleBlocks(writer.cache, "reduce.", BlockRole.REDUCE, self._extended)
        super().__init__(blocks, TransferQueue(writer, IN_FLIGHT, plan.reducing_bytes), plan.bundle_bytes)
        self._names: dict[Name, str] = {}
        self.grads: dict[str, Name] = {}

    def final(self, names: Iterable[str]) -> None:
        """These parameters' gradients are complete: begin what can begin."""
        for name in names:
            path = self._path(name)
            added, reduced = accumulator(name), grad(name)
            self.grads[name] = reduced if path else added
            self._names[reduced] = name
            if path:
                dtypes = self._specs[name].dtype, self._accumulates[name]
                self.send(BundledValue(added, reduced, self._sent(name), path, *dtypes))
            else:
                self._reduced(name, added)

    def takes(self, spec: TensorSpec, path: tuple[Move, ...]) -> bool:
        """Whether small gradients are reduced that something else can go with."""
        key = bundle_key(spec, path, self._extended)
        return key is not None and any(
            path and bundle_key(each, path, self._extended) == key
            for each, path in ((self._sent(name), self._path(name)) for name in self._specs)
        )

    def arrived(self, value: BundledValue) -> None:
        """A gradient, or what was sent along with them, is in its layout."""
        if value.result in self._names:
            self._reduced(self._names[value.result], value.result)

    def _path(self, name: str) -> tuple[Move, ...]:
        layouts = self._layouts[name]
        source, target = _extend(layouts.grad), _extend(layouts.state)
        return reshard_path(self._specs[name].shape, source, target, self._extended, frozen=1)

    def _sent(self, name: str) -> TensorSpec:
        """A gradient as it travels."""
        sums = any(move.reduction for move in self._path(name))
        dtype = self._wire_dtype if self._wire_dtype and sums else self._accumulates[name]
        return TensorSpec(dtype, self._specs[name].shape)


class Partials(BundledTransfers):
    """Gradients on the way to their accumulators.

    Args:
        rank, writer: whose steps are written.
        add: writes the step that adds a value to a parameter's gradient.
        final: told of parameters whose gradients are complete.
    """

    def __init__(
        self,
        rank: RankGroup,
        writer: StepWriter,
        add: Callable[[str, Name], None],
        final: Callable[[Iterable[str]], None],
    ) -> None:
        plan = rank.plan
        blocks = BundleBlocks(writer.cache, "sums.", BlockRole.REDUCE, rank.extended)
        queue = TransferQueue(writer, IN_FLIGHT, plan.reducing_bytes if plan.group > 1 else 0)
        super().__init__(blocks, queue, plan.bundle_bytes, all_hold=True)
        self._add, self._final = add, final
        self._under_way: Counter[str] = Counter()
        self._passed: set[str] = set()
        self._params: dict[Name, str] = {}

    def take(self, param: str, value: BundledValue) -> None:
        """Take a part of a parameter's gradient."""
        self._under_way[param] += 1
        self._params[value.result] = param
        self.send(value)

    def passed(self, params: Iterable[str]) -> None:
        """Nothing more will be sent for these parameters."""
        for name in params:
            if self._under_way[name]:
                self._passed.add(name)
            else:
                self._final((name,))

    def arrived(self, value: BundledValue) -> None:
        """A part is where its parameter's gradient accumulates."""
        param = self._params.pop(value.result)
        self._add(param, value.result)
        self._under_way[param] -= 1
        if param in self._passed and not self._under_way[param]:
            self._passed.discard(param)
            self._final((param,))


def _extend(text: str) -> Layout:
    return (R, *parse_layout(text))
