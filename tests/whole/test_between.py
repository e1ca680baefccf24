"""Values between segments that wait on a tier: the single device's numbers, exactly what was predicted, planned."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch
from torch import nn

from paraplan.capture import capture
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.realised_plan import realised
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.cost_models.simulator.peak_attribution import peak_of
from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution import names
from paraplan.ir.execution.name import Name, Role, Transit
from paraplan.ir.execution.rank_program import StepKind
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.lowering.blocks.remat import boundary_values, recomputable
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer
from tests.whole.offloaded_states import squares
from tests.whole.offloaded_values import Case, case, kept, trained_as_one_device


def away(plan: Plan, tier: str, recompute: bool = False) -> Plan:
    """The plan with all that segments hand on on a tier, and all else kept or made again."""

    def changed(choice):  # type: ignore[no-untyped-def]
        kind = plan.program.kinds[choice.kind]
        fates = dict.fromkeys(recomputable(kind), "recompute") if recompute else {}
        fates |= dict.fromkeys(boundary_values(kind), tier)
        return msgspec.structs.replace(choice, activations=fates)

    stages = tuple(msgspec.structs.replace(s, choices=tuple(map(changed, s.choices))) for s in plan.stages)
    return msgspec.structs.replace(plan, stages=stages)


def runs_as_one_device(plan: Plan, given: Case) -> InProcessTrainer:
    programs = verify_plan(plan)
    simulation = simulate_plan(plan, programs)
    trainer = trained_as_one_device(plan, programs, given)
    for rank in range(len(trainer.ranks)):
        of = plan.schedule.rank_class[rank]
        assert [entry.key for entry in trainer.entries(rank)] == [entry.key for entry in entries(programs[of])]
        # what a masked attention's gradient allocates inside is a bound
        assert (
            1.0
            <= simulation.peak_bytes[of] / trainer.peak_bytes(rank)
            <= (1.01 if "T5" in plan.program.name else 1.001)
        )
        assert trainer.tier_peak_bytes(rank) == simulation.traces[of].tier_peak_bytes != {}
        peak = peak_of(programs[of], simulation.traces[of], plan.program)
        assert sum(each.nbytes for each in peak.roles if not each.tier) == simulation.peak_bytes[of]
    return trainer


@pytest.mark.parametrize(("tier", "recompute"), [("host", True), ("disk", False)])
@pytest.mark.parametrize(
    ("name", "pin"), [("gpt2", "tp"), ("gpt2", "zero3"), ("mlp", "zero3"), ("t5", "tp"), ("unet", "tp")]
)
def test_equal_and_as_predicted(name: str, pin: str, tier: str, recompute: bool) -> None:
    """T5 hands an encoder's output to every layer of the decoder, a U-Net has skips."""
    plan = kept(name, pin)
    moved = away(plan, tier, recompute)
    runs_as_one_device(moved, case(name))
    still = msgspec.structs.replace(moved, stages=away_inside(moved).stages)
    assert max(realised(moved).simulation.peak_bytes) <= max(realised(still).simulation.peak_bytes)


def away_inside(plan: Plan) -> Plan:
    """The plan without anything of that."""

    def changed(choice):  # type: ignore[no-untyped-def]
        outputs = plan.program.kinds[choice.kind].outputs
        return msgspec.structs.replace(
            choice, activations={n: fate for n, fate in choice.activations.items() if n not in outputs}
        )

    stages = tuple(msgspec.structs.replace(s, choices=tuple(map(changed, s.choices))) for s in plan.stages)
    return msgspec.structs.replace(plan, stages=stages)


def test_a_value_leaves_after_its_last_reader_and_is_back_a_segment_ahead() -> None:
    plan = away(kept("gpt2", "tp"), "host")
    (program,) = verify_plan(plan)
    calls = [step for step in program.steps if step.kind is StepKind.CALL]
    where: dict[Name, list[int]] = {}
    for index, step in enumerate(calls):
        for name in (*step.args, *filter(None, step.outs)):
            where.setdefault(name, []).append(index)
    left = {name: at for name, at in where.items() if (name.role, name.transit) == (Role.VALUE, Transit.LEAVING)}
    assert left
    for name, (issued, waited) in left.items():
        value = names.value(name.source, name.microbatch)
        passed = [step for step in calls[issued:waited] if step.block.endswith(".F")]
        assert len(passed) <= 1, "a segment later, or at the end"
        back = where[value.coming("host")][0]
        readers = [i for i in where[value] if i > back and calls[i].block.endswith(".B")]
        assert not [i for i in where[value] if waited < i < back], "nobody reads it meanwhile"
        assert len([step for step in calls[back : readers[0]] if step.block.endswith(".B")]) <= 1, "a segment ahead"


