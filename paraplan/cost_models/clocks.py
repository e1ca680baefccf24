"""The clock at which a job's products run: that of a board whose mean power is at its limit.

A board lowers its clock until what it draws, in the mean over its control loop's window (tens of milliseconds, longer
than kernels are and shorter than most steps), is its limit. Products draw W · c² at clock c, in units of the clock that
their rates are quoted at (clock times voltage squared, which rises with the clock: between its first and third power);
what only moves bytes draws R whatever the clock. Where products take A / c seconds of a step and all else B,

    A / c · W c² + B · R = L · (A / c + B)   or   c² − r (1 − ρ) s · c − s = 0,
    r = B / A, ρ = R / L, s = L / W   so   c = (r (1 − ρ) s + √((r (1 − ρ) s)² + 4 s)) / 2,

at most the board's highest. Products alone run at √s, and steps that are half something else at full clock.

A and B are of the job's ops on one device, at its quoted clock, with the update. Limits: one clock for the whole step
and all devices of a kind; waiting for the host, for collectives and in bubbles cools a board as well, but is not known
before there is a plan and left out, and so is what is computed twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from paraplan.cost_models.ops.access_patterns import COPIES, UPDATE
from paraplan.cost_models.ops.roofline import OpWork, op_cost, op_time_s, registered_work_of
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.device import Device
from paraplan.ir.model.graph import Graph
from paraplan.ir.model.program import Program, master_dtype
from paraplan.ir.model.tensor import DTYPE_BYTES
from paraplan.ir.optimizer import Optimizer
from paraplan.ir.process.memo import SESSION, Lately, Same
from paraplan.rules.carried_rules import registered_work


class StepWork(NamedTuple):
    """What a step does on one device, in seconds at the quoted clock.

    Attributes:
        products_s: of products and attention in precisions that meet the power limit.
        rest_s: of all else.
    """

    products_s: float
    rest_s: float


_WORK: Lately[StepWork] = SESSION.lately("clocks.step_work", 64, lambda _: 1)


def clock_share(device: Device, work: StepWork) -> float:
    """The clock of a device, over the one its rates are quoted at.

    Args:
        device: with its power shares.
        work: of the step on one device.
    """
    most = device.boost_share or 1.0
    if not work.products_s:
        return most
    ratio = work.rest_s / work.products_s
    half = ratio * (1 - (device.rest_power_share or 1.0)) * device.power_share / 2
    return min(half + math.sqrt(half * half + device.power_share), most)


def with_clocks(cluster: ClusterSpec, program: Program, optimizer: Optimizer) -> ClusterSpec:
    """The cluster with the clocks of a job on devices that meet their power limit; those it has already stay.

    Args:
        cluster: whose devices.
        program, optimizer: of the job.
    """
    if all(_is_settled(group.device) for group in cluster.groups):
        return cluster
    groups = tuple(
        group
        if _is_settled(group.device)
        else msgspec.structs.replace(group, device=_clocked(group.device, program, optimizer))
        for group in cluster.groups
    )
    return msgspec.structs.replace(cluster, groups=groups)


def _is_settled(device: Device) -> bool:
    return device.power_share >= 1 or device.clock_share > 0


def _clocked(device: Device, program: Program, optimizer: Optimizer) -> Device:
    work = _WORK.get(
        (Same(program), Same(device), optimizer.state_slots), lambda: step_work(device, program, optimizer)
    )
    return msgspec.structs.replace(device, clock_share=clock_share(device, work))


def step_work(device: Device, program: Program, optimizer: Optimizer) -> StepWork:
    """What a program's step does on one device of a kind.

    Args:
        device: whose rates count, at the clock they are quoted at.
        program, optimizer: of the job.
    """
    quoted = msgspec.structs.replace(device, clock_share=1.0)
    update = _update_work(program, optimizer)
    products_s, rest_s = 0.0, sum(op_time_s(work, quoted) for work in update)
    counts = Counter(segment.kind for segment in program.segments)
    for index, count in counts.items():
        for work in _works(program.kinds[index].graph):
            seconds = count * op_time_s(work, quoted)
            if work.flops and work.dtype != "float32":
                products_s += seconds
            else:
                rest_s += seconds
    return StepWork(products_s, rest_s)


def _works(graph: Graph) -> Iterator[OpWork]:
    """The work of every op that launches something."""
    for op in graph.ops:
        inputs = tuple(graph.values[name] for name in op.tensors)
        outputs = tuple(None if name is None else graph.values[name] for name in op.outs)
        said = registered_work(op, [spec.shape for spec in inputs])
        if said is not None:
            yield registered_work_of(said, inputs, outputs)
        elif (work := op_cost(op.target, op.args, op.kwargs, inputs, outputs)).kind != "view":
            yield work


def _update_work(program: Program, optimizer: Optimizer) -> tuple[OpWork, ...]:
    """The update of all parameters, and the writes of those that are stored in another dtype besides."""
    held = stored = 0
    for param in program.params.values():
        master = DTYPE_BYTES[master_dtype(program.precision, param.spec.dtype)] * math.prod(param.spec.shape)
        held += master
        stored += param.spec.nbytes if param.spec.nbytes != master else 0
    slots = optimizer.state_slots
    update = _moved((2 + slots) * held, (1 + slots) * held, UPDATE)
    return (update, _moved(held, stored, COPIES)) if stored else (update,)


def _moved(read_bytes: int, write_bytes: int, pattern: str) -> OpWork:
    return OpWork(
        kind="memory", flops=0, read_bytes=read_bytes, write_bytes=write_bytes, dtype="float32", pattern=pattern
    )
