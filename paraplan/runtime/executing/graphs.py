"""A training step as two CUDA graphs, captured once and replayed: the host launches two things where it launched a
thousand.

    before the update    forward, backward, reductions of gradients          one graph
    the update           clipping, the scaler, the user's optimizer          as ever, kernel by kernel
    after the update     stored copies written from their states             one graph

The first steps run as they always do (kernels are compiled, communicators made); the next is captured, which runs
nothing, and replayed. A graph reads and writes the same memory every time: batches are copied into those of the step
that was captured, seeds are tensors that are filled before every step, gradients and losses come in the same tensors.
What is not as it was when a part was captured (a parameter in another tensor, gradients that are gone) runs as ever.

Both graphs allocate from one pool, which holds what `cost_models.simulator.graph_memory` says: the most that blocks
have at once, and gradients for as long as there are graphs. Beside it are the batch, which now stays in memory, and
what an optimizer without fused kernels allocates. Steps that are recorded or timed run as ever, and so do
evaluations, beside the pool.

What a user may keep of a step: losses and metrics are copies. A gradient that somebody holds when it would be
overwritten, as a parameter's `grad` or by another name, moves into memory of its own; views made of one do not.

Limits: what waits for the host cannot be captured, and is refused before anything runs (`refuse_graphs`); an op of the
user's own that does is found while capturing, and the steps then run as ever, with a warning.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paraplan.ir.errors import ConstraintError
from paraplan.ir.execution.name import Name, Role
from paraplan.ir.execution.rank_program import MESSAGES, InstrKind, RankProgram, Step, StepKind
from paraplan.ir.machine.collectives import COLLECTIVES
from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.plan import Plan
from paraplan.runtime.rank import Rank

WARM_UP = 2
"""Steps that run as ever before one is captured."""

BEFORE, AFTER = "before", "after"
_KERNELS = (StepKind.CALL, StepKind.ACCUMULATE)


class Graphs(Protocol):
    """What captures and replays."""

    def capture(self, run: Callable[[], Iterable[Tensor]]) -> Callable[[], None]:
        """Note what `run` does to tensors, doing nothing; the result does it, as often as it is called.

        `run` gives the tensors that are read afterwards. Others that it made hold anything then.
        """


class CudaGraphs:
    """Torch's, all in one pool of memory; they are to be replayed in the order in which they were captured."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, run: Callable[[], Iterable[Tensor]]) -> Callable[[], None]:
        """See `Graphs`."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph.replay  # type: ignore[no-any-return]


class _Captured(NamedTuple):
    """One part of a step.

    Attributes:
        steps: what was captured.
        inputs: the outer values it reads, by name.
        gone: the outer names it takes away.
        made: the outer values it leaves.
        replay: does it again.
    """

    steps: tuple[Step, ...]
    inputs: Mapping[Name, Any]
    gone: tuple[Name, ...]
    made: Mapping[Name, Tensor]
    replay: Callable[[], None]

    def fits(self, steps: Sequence[Step], outer: Mapping[Name, Any]) -> bool:
        """Whether these steps on these values are those."""
        alike = len(steps) == len(self.steps) and all(a is b for a, b in zip(steps, self.steps, strict=True))
        return alike and all(_lies_at(outer.get(name), value) for name, value in self.inputs.items())

    def leave(self, outer: dict[Name, Any]) -> None:
        """What it did to outer names. Values are new tensors in its memory, so that it shows who holds them."""
        for name in self.gone:
            outer.pop(name, None)
        outer.update({name: value.detach() for name, value in self.made.items()})


def _lies_at(x: Any, place: Any) -> bool:
    return x is place or (isinstance(x, Tensor) and isinstance(place, Tensor) and x.data_ptr() == place.data_ptr())


class ReplayedSteps:
    """A rank's steps before and after its optimizer.

    Args:
        rank: whose they are.
        graphs: what captures them.

    Attributes:
        homes: where graphs read batches; nowhere yet, before one is captured.
        replays: how often each part was replayed.
        reason: why nothing is, "" while something is or may be.
    """

    def __init__(self, rank: Rank, graphs: Graphs) -> None:
        self.rank, self.graphs, self.reason = rank, graphs, ""
        self.homes: dict[Name, Tensor] = {}
        self.replays = {BEFORE: 0, AFTER: 0}
        self._begun = 0
        self._captured: dict[str, _Captured] = {}
        self._owned: set[int] = set()  # storages of what graphs leave
        self._lent: list[weakref.ref[Tensor]] = []

    def run(self, part: str, steps: tuple[Step, ...]) -> None:
        """Take the steps of a part.

        Raises:
            RuntimeFailure: as `Executor.run`.
        """
        executor, has_kernels = self.rank.executor, any(step.kind in _KERNELS for step in steps)
        self._begun += part == BEFORE
        if part not in self._captured and self._begun > WARM_UP and not self.reason and has_kernels:
            self._capture(part, steps)
        held = self._captured.get(part)
        if held is None or not held.fits(steps, executor.outer):
            executor.run(steps)
            return
        if part == BEFORE:
            self._give_room()
        held.replay()
        self.replays[part] += 1
        held.leave(executor.outer)

    def lend(self) -> None:
        """Gradients were given to parameters; those in memory of graphs are known again as long as they are held."""
        grads = [param.grad for param in self.rank.params.values() if param.grad is not None]
        self._lent += [weakref.ref(x) for x in grads if x.untyped_storage().data_ptr() in self._owned]

    def _give_room(self) -> None:
        """What somebody still holds of the gradients that were lent moves into memory of its own."""
        for reference in self._lent:
            if (grad := reference()) is not None:
                grad.data = grad.data.clone()
        self._lent = []

    def _capture(self, part: str, steps: tuple[Step, ...]) -> None:
        executor = self.rank.executor
        outer = dict(executor.outer)
        made = {name for step in steps for name in step.outs}
        inputs = {name: outer[name] for step in steps for name in step.args if name not in made and name in outer}
        if part == BEFORE:
            self.homes = {name: outer[name] for name, x in self.rank.program.outer.items() if x.role is Role.BATCH}

        def run() -> list[Tensor]:
            executor.run(steps)
            return [value for value in executor.outer.values() if isinstance(value, Tensor)]

        try:
            replay = self.graphs.capture(run)
        except Exception as fault:  # noqa: BLE001  (whatever cannot be captured runs as ever)
            self.reason, self.homes = f"{type(fault).__name__}: {fault}", {}
            self._captured.clear()  # the other part's pool and batches are for nothing
            warnings.warn(f"steps are not replayed as CUDA graphs: {self.reason}", stacklevel=2)
        else:
            left = {name: x for name, x in executor.outer.items() if outer.get(name) is not x}
            gone = tuple(name for name in outer if name not in executor.outer)
            self._captured[part] = _Captured(steps, inputs, gone, left, replay)
            self._owned |= {x.untyped_storage().data_ptr() for x in left.values()}
        executor.outer.clear()
        executor.outer.update(outer)


def refuse_graphs(plan: Plan, programs: Iterable[RankProgram]) -> None:
    """Refuse a plan whose steps are no graphs of kernels.

    Raises:
        ConstraintError: names what the host decides or waits for in it, and the way out.
    """
    if plan.cluster.backend != "cuda":
        raise ConstraintError(f"CUDA graphs need CUDA devices, and the plan is for {plan.cluster.name}; leave them out")
    for program in programs:
        refuse_host_decisions(program)


def refuse_host_decisions(program: RankProgram) -> None:
    """Refuse a rank's program in which the host decides or waits within a step.

    Raises:
        ConstraintError: names what it decides or waits for, and the way out.
    """
    instrs = [instr for block in program.blocks.values() for instr in block.instrs]
    found = ""
    if any(step.kind in MESSAGES for step in program.steps):
        found = "stages send each other messages, which the host begins and waits for: plan with pp=1"
    elif any(step.late for step in program.steps):
        found = "the host updates parameters while the device computes: plan without delayed_update"
    elif any(value.tier for value in program.outer.values()) or any(each.kind is InstrKind.COPY for each in instrs):
        found = (
            f"tensors wait on {' or '.join(TIERS)}, whose copies the host begins: plan without offload, and with "
            "place_states='device'"
        )
    elif any(instr.kind is InstrKind.COLLECTIVE and COLLECTIVES[instr.target].uneven for instr in instrs):
        found = "the host reads how many rows experts on several ranks exchange: plan with ep=1"
    if found:
        raise ConstraintError(f"the plan's steps cannot be CUDA graphs: {found}, or leave CUDA graphs out")