def test_what_cannot_wait_is_refused() -> None:
    plan = kept("mlp", "tp")
    kind = plan.program.kinds[plan.stages[0].choices[0].kind]

    def fated(**fates: str) -> Plan:
        (stage,) = plan.stages
        choices = (msgspec.structs.replace(stage.choices[0], activations=fates), *stage.choices[1:])
        return msgspec.structs.replace(plan, stages=(msgspec.structs.replace(stage, choices=choices),))

    with pytest.raises(InvalidPlanError, match="nor one it hands on"):
        verify_plan(fated(**{kind.outputs[0]: "recompute"}))
    with pytest.raises(InvalidPlanError, match="activations name 'nothing'"):
        verify_plan(fated(nothing="host"))
    job = Job(case("gpt2").program, ClusterSpec.local(2), OPTIMIZERS["adamw"], ModelRef(display="gpt2"), {})
    piped = search(job, Constraints(pp=2, microbatches=2), certify=False).plan
    with pytest.raises(InvalidPlanError, match="of another stage reads it; keep it on the device"):
        verify_plan(away(piped, "host"))


def deep(given_host: float = 4e9) -> Job:
    """Layers whose outputs are nearly all that a step with recomputation holds."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16)]
    batch = {"input": torch.randn(512, 16)}
    program = capture(nn.Sequential(*layers), batch, loss_fn=squares, precision="fp64")
    local = ClusterSpec.local(1)
    (group,) = local.groups
    host = msgspec.structs.replace(group.host, bytes_per_s=given_host)
    cluster = msgspec.structs.replace(local, groups=(msgspec.structs.replace(group, host=host),))
    return Job(program, cluster, OPTIMIZERS["sgd"], ModelRef(display="deep"), {})


def test_full_recomputation_with_boundaries_away_fits_where_without_it_does_not() -> None:
    job = deep()
    free = search(job, Constraints(recompute="none", microbatches=1), certify=False).plan
    full = realised(away_inside(away(free, "host", True))).peak_bytes
    gone = realised(away(free, "host", True)).peak_bytes
    assert gone < full
    limit = (gone + full) // 2
    pins = Constraints(offload="host", offload_states="none", recompute="full", memory_bytes=limit, microbatches=1)
    plan = search(job, pins, certify=False).plan
    assert plan.prediction is not None and max(plan.prediction.peak_bytes) <= limit
    handed = {
        (choice.kind, name)
        for choice in plan.stages[0].choices
        for name, fate in choice.activations.items()
        if fate == "host" and name in plan.program.kinds[choice.kind].outputs
    }
    assert handed


def test_the_step_is_near_the_best_of_every_choice() -> None:
    """Which segments make everything again, and which have what they hand on wait: all of them tried."""
    job = deep()
    free = search(job, Constraints(recompute="none", microbatches=1), certify=False).plan
    (stage,) = free.stages
    found = []
    for fates in itertools.product(("keep", "again", "wait", "both"), repeat=len(stage.segment_choice)):
        choices = []
        for at, fate in zip(stage.segment_choice, fates, strict=True):
            choice = stage.choices[at]
            kind = free.program.kinds[choice.kind]
            acts = dict.fromkeys(recomputable(kind), "recompute") if fate in ("again", "both") else {}
            acts |= dict.fromkeys(boundary_values(kind), "host") if fate in ("wait", "both") else {}
            choices.append(msgspec.structs.replace(choice, activations=acts))
        moved = msgspec.structs.replace(stage, choices=tuple(choices), segment_choice=tuple(range(len(choices))))
        made = realised(msgspec.structs.replace(free, stages=(moved,)))
        found.append((made.peak_bytes, made.simulation.step_s))
        if len(found) > 1024:
            break
    low, high = min(peak for peak, _ in found), max(peak for peak, _ in found)
    for share in (0.2, 0.5, 0.8):
        limit = int(low + share * (high - low))
        best = min(step_s for peak, step_s in found if peak <= limit)
        pins = Constraints(offload="host", offload_states="none", memory_bytes=limit, microbatches=1)
        plan = search(job, pins, certify=False).plan
        assert plan.prediction is not None and plan.prediction.step_s <= best * 1.05
