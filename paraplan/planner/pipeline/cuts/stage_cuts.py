"""Where a chain of segments is cut into the stages of a pipeline.

A stage is a run of segments. Cutting n segments with times t into S stages that all fit, so that the slowest takes as
little as can be, is a dynamic program over (stages, segments) with

    best[s, j] = min over i < j with stage s = [i, j) fitting of max(best[s - 1, i], t_i + ... + t_(j-1))

exact, in S · n² steps. What a stage holds is its parameters, gradients and states, once however many of its segments
use them, and for each of its microbatches in flight what its segments save for the backward; what ops need for a
moment is charged from outside, as a simulation finds it (`pipeline_search`). Limits: positions with several stages
(interleaved and bidirectional schedules) are cut by time alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paraplan.ir.machine.mesh import Layout, Shard, parse_layout
from paraplan.ir.model.program import master_dtype, trained_params
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.param_layouts import ParamLayouts
from paraplan.ir.plan import Plan

Bounds = tuple[tuple[int, int], ...]
Fits = Callable[[int, int, int], bool]
"""Whether stage s may be the segments [first, stop)."""


def cut_chain(seconds: Sequence[float], num_stages: int, fits: Fits | None = None) -> Bounds | None:
    """The cut whose slowest stage takes least.

    Args:
        seconds: of every segment.
        num_stages: at most as many as segments.
        fits: which stages may be; None for all.
    Returns:
        [first, stop) of every stage; None where no cut fits.
    """
    total = [0.0]
    for each in seconds:
        total.append(total[-1] + each)
    n = len(seconds)
    best = [[float("inf")] * (n + 1) for _ in range(num_stages + 1)]
    cut = [[-1] * (n + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0.0
    for stages in range(1, num_stages + 1):
        for stop in range(stages, n + 1):
            for first in range(stages - 1, stop):
                slowest = max(best[stages - 1][first], total[stop] - total[first])
                if slowest < best[stages][stop] and (fits is None or fits(stages - 1, first, stop)):
                    best[stages][stop], cut[stages][stop] = slowest, first
    if cut[num_stages][n] < 0:
        return None
    found, stop = [], n
    for stages in range(num_stages, 0, -1):
        first = cut[stages][stop]
        found.append((first, stop))
        stop = first
    return tuple(reversed(found))


def cut_evenly(seconds: Sequence[float], num_stages: int, tail: int) -> Bounds | None:
    """As `cut_chain` where nothing limits stages but that the last holds all segments from `tail` on.

    The least slowest stage is found by bisection: a limit can be kept if filling every stage up to it takes no more
    stages than there are (Bokhari 1988), and the least limit is the largest stage of such a filling. In about
    60 · n steps; stages that are left over take a segment each from the fullest before them.

    Args:
        seconds: per segment.
        num_stages: to cut into.
        tail: the first segment that has to be in the last stage.
    """
    n = len(seconds)
    if num_stages > n or (num_stages > 1 and min(tail, n - 1) < num_stages - 1):
        return None
    last = min(tail, n - 1) if num_stages > 1 else 0
    units = [*seconds[:last], sum(seconds[last:])] if num_stages > 1 else [sum(seconds)]
    low, high = max(units), sum(units)
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if len(_filled(units, middle)) <= num_stages else (middle, high)
    starts = _filled(units, high)
    while len(starts) < num_stages:
        ends = [*starts[1:], len(units)]
        widest = max((sum(units[a:b]), a, b) for a, b in zip(starts, ends, strict=True) if b - a > 1)
        starts = sorted([*starts, (widest[1] + widest[2] + 1) // 2])
    return tuple(zip(starts, [*starts[1:], n], strict=True))


def _filled(units: Sequence[float], limit: float) -> list[int]:
    """Where stages begin that are each filled up to a limit."""
    starts, held = [0], 0.0
    for index, each in enumerate(units):
        if held + each > limit and index > starts[-1]:
            starts.append(index)
            held = 0.0
        held += each
    return starts


@dataclass(frozen=True)
class ChainMemory:
    """What runs of segments hold.

    Attributes:
        params: per segment, its parameters.
        param_bytes: per parameter, what a rank keeps for it: the stored copy, its gradient, the optimizer's states.
        grad_bytes: per parameter that is trained, its gradient on a rank.
        reduced_bytes: per parameter that is trained, what of it goes as it is reduced.
        gathered_bytes: per parameter that is trained, a copy that is there while segments read it.
        saved_bytes: per segment, what one microbatch in flight holds.
    """

    params: tuple[tuple[str, ...], ...]
    param_bytes: dict[str, int]
    grad_bytes: dict[str, int]
    reduced_bytes: dict[str, int]
    gathered_bytes: dict[str, int]
    saved_bytes: tuple[int, ...]

    def kept_bytes(self, first: int, stop: int) -> int:
        """What a stage keeps whatever is in flight."""
        return self._of_params(self.param_bytes, first, stop)

    @cached_property
    def kept(self) -> npt.NDArray[np.float64]:
        """[n + 1, n + 1]: `kept_bytes` of the segments [i, j)."""
        n = len(self.params)
        found = np.zeros((n + 1, n + 1))
        for first in range(n):
            seen: set[str] = set()
            for stop in range(first + 1, n + 1):
                new = set(self.params[stop - 1]) - seen
                seen |= new
                found[first, stop] = found[first, stop - 1] + sum(self.param_bytes.get(name, 0) for name in new)
        return found

    def gradient_bytes(self, first: int, stop: int) -> int:
        """The gradients of a stage."""
        return self._of_params(self.grad_bytes, first, stop)

    def reduced(self, first: int, stop: int) -> int:
        """Of the gradients of a stage, what goes as they are reduced."""
        return self._of_params(self.reduced_bytes, first, stop)

    def gathered(self, first: int, stop: int) -> int:
        """Copies of a stage's parameters that are there while segments read them."""
        return self._of_params(self.gathered_bytes, first, stop)

    def _of_params(self, nbytes: dict[str, int], first: int, stop: int) -> int:
        return sum(nbytes.get(name, 0) for name in {n for params in self.params[first:stop] for n in params})

    def stage_bytes(self, first: int, stop: int, in_flight: int) -> int:
        """What a stage holds when it is fullest, short of what ops need for a moment.

        Args:
            first, stop: the stage's segments.
            in_flight: microbatches that it holds at once.
        """
        return self.kept_bytes(first, stop) + in_flight * sum(self.saved_bytes[first:stop])


