"""The plan of a pipeline over differing positions: each stage from its own position's sharding, on its own mesh.

Plans are compared by their first microbatches alone, as many as fill the pipeline, where that says all of what they
hold (`full_rounds.few_orders`); the one that is taken is simulated with all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from paraplan.cost_models.realised_plan import Realised, realised
from paraplan.ir.plan import Plan, Stage
from paraplan.planner.assemble import Job, assemble
from paraplan.planner.constraints import Constraints
from paraplan.planner.mixed.positions import MixedPipeline, Position, device_budgets
from paraplan.planner.passes.grad_reductions import ROOM
from paraplan.planner.pipeline.cuts.stage_cuts import Bounds
from paraplan.planner.pipeline.open_choices import check_turns
from paraplan.planner.pipeline.pipeline import cut_stages, on_meshes
from paraplan.planner.pipeline.prices.in_pieces import in_best_pieces
from paraplan.planner.recompute.presets import preset_activations
from paraplan.planner.recompute.stage_memory import Activations, Cell, Options, recomputing
from paraplan.planner.schedules.complete import complete
from paraplan.planner.schedules.full_rounds import as_a_whole, few_orders
from paraplan.planner.schedules.named import named_orders
from paraplan.planner.schedules.schedule_problem import Orders, holders_of, stages_of


@dataclass(frozen=True)
class MixedCase:
    """A pipeline whose positions, and their shardings, are chosen.

    Attributes:
        job, constraints: what is planned, and what is pinned.
        pipeline, positions: which; in its order.
    """

    job: Job
    constraints: Constraints
    pipeline: MixedPipeline
    positions: tuple[Position, ...]

    @cached_property
    def all_orders(self) -> Orders:
        """What every position computes in a step."""
        return named_orders(self.pipeline.schedule, self.pipeline.pp, self.pipeline.microbatches, self.pipeline.each)

    @cached_property
    def orders(self) -> Orders:
        """What of it plans are compared by."""
        of = self.pipeline
        few = few_orders(self.job.program, of.schedule, self.all_orders, of.num_stages)
        return self.all_orders if few is None else few[1]

    def whole(self, made: Realised) -> Realised:
        """A plan of the case with all microbatches."""
        if self.orders is self.all_orders:
            return made
        return as_a_whole(self._scheduled(made.plan, self.all_orders), made)

    @cached_property
    def budgets(self) -> tuple[int, ...]:
        """Per device, what it may hold."""
        return device_budgets(self.job.cluster, self.positions)

    @cached_property
    def _position_of(self) -> dict[int, Position]:
        """Stage -> its position."""
        held = stages_of(self.orders)
        return {stage: position for position, mine in zip(self.positions, held, strict=True) for stage in mine}

    def made(self, bounds: Bounds, taken: Sequence[int]) -> Realised:
        """The plan at a cut, with as little recomputed as fits: no more than `taken` where that fits."""
        preset = self.constraints.recompute
        if preset is not None:
            pinned = preset_activations(self.job.program, preset) if preset != "none" else ()
            return self.priced(bounds, pinned)
        begun = self.priced(bounds, self._fates(bounds, taken))
        if begun.left_bytes(self.budgets) >= 0 or begun.over_bytes:
            return begun
        return recomputing(begun.plan, lambda fates: self._plan(bounds, fates), self._options, self.budgets, taken)

    def fits(self, made: Realised) -> bool:
        """Whether no device, and no tier, holds more than it may."""
        return made.left_bytes(self.budgets) >= 0 and not made.over_bytes

    def over_bytes(self, made: Realised) -> tuple[int, ...]:
        """Per position, by how much a plan of it is over the position's budget; 0 where it fits."""
        over, of = made.over_budget_bytes(self.budgets), made.plan.schedule.rank_class
        return tuple(max(0, *(over[of[device]] for device in each.mesh.devices)) for each in self.positions)

    def _options(self, cell: Cell) -> Options:
        return self._position_of[cell[0]].prices.sharding.options

    def _fates(self, bounds: Bounds, taken: Sequence[int]) -> Activations:
        if not taken:
            return ()
        segments, found = self.job.program.segments, list[dict[str, str]]()
        for stage, bound in enumerate(bounds):
            options = self._position_of[stage].prices.sharding.options
            found += [options[segments[i].kind][taken[i]].activations for i in range(*bound)]
        return tuple(found)

    def priced(self, bounds: Bounds, activations: Activations = ()) -> Realised:
        """The plan at a cut, lowered and simulated.

        Raises:
            InvalidPlanError: a value that several positions read comes back in differing layouts.
        """
        return realised(self._plan(bounds, activations))

    def _plan(self, bounds: Bounds, activations: Activations) -> Plan:
        program, stages, wholes = self.job.program, list[Stage](), dict[int, Plan]()
        for stage, bound in enumerate(bounds):
            position = self._position_of[stage]
            sharding = position.prices.sharding
            if id(sharding) not in wholes:
                pieced = in_best_pieces(sharding, self.constraints.most_pieces)
                decisions = replace(pieced.decisions, activations=activations)
                wholes[id(sharding)] = assemble(sharding.job, decisions)
            stages += cut_stages(program, wholes[id(sharding)].stages[0], [bound], [position.mesh])
        whole, *others = wholes.values()
        notes = dict.fromkeys(note for each in (whole, *others) for note in each.notes)
        plan = msgspec.structs.replace(
            whole,
            cluster=self.job.cluster,
            stages=tuple(stages),
            reducing_bytes=min(self.budgets) // ROOM,
            notes=tuple(notes),
        )
        return self._scheduled(plan, self.orders)

    def _scheduled(self, plan: Plan, orders: Orders) -> Plan:
        name, meshes = self.pipeline.schedule, [position.mesh for position in self.positions]
        schedule = complete(name, orders)
        check_turns(self.job.program, self.pipeline.microbatches, name, schedule, len(plan.stages))
        return on_meshes(plan, schedule, holders_of(orders), meshes)
