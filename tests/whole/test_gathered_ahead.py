"""Stored copies that rest sharded and are gathered once a step, beside the forward: the same numbers, less exposed."""

from __future__ import annotations

from functools import lru_cache

import msgspec
import pytest
import torch

from benchmarks.megatron_gpt import GPTSettings, MegatronGPT, gpt_batch, gpt_model
from paraplan.capture import capture
from paraplan.capture.reference import run_step
from paraplan.codegen import build_modules
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.cost_models.simulator.rank_trace import Simulation
from paraplan.ir.errors import ConstraintError, InvalidPlanError
from paraplan.ir.execution import names
from paraplan.ir.execution.rank_program import InstrKind, RankProgram, StepKind
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.mesh import R, parse_layout
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.lowering import lower
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.contradictions import check_constraints
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer
from tests.numerics import relative_error


@lru_cache
def captured(precision: str = "fp64") -> tuple[MegatronGPT, dict[str, torch.Tensor], Program]:
    torch.manual_seed(0)
    model = MegatronGPT(GPTSettings(32, 3, 4, 64, 16, tied=True, flash=True))
    model = model.double() if precision == "fp64" else model
    batch = {key: torch.randint(64, (8, 16)) for key in ("input_ids", "labels")}
    return model, batch, capture(model, batch, precision=precision)


def planned(devices: int, precision: str = "fp64", **pins: object) -> Plan:
    program = captured(precision)[2]
    job = Job(program, ClusterSpec.local(devices), OPTIMIZERS["adamw"], ModelRef(display="gpt"), {})
    return search(job, Constraints(**pins), 20.0, certify=False).plan  # type: ignore[arg-type]


def gathered_after_updates(program: RankProgram) -> int:
    """Gathers that the step's end waits for."""
    ends = [index for index, step in enumerate(program.steps) if step.kind is StepKind.UPDATE]
    blocks = [program.blocks[step.block] for step in program.steps[ends[-1] :] if step.block]
    return sum(instr.kind is InstrKind.COLLECTIVE for block in blocks for instr in block.instrs)


@pytest.mark.parametrize(
    ("devices", "pins"),
    [
        (2, {"dp": 2, "zero": 1, "microbatches": 2}),
        (4, {"dp": 2, "tp": 2, "zero": 2, "sp": True}),
        (4, {"dp": 2, "pp": 2, "zero": 1, "microbatches": 2}),
        (4, {"dp": 2, "pp": 2, "zero": 2, "microbatches": 2, "schedule": "interleaved"}),
    ],
)
def test_the_single_devices_numbers(devices: int, pins: dict[str, object]) -> None:
    model, batch, program = captured()
    plan = planned(devices, **pins)
    assert {layouts.ahead for stage in plan.stages for layouts in stage.params.values()} >= {True}
    programs = verify_plan(plan)
    assert not any(gathered_after_updates(each) for each in programs)
    trainer = InProcessTrainer(plan, programs, [build_modules(each) for each in programs], model)
    params = {name: model.get_parameter(name).detach().clone() for name in program.params}
    optimizer = torch.optim.AdamW([torch.nn.Parameter(params[name]) for name in params], lr=1e-3)
    for _ in range(2):
        loss, grads, _ = run_step(program, params, {}, batch, 0)
        assert float(abs(trainer.step(batch) - loss) / abs(loss)) <= 1e-9
        assert relative_error(trainer.grads(), grads) <= 1e-9
        trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3)
        for param, name in zip(optimizer.param_groups[0]["params"], params, strict=True):
            param.grad = grads[name]
        optimizer.step()
        params = {n: p.detach() for p, n in zip(optimizer.param_groups[0]["params"], params, strict=True)}
    assert relative_error(trainer.params(), params) <= 1e-9
    simulation = simulate_plan(plan, programs)
    for rank, of in enumerate(plan.schedule.rank_class):
        assert [entry.key for entry in trainer.entries(rank)] == [entry.key for entry in entries(programs[of])]
        assert 1.0 <= simulation.peak_bytes[of] / trainer.peak_bytes(rank) <= 1.02


