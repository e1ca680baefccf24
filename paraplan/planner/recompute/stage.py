"""Which segments of a stage recompute what, so that the step fits.

Every instance of a kind takes one of the kind's options (`kinds.kind_options`: bytes saved against seconds recomputed).
Memory is fullest at the loss, where everything saved is alive. Equal segments are interchangeable, so what is chosen is
how many of each kind take each option, n[k, o]:

    minimise   sum n[k, o] · extra_s[k, o]
    such that  sum over o of n[k, o] = instances of k,   sum n[k, o] · saved_bytes[k, o] <= what fits

a small integer program, solved exactly. The first segments of a kind take the leanest options: what they save lives
longest. The plan is then lowered and simulated; what is still too much is taken from what fits, until nothing is.

Limits: what recomputing holds for a moment is found by the simulation alone, and then charged to every instance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paraplan.cost_models.predict import plan_costs
from paraplan.cost_models.simulate import Simulation
from paraplan.ir.graph import Phase
from paraplan.ir.lower.remat import recomputable
from paraplan.ir.lower.stage import PlanBlocks
from paraplan.ir.mesh import local_shape
from paraplan.ir.plan import Plan
from paraplan.ir.program import Program, SegmentKind
from paraplan.ir.tensor import DTYPE_BYTES
from paraplan.planner.assemble import Decisions, Job
from paraplan.planner.milp import MilpBuilder, solve
from paraplan.planner.realise import realise
from paraplan.planner.recompute.kinds import RematOption, kind_options

ROUNDS = 12
"""Plans simulated before giving up."""


@dataclass(frozen=True)
class Fitted:
    """A plan under its budget, what was simulated of it, and the seconds of recomputation its options say."""

    plan: Plan
    simulation: Simulation
    extra_s: float


def options_of(plan: Plan) -> tuple[tuple[RematOption, ...], ...]:
    """Per kind, its options under the plan's choice for it."""
    stage, program, costs = plan.stages[0], plan.program, plan_costs(plan)[0]
    forwards = PlanBlocks(plan).parts[0].forwards
    extended = (plan.num_microbatches, *stage.mesh.shape)
    found = []
    for index, kind in enumerate(program.kinds):
        forward = forwards[next(i for i, segment in enumerate(program.segments) if segment.kind == index)]
        seconds = [0.0] * len(kind.graph.ops)
        for instr in forward.block.instrs:
            if instr.origin >= 0:
                seconds[instr.origin] += costs.instr_s(forward.block, instr)
        nbytes = {}
        for op, strategy in zip(kind.graph.ops, forward.strategies, strict=True):
            for out, layout in zip(op.outs, strategy.outputs, strict=True):
                if op.phase is Phase.FORWARD and out is not None and layout is not None:
                    spec = kind.graph.values[out]
                    count = DTYPE_BYTES[spec.dtype]
                    for size in local_shape(spec.shape, layout, extended):
                        count *= size
                    nbytes[out] = count
        found.append(kind_options(kind, seconds, nbytes))
    return tuple(found)


def fit(job: Job, decisions: Decisions, limit_bytes: float) -> Fitted | float:
    """A plan with these layouts and as little recomputation as fits.

    Returns:
        The plan; or, where recomputing everything inside segments is not enough, the least peak seen, in bytes.
    """
    made = realise(job, decisions, limit_bytes)
    if made.peak_bytes <= limit_bytes:
        return Fitted(made.plan, made.simulation, 0.0)
    options = options_of(made.plan)
    least = float(made.peak_bytes)
    allowed = float(sum(options[segment.kind][0].saved_bytes for segment in job.program.segments))
    for _ in range(ROUNDS):
        allowed -= made.peak_bytes - limit_bytes
        taken = choose(job.program, options, allowed)
        if taken is None:
            taken = full(job.program, options)
        chosen = [options[segment.kind][at] for segment, at in zip(job.program.segments, taken, strict=True)]
        activations = tuple(option.activations for option in chosen)
        made = realise(job, replace(decisions, activations=activations), limit_bytes)
        least = min(least, made.peak_bytes)
        if made.peak_bytes <= limit_bytes:
            extra = sum(option.extra_s for option in chosen) * decisions.num_microbatches
            return Fitted(made.plan, made.simulation, extra)
        if taken == full(job.program, options):
            return least
    return least


def full(program: Program, options: Sequence[tuple[RematOption, ...]]) -> tuple[int, ...]:
    """Every segment at its leanest."""
    return tuple(len(options[segment.kind]) - 1 for segment in program.segments)


def choose(
    program: Program, options: Sequence[tuple[RematOption, ...]], allowed_bytes: float
) -> tuple[int, ...] | None:
    """Per segment, its option: the fewest seconds that save at most so many bytes in all; None: impossible."""
    count = Counter(segment.kind for segment in program.segments)
    keys = [(kind, at) for kind in count for at in range(len(options[kind]))]
    builder = MilpBuilder()
    builder.add_columns(
        len(keys), upper=[count[kind] for kind, _ in keys], integer=True,
        objective=[options[kind][at].extra_s for kind, at in keys],
    )  # fmt: skip
    for kind, instances in count.items():
        columns = [column for column, key in enumerate(keys) if key[0] == kind]
        builder.add_row(columns, [1.0] * len(columns), lower=instances, upper=instances)
    unit = max(1.0, *(options[kind][0].saved_bytes for kind in count))
    builder.add_row(
        range(len(keys)), [options[kind][at].saved_bytes / unit for kind, at in keys], upper=allowed_bytes / unit
    )
    found = solve(builder.build(), time_limit_s=10.0)
    if found.values is None:
        return None
    taken = {key: round(value) for key, value in zip(keys, found.values, strict=True)}
    leanest = {
        kind: [at for at in reversed(range(len(options[kind]))) for _ in range(taken[kind, at])] for kind in count
    }
    return tuple(leanest[segment.kind].pop(0) for segment in program.segments)


_DEAR = ("mm", "linear", "convolution", "attention", "einsum", "experts", "baddbmm", "addbmm")


def preset(kind: SegmentKind, name: str) -> tuple[str, ...]:
    """The values of a kind that a named strategy recomputes (`constraints.PRESETS`)."""
    if name == "none":
        return ()
    values = recomputable(kind)
    if name == "full":
        return values
    dear = {out for op in kind.graph.ops for out in op.outs if any(word in op.target.split(".")[1] for word in _DEAR)}
    return tuple(value for value in values if value not in dear)
