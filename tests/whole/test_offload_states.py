"""Optimizer states in the host's memory, updated there: the single device's numbers, exactly what was predicted."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import pytest
import torch
from torch import Tensor, nn

from paraplan.capture import capture
from paraplan.codegen import build_modules
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.cost_models.simulator.peak_attribution import BytesRole, peak_of
from paraplan.ir.errors import ConstraintError, InfeasibleError, InvalidPlanError, NoPlanError
from paraplan.ir.execution import names
from paraplan.ir.execution.name import Role as OuterRole
from paraplan.ir.execution.rank_program import InstrKind, StepKind
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.tier_placement import HERE, PLACEMENTS
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.lowering import lower
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.contradictions import check_constraints
from paraplan.planner.decision_classes import param_classes
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer
from tests.against_eager import eager_error, loss_by
from tests.numerics import relative_error
from tests.whole.offloaded_states import (
    PINS,
    captured,
    job,
    moved,
    planned,
    single,
    squares,
    trained,
    updated_at,
)

WHOLE = ("one", "zero3", "tp", "pp")
"""Those whose parameters can be on the host too: they lie as their states do."""
MODELS = ("gpt2", "mlp")
CASES = [
    *((MODELS[at % 2], pin, "host") for at, pin in enumerate(PINS)),
    *((MODELS[1 - tuple(PINS).index(pin) % 2], pin, "all") for pin in WHOLE),
]
"""Every pin with either: one model with states alone on the host, the other with parameters there too."""


@pytest.mark.parametrize(("name", "pin", "states"), CASES)
def test_steps_equal_one_device_and_are_as_predicted(name: str, pin: str, states: str) -> None:
    plan = planned(name, pin, states, "momentum")
    stored = "host" if states == "all" else ""
    places = {(each.state_tier, each.stored_tier) for stage in plan.stages for each in stage.params.values()}
    assert places == {("host", stored)}
    programs = verify_plan(plan)
    simulation = simulate_plan(plan, programs)
    trainer = trained(plan, name, torch.optim.SGD, lr=0.05, momentum=0.9)
    loss, grads, params = single(name)
    assert relative_error(trainer.params(), params) <= 1e-9
    for rank in range(len(trainer.ranks)):
        of = plan.schedule.rank_class[rank]
        assert [entry.key for entry in trainer.entries(rank)] == [entry.key for entry in entries(programs[of])]
        assert 1.0 <= simulation.peak_bytes[of] / trainer.peak_bytes(rank) <= 1.001
        assert trainer.tier_peak_bytes(rank) == simulation.traces[of].tier_peak_bytes != {}
    again = InProcessTrainer(plan, programs, [build_modules(p) for p in programs], captured(name)[0])
    assert abs(float(again.step(captured(name)[2])) - loss) <= 1e-9 * abs(loss)
    assert relative_error(again.grads(), grads) <= 1e-9


@pytest.mark.parametrize(
    ("pin", "every", "precision"), [("one", 2, "bf16"), ("zero1", 1, "fp64"), ("zero3", 3, "bf16")]
)
def test_the_tier_changes_no_bit(pin: str, every: int, precision: str) -> None:
    """Adam on the same shards, here or there; half of the classes, a third, or all. Parameters in halves that are there
    are cast as they come."""
    device = planned("gpt2", pin, "none", precision=precision)
    host = moved(device, every)
    wanted, found = (trained(plan, "gpt2", torch.optim.AdamW, lr=1e-3) for plan in (device, host))
    for name, value in wanted.params().items():
        assert torch.equal(found.params()[name], value), name
    programs = verify_plan(host)
    simulation = simulate_plan(host, programs)
    for rank in range(len(found.ranks)):
        assert [entry.key for entry in found.entries(rank)] == [entry.key for entry in entries(programs[0])]
        assert 1.0 <= simulation.peak_bytes[0] / found.peak_bytes(rank) <= 1.001
        assert found.tier_peak_bytes(rank) == simulation.tier_peak_bytes
    assert simulation.peak_bytes < simulate_plan(device, verify_plan(device)).peak_bytes


def test_gradients_leave_during_the_backward_and_parameters_come_back_ahead() -> None:
    (program,) = verify_plan(planned("gpt2", "one"))
    steps = program.steps
    copies = [
        (index, instr.target)
        for index, step in enumerate(steps)
        for instr in (program.blocks[step.block].instrs if step.kind is StepKind.CALL else ())
        if instr.kind is InstrKind.COPY
    ]
    (update,) = [index for index, step in enumerate(steps) if step.kind is StepKind.UPDATE]
    backward = max(index for index, step in enumerate(steps) if step.block.endswith(".B"))
    out = [index for index, target in copies if target == "offload"]
    back = [index for index, target in copies if target == "prefetch"]
    assert len(out) == len(back) == len(program.grads)
    assert out[0] < backward < update < back[0], "the first gradients go while later ones are made"
    written = [index for index, step in enumerate(steps) if step.block.startswith("restore")]
    assert all(issued < done for issued, done in zip(back[1:], written, strict=False)), "one ahead of the one written"
    assert all(program.outer[names.state(name)].tier == "host" for name in program.grads)


def test_parameters_come_a_segment_ahead_and_two_segments_are_here_at_most() -> None:
    plan = planned("gpt2", "one", "all")
    (program,) = verify_plan(plan)
    here: set[int] = set()
    passed: list[int] = []
    for step in program.steps:
        name = step.block.split(".")[0]
        if name == "fetch":
            here.add(step.segment)
            assert len(here) <= 2
        elif step.segment >= 0 and step.block.endswith((".F", ".B")):
            kind = plan.program.kinds[plan.program.segments[step.segment].kind]
            assert (step.segment in here) == bool(set(kind.params) & set(program.blocks[step.block].inputs))
            passed.append(step.segment)
            here.discard(step.segment)
    assert not here and len(passed) == 2 * len(plan.program.segments)
    peaks = [max(simulate_plan(each, verify_plan(each)).peak_bytes) for each in (plan, planned("gpt2", "one"))]
    assert peaks[0] < peaks[1]


@pytest.mark.parametrize("states", ["host", "all"])
def test_the_peak_taken_apart_adds_up(states: str) -> None:
    plan = planned("gpt2", "one", states)
    (program,) = verify_plan(plan)
    trace = simulate_plan(plan, (program,)).traces[0]
    peak = peak_of(program, trace, plan.program)
    assert sum(each.nbytes for each in peak.roles if not each.tier) == trace.peak_bytes
    away = {each.role: each.nbytes for each in peak.roles if each.tier == "host"}
    assert away[BytesRole.STATES] >= 2 * away[BytesRole.PARAMETERS if states == "all" else BytesRole.MASTERS] > 0
    assert BytesRole.STATES not in {each.role for each in peak.roles if not each.tier}


def test_what_cannot_be_is_refused() -> None:
    plan = planned("mlp", "one")
    (stage,) = plan.stages
    name, layouts = next(iter(stage.params.items()))
    params = {**stage.params, name: msgspec.structs.replace(layouts, state_tier="tape")}
    wrong = msgspec.structs.replace(plan, stages=(msgspec.structs.replace(stage, params=params),))
    with pytest.raises(InvalidPlanError, match=rf"parameter {name}: state_tier is 'tape'; it can be '', 'host'"):
        verify_plan(wrong)
    with pytest.raises(ConstraintError, match=r"offload_states='tape': one of none, host, all, .*, either"):
        check_constraints(Constraints(offload_states="tape"), 1)
    params = {**stage.params, name: msgspec.structs.replace(layouts, state_tier="", stored_tier="host")}
    wrong = msgspec.structs.replace(plan, stages=(msgspec.structs.replace(stage, params=params),))
    with pytest.raises(
        InvalidPlanError,
        match=rf"parameter {name}: params=host with states=device: .*; give states=host, or params=device",
    ):
        verify_plan(wrong)
    with pytest.raises(ConstraintError, match=r"offload_states='all' with zero=1.*give zero=3 or 0"):
        check_constraints(Constraints(offload_states="all", dp=2, zero=1), 2)
    with pytest.raises(ConstraintError, match=r"params\['w'\].*'tape' is no placement: give one of none, host, all"):
        check_constraints(Constraints(params={"w": "R/R/R@tape"}), 1)


def test_parameters_in_halves_leave_where_nothing_else_fits() -> None:
    """Fetched as the float32 they are updated in, each cast as it comes; priced so, and chosen."""
    here, states, plan = (planned("mlp", "one", where, precision="bf16") for where in ("none", "host", "all"))
    peaks = [simulate_plan(each, lower(each)).peak_bytes[0] for each in (here, states, plan)]
    assert peaks[2] < peaks[1] < peaks[0]
    (program,) = verify_plan(plan)
    comes = [block for name, block in program.blocks.items() if name.startswith("came.p")]
    for block in comes:
        dtypes = {value.dtype for value in (block.values[name] for name in block.outputs if name is not None)}
        waits, casts = ([each for each in block.instrs if each.kind is kind] for kind in (InstrKind.WAIT, InstrKind.OP))
        assert dtypes == {"bfloat16"} and len(casts) == len(waits) == len(block.outputs)
    held = [value for value in program.outer.values() if value.role is OuterRole.PARAMETER]
    assert comes and {(value.dtype, value.tier) for value in held} == {("float32", "host")}
    limit = (peaks[1] + peaks[2]) // 2
    pins = Constraints(offload="host", memory_bytes=limit, recompute="none", microbatches=1)
    chosen = search(job(captured("mlp", "bf16")[1], 1), pins).plan
    assert chosen.prediction is not None and max(chosen.prediction.peak_bytes) <= limit
    assert "host" in {layouts.stored_tier for layouts in chosen.stages[0].params.values()}
    assert any(note.startswith("per device") and "parameters on the host" in note for note in chosen.notes)


def described(**fields: float) -> Job:
    """A job on one device whose host is described so."""
    given = job(captured("mlp")[1], 1)
    (group,) = given.cluster.groups
    cluster = msgspec.structs.replace(given.cluster, groups=(msgspec.structs.replace(group, **fields),))
    return Job(given.program, cluster, given.optimizer, given.model, {})


def test_a_host_without_room_or_rate_is_named() -> None:
    host = Constraints(offload_states="host")
    with pytest.raises(InfeasibleError, match=r"takes at least .* there.* has room for 97.66 KiB: 1.67 MiB are"):
        search(described(host_memory_bytes=100_000), host, certify=False)
    with pytest.raises(ConstraintError, match="describes no room on host"):
        search(described(host_memory_bytes=0), host, certify=False)
    with pytest.raises(ConstraintError, match="give its groups host_memory_bytes_per_s"):
        search(described(host_memory_bytes_per_s=0.0), host, certify=False)
    slow, fast = (
        search(described(host_memory_bytes_per_s=rate), host, certify=False).plan.prediction for rate in (1e8, 1e10)
    )
    params = captured("mlp")[1].params
    moved_bytes = 7 * sum(param.spec.nbytes for param in params.values()) + 2 * 4 * len(params)  # and step counters
    assert slow is not None and fast is not None
    assert slow.step_s - fast.step_s == pytest.approx(moved_bytes * (1 / 1e8 - 1 / 1e10), rel=1e-6)


PLACES = (HERE, PLACEMENTS["host"], PLACEMENTS["fetched"])


@pytest.mark.parametrize(("share", "host_rate"), [(0.25, 8e9), (0.6, 1e9)])
def test_the_planner_moves_the_states_that_cost_least(share: float, host_rate: float) -> None:
    """Against every assignment of classes to places."""
    model = nn.Sequential(*(nn.Linear(*size, bias=False) for size in ((96, 128), (128, 64), (64, 8))))
    batch = {"input": torch.randn(16, 96)}
    given = updated_at(host_rate, job(capture(model, batch, loss_fn=squares, precision="fp64"), 1, "momentum"))
    free, moved_all = (
        search(given, Constraints(offload_states=states, microbatches=1), certify=False).plan
        for states in ("none", "host")
    )
    peaks = [max(plan.prediction.peak_bytes) for plan in (free, moved_all) if plan.prediction is not None]
    limit = int(peaks[1] + share * (peaks[0] - peaks[1]))
    pins = Constraints(offload="host", recompute="none", memory_bytes=limit, microbatches=1)
    found = search(given, pins)
    (stage,) = found.plan.stages
    classes = param_classes(given.program)
    best = float("inf")
    for places in itertools.product(PLACES, repeat=len(classes)):
        at = {name: place for of, place in zip(classes, places, strict=True) for name in of.params}
        params = {name: layouts.placed(at[name], layouts.ahead) for name, layouts in stage.params.items()}
        plan = msgspec.structs.replace(free, stages=(msgspec.structs.replace(stage, params=params),))
        simulation = simulate_plan(plan, lower(plan))
        if simulation.peak_bytes[0] <= limit:
            best = min(best, simulation.step_s)
    assert found.plan.prediction is not None and found.plan.certificate is not None
    assert "host" in {layouts.state_tier for layouts in stage.params.values()}
    assert max(found.plan.prediction.peak_bytes) <= limit
    assert found.plan.certificate.bound_s <= best * (1 + 1e-9)
    assert found.plan.prediction.step_s <= best * 1.02


@pytest.mark.parametrize(("host_rate", "fetched"), [(76.8e9, True), (768e9, False)])
def test_a_slow_host_has_its_states_fetched(host_rate: float, fetched: bool) -> None:
    """Memory that its devices share, as the catalog has it; ten times that."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12)))
    program = capture(model, {"input": torch.randn(4, 1024)}, loss_fn=squares)
    given = updated_at(host_rate, replace(job(program, 1), cluster=parse_cluster("1xH100")))
    steps = {}
    for states in ("none", "host", "fetched"):
        found = search(given, Constraints(offload_states=states, microbatches=1), certify=False).plan.prediction
        assert found is not None
        steps[states] = found
    assert (steps["fetched"].step_s < steps["host"].step_s) == fetched
    limit = int(0.9 * max(steps["none"].peak_bytes))
    pins = Constraints(offload="host", recompute="none", memory_bytes=limit, microbatches=1)
    plan = search(given, pins, certify=False).plan
    assert {layouts.fetched for layouts in plan.stages[0].params.values() if layouts.state_tier} == {fetched}
    assert plan.prediction is not None and plan.prediction.step_s <= min(steps[x].step_s for x in ("host", "fetched"))