def test_masters_and_evaluations() -> None:
    """bf16, where the shard is a copy of its own; and an evaluation, which gathers too."""
    model, batch, _ = captured("bf16")
    plan = planned(2, "bf16", dp=2, zero=1)
    programs = verify_plan(plan)
    assert not gathered_after_updates(programs[0])
    outer = programs[0].outer
    for name, layouts in plan.stages[0].params.items():
        assert layouts.ahead == (layouts.stored != layouts.state)
        assert outer[names.param(name)].layout == layouts.state and outer[names.state(name)].nbytes
    modules = [build_modules(each) for each in programs]
    trainer = InProcessTrainer(plan, programs, modules, model, build=build_modules)
    first = float(trainer.step(batch))
    assert abs(float(trainer.eval_step(batch).loss) - first) <= 1e-2 * abs(first)
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2)
    assert float(trainer.step(batch)) != first  # of the updated copies; what falls is not this sum of passes
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2)
    for rank in range(2):
        assert [entry.key for entry in trainer.entries(rank)] == [entry.key for entry in entries(programs[0])]


def with_ahead(plan: Plan, ahead: bool) -> Plan:
    stages = tuple(
        msgspec.structs.replace(
            stage, params={name: msgspec.structs.replace(lies, ahead=ahead) for name, lies in stage.params.items()}
        )
        for stage in plan.stages
    )
    return msgspec.structs.replace(plan, stages=stages)


@pytest.mark.parametrize("pins", [{"dp": 16}, {"dp": 8, "tp": 2, "sp": True}])
def test_the_gather_hides_beside_the_forward(pins: dict[str, int]) -> None:
    model = gpt_model(GPTSettings(2048, 4, 16, 32000, 2048, tied=False, flash=True))
    program = capture(model, gpt_batch(64, 2048), precision="bf16")
    job = Job(program, parse_cluster("8xH100:2"), OPTIMIZERS["adamw"], ModelRef(display="gpt"), {})
    plan = search(job, Constraints(zero=1, microbatches=2, **pins), 20.0, certify=False).plan
    eager = with_ahead(plan, False)
    ahead, after = (_simulated(each) for each in (plan, eager))
    assert _tail_s(ahead) < 0.2 * _tail_s(after)
    assert ahead.step_s < after.step_s - 0.5 * _tail_s(after)


def _tail_s(simulation: Simulation) -> float:
    """What follows the update."""
    trace = simulation.traces[simulation.busiest]
    return trace.step_s - max(span.end_s for span in trace.spans if span.label == "update")


def _simulated(plan: Plan) -> Simulation:
    return simulate_plan(plan, lower(plan))


def test_a_plan_that_does_not_fit_with_the_shard_beside_the_whole_does_without() -> None:
    model = gpt_model(GPTSettings(256, 2, 4, 64, 64, tied=True, flash=True))
    program = capture(model, gpt_batch(64, 64), precision="bf16")
    job = Job(program, ClusterSpec.local(2), OPTIMIZERS["adamw"], ModelRef(display="gpt"), {})
    pins = Constraints(dp=2, zero=1, microbatches=1, recompute="none")
    plan = search(job, pins, 20.0, certify=False).plan
    assert all(layouts.ahead for layouts in plan.stages[0].params.values() if layouts.stored != layouts.state)
    peaks = [max(_simulated(each).peak_bytes) for each in (plan, with_ahead(plan, False))]
    assert peaks[1] < peaks[0]
    less = msgspec.structs.replace(pins, memory_bytes=peaks[0] - 1)
    found = search(job, less, 20.0, certify=False).plan
    assert not any(layouts.ahead for layouts in found.stages[0].params.values())


def test_what_can_be_pinned_and_what_is_refused() -> None:
    name = "positions.weight"
    for text in ("R/P/S0", "R/P/S0+ahead"):
        plan = planned(2, dp=2, zero=1, params={name: text})
        assert plan.stages[0].params[name].text == text
    plan = planned(2, dp=2, zero=0)
    with pytest.raises(InvalidPlanError, match=r"ahead, but gathers alone do not lead from state 'R' to stored 'R'"):
        verify_plan(with_ahead(plan, True))
    with pytest.raises(ConstraintError, match=r"or '\+ahead' where the stored copy"):
        check_constraints(Constraints(params={name: "R/P+ahead"}), 2)
    assert parse_layout(plan.stages[0].params[name].resting) == (R,)
