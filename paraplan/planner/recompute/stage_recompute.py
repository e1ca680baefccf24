"""Which segments of a stage recompute what, and whose values wait elsewhere, so that the step fits.

Every instance of a kind takes one of the kind's options (`kind_options`; `option_choice` chooses). The plan is then
lowered and simulated; what is still too much is taken from what fits, until nothing is.

Limits: what recomputing and copies under way hold for a moment is found by the simulation alone, and then charged to
every instance; where in a phase copies fall is not seen, so the simulator decides between ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from paraplan.cost_models.predict import plan_costs
from paraplan.cost_models.realised_plan import Realised
from paraplan.cost_models.simulator.rank_trace import Simulation
from paraplan.ir.machine.mesh import local_shape
from paraplan.ir.model.graph import Phase
from paraplan.ir.model.program import SegmentKind
from paraplan.ir.model.strides import is_dense
from paraplan.ir.plan import Plan
from paraplan.lowering.blocks.forward import LoweredForward
from paraplan.lowering.blocks.remat import boundary_values
from paraplan.lowering.stage_blocks import PlanBlocks
from paraplan.planner.assemble import Decisions, Job
from paraplan.planner.deadline import EVER, Until
from paraplan.planner.evaluate_plan import as_decided, gave_up, realise
from paraplan.planner.recompute.inputs_held import held_shares, with_inputs
from paraplan.planner.recompute.kind_options import RematOption, away_options, kind_options
from paraplan.planner.recompute.local_storages import Storages, storages_of
from paraplan.planner.recompute.option_choice import added_s, choose, full, phase_seconds
from paraplan.planner.recompute.presets import preset_fates
from paraplan.planner.sharding.instants import Instant, peak_instant

ROUNDS, HALVINGS = 12, 2
"""Plans simulated before giving up; how often what is saved is looked for between too much and what fits."""

SLOW = 1.05
"""How much longer than the best a plan may promise to take and be made."""
COMPUTED = 0.98
"""Of what a plan computes, what it does after passes at least: they hide communication, and cast less often."""


@dataclass(frozen=True)
class Fitted:
    """A plan under its budget, what was simulated of it, and the seconds of recomputation its options say."""

    plan: Plan
    simulation: Simulation
    extra_s: float
    peak: Instant | None = None


@dataclass(frozen=True)
class Unfit:
    """A plan over its budget with all recomputed or away that may be: its peak, and where that is; or one that is too
    slow to be of interest, with as much made again as it takes, or hopelessly, with everything kept."""

    plan: Plan
    peak_bytes: float
    peak: Instant | None
    is_slow: bool = False
    is_hopeless: bool = False


def options_of(
    plan: Plan, recompute: str | None = None, tiers: Sequence[str] = ()
) -> tuple[tuple[RematOption, ...], ...]:
    """Per kind, its options under the plan's choice for it, most bytes saved first.

    Args:
        plan: which keeps everything.
        recompute: as in `Constraints`.
        tiers: where values may wait.
    """
    stage, program, costs = plan.stages[0], plan.program, plan_costs(plan)[0]
    parts = PlanBlocks(plan).routes[0].parts[0]
    extended = (plan.num_shares, *stage.mesh.shape)
    pinned = None if recompute is None else preset_fates(program, recompute)
    found: list[tuple[RematOption, ...]] = []
    for index, kind in enumerate(program.kinds):
        first = next(i for i, segment in enumerate(program.segments) if segment.kind == index)
        forward = parts.forwards[first]
        seconds = [0.0] * len(kind.graph.ops)
        for instr in forward.block.instrs:
            if instr.origin >= 0:
                seconds[instr.origin] += costs.instr_s(forward.block, instr)
        roots, nbytes = storages_of(kind, forward, parts.contexts[first])
        choice = stage.choices[stage.segment_choice[first]]
        if choice.split is not None and choice.split.at_once:  # nothing is saved, nor made again
            found.append((RematOption((), 0, 0.0),))
            continue
        here = kind_options(kind, seconds, nbytes, None if pinned is None else pinned[index], roots)
        handed = _handed(kind, forward, extended) if tiers else ()
        held = sum(nbytes[name] for name in handed)
        here = tuple(replace(option, saved_bytes=option.saved_bytes + held) for option in here)
        away = [
            option
            for tier in tiers
            for option in away_options(kind, nbytes, here, tier, partial(costs.moves.copy_s, tier), handed, roots)
        ]
        found.append(tuple(sorted((*here, *away), key=lambda o: (-o.saved_bytes, not o.tier, o.extra_s))))
    return tuple(found)


def held_options(plan: Plan) -> tuple[tuple[RematOption, ...], ...]:
    """As `options_of`, with what every option holds of other segments' results, and between the halves of a backward in
    two (`inputs_held`).

    Args:
        plan: which keeps everything.
    """
    program, parts, storages = plan.program, PlanBlocks(plan).routes[0].parts[0], list[Storages]()
    for index, kind in enumerate(program.kinds):
        first = next(i for i, segment in enumerate(program.segments) if segment.kind == index)
        storages.append(storages_of(kind, parts.forwards[first], parts.contexts[first], tuple(Phase)))
    return tuple(map(with_inputs, program.kinds, held_shares(program, storages), storages, options_of(plan)))


def _handed(kind: SegmentKind, forward: LoweredForward, extended: tuple[int, ...]) -> tuple[str, ...]:
    """The outputs of a kind that could wait on a tier: they lie dense."""
    lies = dict(zip(kind.outputs, forward.outputs, strict=True))
    shapes = {name: local_shape(kind.graph.values[name].shape, given.layout, extended) for name, given in lies.items()}
    dense = [name for name, given in lies.items() if given.strides is None or is_dense(shapes[name], given.strides)]
    return tuple(name for name in boundary_values(kind) if name in dense)


def fit(
    job: Job,
    decisions: Decisions,
    limit_bytes: float,
    recompute: str | None = None,
    tiers: Sequence[str] = (),
    until: Until = EVER,
) -> Fitted | Unfit:
    """A plan with these layouts and splits that fits, recomputing and copying away as little as that takes.

    Recomputing alone and copying alone are tried beside both together, so that allowing more is never worse; and where
    what fits gave up bundles or gathers ahead (`evaluate_plan`), recomputing as much as makes room for these.

    Args:
        job, decisions: what is planned, and its layouts.
        limit_bytes: of a device.
        recompute: as in `Constraints`.
        tiers: where activations may wait.
        until: when no other way is tried, and the step below which one is of interest.
    Returns:
        The plan; or, where even the leanest is not enough, the one that peaks lowest.
    """
    if until.below_s < math.inf:
        roomy = as_decided(job, decisions)
        if roomy.simulation.step_s >= until.below_s or COMPUTED * roomy.simulation.compute_s >= until.known_s:
            return Unfit(roomy.plan, float(roomy.peak_bytes), peak_instant(roomy), is_slow=True, is_hopeless=True)
    kept = realise(job, decisions, limit_bytes)
    making = partial(realise, limit_bytes=limit_bytes, is_doubtful=True)
    ways: list[tuple[str | None, Sequence[str]]] = [(recompute, tiers)]
    if tiers:
        ways += [(recompute, ()), *([("none", tiers)] if recompute is None else [])]
    found: list[Fitted | Unfit] = []
    if kept.peak_bytes <= limit_bytes and not kept.over_bytes and recompute in (None, "none"):
        found = [Fitted(kept.plan, kept.simulation, 0.0, peak_instant(kept))]
    else:
        for way in ways:
            if found and until.is_over(any(isinstance(each, Fitted) for each in found)):
                break
            below_s = min((each.simulation.step_s for each in found if isinstance(each, Fitted)), default=math.inf)
            options, below_s = options_of(kept.plan, *way), min(below_s, until.below_s)
            fitting = _Fitting(job, decisions, limit_bytes, kept, options, making, below_s, until.known_s)
            found.append(fitting.found())
    plans = [each for each in found if isinstance(each, Fitted)]
    if not plans and all(isinstance(each, Unfit) and each.is_slow for each in found):
        return found[0]
    if not plans:
        return min((each for each in found if isinstance(each, Unfit)), key=lambda each: each.peak_bytes)
    best = min(plans, key=lambda each: each.simulation.step_s)
    if gave_up(best.plan, decisions) and (recompute is None or tiers) and not until.is_over(True):
        made = as_decided(job, decisions)
        options = options_of(made.plan, *ways[0])
        roomier = _Fitting(job, decisions, limit_bytes, made, options, as_decided, best.simulation.step_s).found()
        if isinstance(roomier, Fitted) and roomier.simulation.step_s < best.simulation.step_s:
            return roomier
    return best


@dataclass
class _Fitting:
    """As `fit`, of some options.

    Attributes:
        job, decisions, limit_bytes, options: what is fitted.
        kept: the plan that keeps everything.
        make: makes others.
        below_s: none is made that promises to take longer than so many seconds.
        known_s: nor any that promises to compute for longer than so many.
    """

    job: Job
    decisions: Decisions
    limit_bytes: float
    kept: Realised
    options: Sequence[tuple[RematOption, ...]]
    make: Callable[[Job, Decisions], Realised]
    below_s: float = math.inf
    known_s: float = math.inf

    def found(self) -> Fitted | Unfit:
        """With less and less saved until it fits; where that went in long strides, with more again."""
        spare, taken, least = dict(self._rooms), (0,) * len(self.job.program.segments), self.kept
        allowed, over, short, stride = self._saved(taken), math.inf, math.inf, 1
        for _ in range(ROUNDS):
            made = self._made(taken)
            if self._fits(made):
                found = self._fitted(taken, made)
                return self._more_saved(found, taken, over) if stride > 1 else found
            if not made.over_bytes:
                least = min(least, made, key=lambda each: each.peak_bytes)
            if made.peak_bytes > self.limit_bytes:
                # What it peaks at may hardly depend on what is saved: then ever more is asked for.
                over_bytes, over = made.peak_bytes - self.limit_bytes, self._saved(taken)
                short, stride = over_bytes, 4 * stride if over_bytes > short / 2 else 1
                allowed = min(allowed, over - stride * over_bytes)
            for tier, room in self._rooms.items():
                spare[tier] -= max(made.simulation.tier_peak_bytes.get(tier, 0) - room, 0)
            following = self._chosen(allowed, spare) or full(self.job.program, self.options)
            if following == taken:
                break
            if self._is_slow(following):
                return Unfit(least.plan, float(least.peak_bytes), peak_instant(least), is_slow=True)
            taken = following
        return Unfit(least.plan, float(least.peak_bytes), peak_instant(least))

    def _more_saved(self, found: Fitted, taken: tuple[int, ...], over: float) -> Fitted:
        """The fastest of a plan that fits and of some that save more, up to as many bytes as were too many."""
        fitting = self._saved(taken)
        for _ in range(HALVINGS):
            other = self._chosen((fitting + over) / 2, self._rooms)
            if other is None or not fitting < self._saved(other) < over:
                break
            made = self._made(other)
            if not self._fits(made):
                over = self._saved(other)
                continue
            fitting = self._saved(other)
            if made.simulation.step_s < found.simulation.step_s:
                found = self._fitted(other, made)
        return found

    @cached_property
    def _rooms(self) -> dict[str, float]:
        """Per tier in question, its bytes."""
        tiers = {option.tier for of in self.options for option in of} - {""}
        return {tier: float(self.job.cluster.room_bytes(tier, self.decisions.mesh.devices)) for tier in tiers}

    @cached_property
    def _times(self) -> tuple[float, float]:
        return phase_seconds(self.kept.simulation)

    def _chosen(self, allowed_bytes: float, rooms: Mapping[str, float]) -> tuple[int, ...] | None:
        program, count = self.job.program, self.decisions.num_microbatches
        return choose(program, self.options, allowed_bytes, rooms, self._times, count)

    def _picked(self, taken: tuple[int, ...]) -> list[RematOption]:
        return [self.options[segment.kind][at] for segment, at in zip(self.job.program.segments, taken, strict=True)]

    def _saved(self, taken: tuple[int, ...]) -> float:
        return float(sum(option.saved_bytes for option in self._picked(taken)))

    def _is_slow(self, taken: tuple[int, ...]) -> bool:
        """Whether a plan promises to take too long, or to compute for too long."""
        count, kept = self.decisions.num_microbatches, self.kept.simulation
        again_s = count * sum(option.extra_s for option in self._picked(taken))
        promised_s = kept.step_s + added_s(self._picked(taken), self._times, count)
        return promised_s > SLOW * self.below_s or COMPUTED * (kept.compute_s + again_s) >= self.known_s

    def _made(self, taken: tuple[int, ...]) -> Realised:
        activations = tuple(option.activations for option in self._picked(taken))
        if not any(activations):
            return self.kept
        return self.make(self.job, replace(self.decisions, activations=activations))

    def _fits(self, made: Realised) -> bool:
        return made.peak_bytes <= self.limit_bytes and not made.over_bytes

    def _fitted(self, taken: tuple[int, ...], made: Realised) -> Fitted:
        each = (option.extra_s + 2 * option.copy_s for option in self._picked(taken))
        extra = sum(each) * self.decisions.num_microbatches
        return Fitted(made.plan, made.simulation, extra, peak_instant(made))