def test_states_stay_where_memory_is_ample() -> None:
    given = job(captured("mlp")[1], 2)
    plan = search(given, Constraints(dp=2, zero=0, offload="host"), certify=False).plan
    assert {layouts.state_tier for layouts in plan.stages[0].params.values()} == {""}


class Scaled(nn.Module):
    """Trained layers and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.randn(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)) * self.scale).pow(2).mean()


@pytest.mark.parametrize("states", ["host", "fetched", "all"])
def test_what_is_frozen_has_no_states_to_be_elsewhere(states: str) -> None:
    batch = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(3))}
    program = capture(Scaled(), batch, precision="fp64")
    job = Job(program, ClusterSpec.local(1), OPTIMIZERS["momentum"], ModelRef(display="scaled"), {})
    plan = search(job, Constraints(offload_states=states), certify=False).plan
    placed = plan.stages[0].params
    assert placed["first.weight"].state_tier == "host"
    assert placed["scale"].state_tier == placed["scale"].stored_tier == ("host" if states == "all" else "")
    assert eager_error(plan, Scaled(), batch, loss_by(None)) <= 1e-9


def refused(cluster_bytes: int, offload_states: str) -> str:
    """Why nothing is found within 200,000 bytes, with so many on the host."""
    pins = Constraints(offload_states=offload_states, memory_bytes=200_000)
    with pytest.raises(NoPlanError) as told:
        search(described(host_memory_bytes=cluster_bytes), pins, certify=False)
    return str(told.value)


def test_more_host_memory_is_advised_where_it_is_what_is_missing() -> None:
    enough, short = refused(1 << 30, "all"), refused(600_000, "any")
    assert "if copies took none; use smaller microbatches" in enough
    assert "describe more" not in enough and "offload='host'" not in enough.partition("So it is in")[0]
    assert "describe more host_memory_bytes" in short
