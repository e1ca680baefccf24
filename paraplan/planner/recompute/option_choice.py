"""Which options the segments of a stage take, so that what is saved fits and little is recomputed: an integer program.

Bytes saved on the device stand against seconds recomputed, and against seconds of copying and bytes elsewhere. Memory
is fullest at the loss, where everything saved is alive. Equal segments are interchangeable, so what is chosen is how
many of each kind take each option, n[k, o]:

    minimise   sum n[k, o] · extra_s[k, o] + stalls away + stalls back
    such that  sum over o of n[k, o] = instances of k,   sum n[k, o] · saved_bytes[k, o] <= what fits
               per tier: sum n[k, o] · away_bytes[k, o] <= its room,
               sum n[k, o] · copy_s[k, o] <= compute of the forwards + stalls away, and of the backwards + stalls back

It is solved exactly, or within a thousandth of its seconds where values may wait elsewhere: the rest takes a hundred
times as long to prove. The first segments of a kind take the leanest options: what they save lives longest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from paraplan.cost_models.simulator.rank_trace import Simulation
from paraplan.ir.execution.streams import COMPUTE
from paraplan.ir.model.program import Program
from paraplan.planner.recompute.kind_options import RematOption
from paraplan.planner.solvers.milp import MilpBuilder, solve

NEARLY, TIME_S = 1e-3, 2.0
"""How near the best a choice of what waits elsewhere is, and the seconds a choice may take."""
HIDDEN_SHARE = 0.05
"""What a second of copying beside compute counts against one of recomputing."""


def phase_seconds(simulation: Simulation) -> tuple[float, float]:
    """Seconds of compute in the forwards and in the backwards of a step; a third and two thirds where they are not told
    apart, as of a step carried on from its first microbatches."""
    trace, busy = simulation.traces[simulation.busiest], {"F": 0.0, "B": 0.0}
    if not trace.spans:
        return trace.compute_s / 3, trace.compute_s * 2 / 3
    for span in trace.spans:
        if span.stream == COMPUTE and span.phase in busy:
            busy[span.phase] += span.busy_s
    return busy["F"], busy["B"]


def added_s(picked: Sequence[RematOption], times: tuple[float, float], num_microbatches: int) -> float:
    """Seconds of recomputing, and of waiting for copies that compute does not hide.

    Args:
        picked: options, one per segment.
        times, num_microbatches: as of `choose`.
    """
    copy_s = dict.fromkeys((option.tier for option in picked), 0.0)
    for option in picked:
        copy_s[option.tier] += option.copy_s * num_microbatches
    stalled_s = sum(max(0.0, taken_s - seconds) for taken_s in copy_s.values() for seconds in times)
    return sum(option.extra_s for option in picked) * num_microbatches + stalled_s


def full(program: Program, options: Sequence[tuple[RematOption, ...]]) -> tuple[int, ...]:
    """Every segment at its leanest."""
    return tuple(len(options[segment.kind]) - 1 for segment in program.segments)


def choose(
    program: Program,
    options: Sequence[tuple[RematOption, ...]],
    allowed_bytes: float,
    rooms: Mapping[str, float] | None = None,
    times: tuple[float, float] = (0.0, 0.0),
    num_microbatches: int = 1,
    instants: Sequence[tuple[float, float]] = ((1.0, 0.0),),
) -> tuple[int, ...] | None:
    """Per segment, its option: the fewest seconds that hold at most so many bytes in all; None: impossible.

    Args:
        program: whose segments.
        options: per kind.
        allowed_bytes: on the device.
        rooms: bytes of every tier.
        times: seconds of compute that copies away, and copies back, can hide behind.
        num_microbatches: how often a step passes every segment.
        instants: at which no more may be held: how often what is saved, and what waits between the halves of a
            backward.
    """
    count = Counter(segment.kind for segment in program.segments)
    keys = [(kind, at) for kind in count for at in range(len(options[kind]))]
    picked = [options[kind][at] for kind, at in keys]
    builder = MilpBuilder()
    # Copies that are hidden are not free, lest there be more than it takes.
    costs = [(option.extra_s + HIDDEN_SHARE * option.copy_s) * num_microbatches for option in picked]
    scale = max(1e-12, *costs, *times)
    builder.add_columns(
        len(keys), upper=[count[kind] for kind, _ in keys], integer=True, objective=[cost / scale for cost in costs]
    )
    for kind, instances in count.items():
        columns = [column for column, key in enumerate(keys) if key[0] == kind]
        builder.add_row(columns, [1.0] * len(columns), lower=instances, upper=instances)
    unit = max(1.0, *(options[kind][0].saved_bytes for kind in count))
    for saved, deferred in instants:
        held = [saved * option.saved_bytes + deferred * option.deferred_bytes for option in picked]
        builder.add_row(range(len(keys)), [each / unit for each in held], upper=allowed_bytes / unit)
    for tier, room in sorted((rooms or {}).items()):
        there = [column for column, option in enumerate(picked) if option.tier == tier]
        if not there:
            continue
        builder.add_row(there, [picked[column].away_bytes / unit for column in there], upper=room / unit)
        for seconds in times:
            stalled = builder.add_columns(1, objective=1.0)
            copied = [-picked[column].copy_s * num_microbatches / scale for column in there]
            builder.add_row([*there, stalled], [*copied, 1.0], lower=-seconds / scale)
    found = solve(builder.build(), time_limit_s=TIME_S, relative_gap=NEARLY if any(o.tier for o in picked) else 1e-9)
    if found.values is None:
        return None
    taken = {key: round(value) for key, value in zip(keys, found.values, strict=False)}
    leanest = {
        kind: [
            at
            for at in sorted(range(len(options[kind])), key=lambda at: _first(options[kind][at], at))
            for _ in range(taken[kind, at])
        ]
        for kind in count
    }
    return tuple(leanest[segment.kind].pop(0) for segment in program.segments)


def _first(option: RematOption, at: int) -> tuple[int, int, int]:
    """What the first segments of a kind take: what they save lives longest, and what is away has longest to return."""
    return option.saved_bytes, -option.away_bytes, -at