def chain_memory(plan: Plan, saved_bytes: Sequence[int]) -> ChainMemory:
    """What the segments of a plan of one stage hold.

    Args:
        plan: of one stage.
        saved_bytes: per kind, what an instance saves for the backward of a microbatch.
    """
    program, stage = plan.program, plan.stages[0]
    trained, param_bytes = set(trained_params(program)), dict[str, int]()
    grad_bytes, reduced_bytes, gathered_bytes = (dict[str, int]() for _ in range(3))
    alike: dict[object, _ParamBytes] = {}
    for name, layouts in stage.params.items():
        spec, is_trained = program.params[name].spec, name in trained
        key = spec.dtype, spec.shape, layouts.stored, layouts.grad, layouts.state, layouts.ahead, is_trained
        if key not in alike:
            alike[key] = _param_bytes(plan, spec, layouts, is_trained)
        found = alike[key]
        param_bytes[name] = found.kept
        if is_trained:
            grad_bytes[name], reduced_bytes[name], gathered_bytes[name] = found.grad, found.reduced, found.gathered
    return ChainMemory(
        tuple(segment.params for segment in program.segments),
        param_bytes,
        grad_bytes,
        reduced_bytes,
        gathered_bytes,
        tuple(saved_bytes[segment.kind] for segment in program.segments),
    )


class _ParamBytes(NamedTuple):
    """What a rank keeps for a parameter; of that its gradient, what of this goes as it is reduced, and a copy that is
    there while segments read it."""

    kept: int
    grad: int = 0
    reduced: int = 0
    gathered: int = 0


def _param_bytes(plan: Plan, spec: TensorSpec, layouts: ParamLayouts, is_trained: bool) -> _ParamBytes:
    def local(dtype: str, layout: str) -> int:
        return TensorSpec(dtype, _shard(spec.shape, parse_layout(layout), plan.stages[0].mesh.shape)).nbytes

    copy = local(spec.dtype, layouts.stored)
    stored = copy + layouts.ahead * local(spec.dtype, layouts.state)
    if not is_trained:
        return _ParamBytes(stored)
    dtype = master_dtype(plan.program.precision, spec.dtype)
    slots, grad = plan.optimizer.kept_slots + (dtype != spec.dtype), local(dtype, layouts.grad)
    state = local(dtype, layouts.state)
    return _ParamBytes(stored + grad + slots * state, grad, max(grad - state, 0), copy if layouts.ahead else 0)


def _shard(shape: tuple[int, ...], layout: Layout, mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
    """What one rank holds of a tensor, rounded up, be it legal to shard it over so many or not."""
    local = list(shape)
    for placement, size in zip(layout, mesh_shape, strict=True):
        if isinstance(placement, Shard):
            local[placement.dim] = -(-local[placement.dim] // size)
    return tuple(local)
