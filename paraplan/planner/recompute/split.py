"""Ops too large for a budget run in chunks: which kind of segment is split, where its run begins, and in how many.

A plan that peaks inside a segment is offered a split of that segment's kind: the run begins with the op that makes the
kind's largest value, along the first dim of it that divides, in 2 chunks, then 4, 8, ... Each is fitted with as little
recomputation as it needs (`stage.fit`) and simulated; splits are added where the plan peaks as long as nothing fits or
the step gets faster. A segment that makes the loss is differentiated at once, chunk by chunk: no op runs twice.

Limits: a local search; one split a kind, the same for all of its segments.
Source: TSplit (Nie et al. 2022) splits where memory peaks, as here; it prices splits of single tensors one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paraplan.cost_models.simulator.rank_trace import Simulation
from paraplan.ir.machine.mesh import local_shape
from paraplan.ir.model.graph import Phase
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.plan import Plan, Split
from paraplan.lowering.blocks.forward import chosen_strategies
from paraplan.lowering.rewrites.chunks import chunkable_dims, gradients_known
from paraplan.planner.assemble import Decisions, Job
from paraplan.planner.deadline import EVER, Until
from paraplan.planner.evaluate_plan import realise
from paraplan.planner.recompute.stage_recompute import Fitted, Unfit, fit
from paraplan.planner.sharding.instants import peak_instant
from paraplan.rules.strategies import Strategy, dims_of
from paraplan.rules.time_axis import program_micro

MOST_CHUNKS = 64
ROUNDS = 10
"""Splits fitted one after another."""


def fit_split(
    job: Job, decisions: Decisions, limit_bytes: float, tiers: Sequence[str] = (), until: Until = EVER
) -> Fitted | Unfit:
    """A plan with these layouts, recomputation and splits: the fastest found, or the one that is closest to fitting.

    Args:
        job: what is planned.
        decisions: layouts, and what is split at first.
        limit_bytes: that a device may hold.
        tiers: that activations may wait on.
        until: when no other one is looked for, and the step below which one is of interest.
    """
    best: Fitted | None = None
    closest: Unfit | None = None
    tried = decisions
    for _ in range(ROUNDS):
        found = fit(job, tried, limit_bytes, None, tiers, until)
        if isinstance(found, Fitted):
            if best is not None and found.simulation.step_s >= best.simulation.step_s:
                break
            best = found
            if not found.extra_s:
                break
        elif best is not None or (closest is not None and found.peak_bytes >= closest.peak_bytes):
            break
        else:
            closest = found
        is_last = until.is_over(best is not None) or (isinstance(found, Unfit) and found.is_hopeless)
        further = None if is_last else split_where_it_peaks(tried, found)
        if further is None:
            break
        tried = further
    if best is None:
        assert closest is not None
        return closest
    if not any(choice.split for choice in best.plan.stages[0].choices):
        return best
    kept = realise(
        job, replace(decisions, options=decisions.options.but(bundle_bytes=best.plan.bundle_bytes))
    ).simulation
    return replace(best, extra_s=work_s(best.simulation) - work_s(kept))


def work_s(simulation: Simulation) -> float:
    """Seconds of work on all streams."""
    return simulation.compute_s + sum(simulation.comm_s.values())


def split_where_it_peaks(decisions: Decisions, found: Fitted | Unfit) -> Decisions | None:
    """The decisions with the kind that a plan peaks in cut finer; None where it cannot be."""
    program = found.plan.program
    if found.peak is None:
        return None
    kind = program.segments[found.peak.segment].kind
    now = decisions.splits or (None,) * len(program.segments)
    split = finer(found.plan, kind, now[found.peak.segment])
    if split is None:
        return None
    splits = tuple(split if s.kind == kind else old for s, old in zip(program.segments, now, strict=True))
    return replace(decisions, splits=splits)


def finer(plan: Plan, kind: int, now: Split | None) -> Split | None:
    """A kind's run cut in twice as many chunks as now, or in two; None where nothing divides.

    Args:
        plan: of one stage.
        kind: index into the program's kinds.
        now: how the kind is cut in the plan, if it is.
    """
    (stage,), program, m = plan.stages, plan.program, plan.num_shares
    graph, extended = program.kinds[kind].graph, (m, *stage.mesh.shape)
    first = next(i for i, segment in enumerate(program.segments) if segment.kind == kind)
    choice = stage.choices[stage.segment_choice[first]]
    micro = program_micro(program, plan.num_microbatches).segments[first]
    strategies = chosen_strategies(program.kinds[kind], choice, micro, stage.mesh.shape, m)
    op = _largest(plan, kind, strategies)
    chunks = 2 * now.chunks if now is not None else 2
    if op is None or chunks > MOST_CHUNKS:
        return None
    names = next(names for names in dims_of(graph.ops[op], graph.values).outputs if names is not None)
    legal = chunkable_dims(program.kinds[kind], op, chunks, strategies, extended)
    dim = next((name for name in names if name in legal), None)
    if dim is None:
        return None
    segments = [index for index, segment in enumerate(program.segments) if segment.kind == kind]
    return Split(op=op, dim=dim, chunks=chunks, at_once=all(gradients_known(program, i) for i in segments))


def _largest(plan: Plan, kind: int, strategies: tuple[Strategy, ...]) -> int | None:
    """The op of a kind's forward that makes its largest value on a rank."""
    graph, extended = plan.program.kinds[kind].graph, (plan.num_shares, *plan.stages[0].mesh.shape)
    best: tuple[int, int] | None = None
    for index, (op, strategy) in enumerate(zip(graph.ops, strategies, strict=True)):
        for out, layout in zip(op.outs, strategy.computed, strict=True):
            if op.phase is Phase.FORWARD and out is not None and layout is not None:
                spec = graph.values[out]
                nbytes = TensorSpec(spec.dtype, local_shape(spec.shape, layout, extended)).nbytes
                if best is None or nbytes > best[0]:
                    best = nbytes, index
    return None if best is None else best[1]


def what_splitting_gives(job: Job, decisions: Decisions, found: Unfit) -> tuple[int, float] | None:
    """(chunks, peak bytes) of splits where it peaks, as fine as still lowers the peak; None where none does.

    Args:
        job: what is planned.
        decisions: the layouts.
        found: the plan closest to fitting.
    """
    seen: list[tuple[int, float]] = []
    (stage,), at = found.plan.stages, found
    taken = [stage.choices[chosen] for chosen in stage.segment_choice]
    tried = replace(
        decisions, activations=tuple(each.activations for each in taken), splits=tuple(each.split for each in taken)
    )
    while (further := split_where_it_peaks(tried, at)) is not None:
        made = realise(job, further)
        chunks = max(split.chunks for split in further.splits if split is not None)
        if made.peak_bytes >= at.peak_bytes:
            break
        seen.append((chunks, float(made.peak_bytes)))
        at, tried = replace(at, plan=made.plan, peak_bytes=float(made.peak_bytes), peak=peak_instant(made)), further
    return seen[-1] if seen else None
