"""Updates that are one step late: a single device that updates late, exactly what was predicted, and all in the end."""

from __future__ import annotations

import copy
from dataclasses import replace

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paraplan.capture import capture
from paraplan.capture.reference import run_step
from paraplan.codegen import build_modules
from paraplan.cost_models.constants import efficiency_of
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.cost_models.simulator.rank_trace import Simulation
from paraplan.ir.errors import ConstraintError, InvalidPlanError, PlanMismatchError, RuntimeFailure
from paraplan.ir.execution.name import Role
from paraplan.ir.execution.rank_program import RankProgram, StepKind
from paraplan.ir.plan import Plan
from paraplan.lowering import lower
from paraplan.lowering.phases import step_lists
from paraplan.lowering.steps.delayed_update import UpdatePhase, flush_steps, in_phase
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.contradictions import check_constraints
from paraplan.planner.options.values import warm_up_steps
from paraplan.planner.search import search
from paraplan.runtime.buckets import check_buckets
from paraplan.runtime.in_process import InProcessTrainer
from paraplan.runtime.trainer import Trainer, TrainerOptions
from paraplan.runtime.transport.distributed import DistributedTransport
from tests.numerics import relative_error
from tests.whole.offloaded_states import captured, job, moved, planned, squares, updated_at

STEPS = 6


def late(plan: Plan, after: int) -> Plan:
    return msgspec.structs.replace(plan, delayed_update=after)


def rate(step: int) -> float:
    """A learning rate that is another one in every step."""
    return 0.05 / (1 + step)


def options(cls: type[torch.optim.Optimizer]) -> dict[str, float]:
    return {"lr": rate(0), "momentum": 0.9} if cls is torch.optim.SGD else {"lr": rate(0)}


class Reference:
    """One device that holds the gradients of what is late until the step after, with its own step's rate and clipping.

    Args:
        name: of the model.
        plan: says what is late, and after how many steps.
    """

    def __init__(self, name: str, plan: Plan, cls: type[torch.optim.Optimizer]) -> None:
        self.model, self.program, self.batch = captured(name)
        named = dict(self.model.named_parameters(remove_duplicate=False))
        self.params = {key: nn.Parameter(named[key].detach().double().clone()) for key in self.program.params}
        self.late = {key for stage in plan.stages for key, layouts in stage.params.items() if plan.is_late(layouts)}
        self.after = plan.delayed_update or 0
        self.optimizer = cls(self.params.values(), **options(cls))
        self.held: dict[str, Tensor] = {}
        self.held_rate = 0.0
        self.done = 0

    def update(self, grads: dict[str, Tensor], lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for key, param in self.params.items():
            param.grad = grads.get(key)
        self.optimizer.step()

    def step(self, clip: float = 0.5) -> float:
        values = {key: value.detach() for key, value in self.params.items()}
        loss, grads, _ = run_step(self.program, values, dict(self.model.named_buffers()), self.batch, 0)
        for key, param in self.params.items():
            param.grad = grads[key]
        torch.nn.utils.clip_grad_norm_(self.params.values(), clip)
        now = {key: param.grad.clone() for key, param in self.params.items() if param.grad is not None}
        late = self.late if self.done >= self.after else set()
        self.update({key: grad for key, grad in now.items() if key not in late}, rate(self.done))
        self.flush()
        self.held, self.held_rate = {key: grad for key, grad in now.items() if key in late}, rate(self.done)
        self.done += 1
        return float(loss)

    def flush(self) -> None:
        if self.held:
            self.update(self.held, self.held_rate)
        self.held = {}


def in_process(plan: Plan, name: str) -> InProcessTrainer:
    programs = verify_plan(plan)
    return InProcessTrainer(plan, programs, [build_modules(p) for p in programs], captured(name)[0])


def take(trainer: InProcessTrainer, name: str, cls: type[torch.optim.Optimizer], step: int) -> float:
    loss = float(trainer.step(captured(name)[2]))
    trainer.clip_grad_norm_(0.5)
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
    trainer.apply_optimizer(cls, **options(cls))
    return loss


def as_predicted(
    plan: Plan, programs: tuple[RankProgram, ...], simulation: Simulation, trainer: InProcessTrainer, peaks: bool
) -> None:
    """Entries of the step's phase exactly; peaks of a steady one whose optimizer has its states."""
    for rank, each in enumerate(trainer.ranks):
        of = plan.schedule.rank_class[rank]
        program = in_phase(programs[of], each.phase)
        assert [entry.key for entry in trainer.entries(rank)] == [entry.key for entry in entries(program)]
        if not peaks:
            continue
        assert 1.0 <= simulation.peak_bytes[of] / trainer.peak_bytes(rank) <= 1.001
        found, wanted = trainer.tier_peak_bytes(rank), simulation.traces[of].tier_peak_bytes
        workspace = {tier: most for tier, (_, most) in programs[of].update_tiers.items()}
        assert set(found) == set(wanted)
        assert all(wanted[tier] - workspace.get(tier, 0) <= found[tier] <= wanted[tier] for tier in found)


CASES = [
    ("gpt2", "one", 1, 0),
    ("mlp", "one", 3, 2),
    ("gpt2", "dp", 1, 0),
    ("mlp", "zero1", 1, 2),
    ("gpt2", "zero3", 2, 0),
    ("mlp", "tp", 1, 2),
    ("gpt2", "pp", 1, 0),
]
"""A model, its pins, every so-manieth parameter late, from which step on."""


@pytest.mark.parametrize(("name", "pin", "every", "after"), CASES)
def test_steps_equal_one_device_that_updates_late(name: str, pin: str, every: int, after: int) -> None:
    """All parameters late, or a third or half of them; losses of every step, parameters after each, and in the end."""
    plan = planned(name, pin, "host", "momentum")
    plan = late(plan if every == 1 else moved(plan, every, states_alone=True), after)
    programs = verify_plan(plan)
    simulation = simulate_plan(plan, programs)
    trainer, wanted = in_process(plan, name), Reference(name, plan, torch.optim.SGD)
    phases = []
    for step in range(STEPS):
        loss = take(trainer, name, torch.optim.SGD, step)
        as_predicted(plan, programs, simulation, trainer, step > after + 1)
        phases.append(trainer.ranks[0].phase)
        assert abs(loss - wanted.step()) <= 1e-9 * abs(loss)
        assert relative_error(trainer.params(), {key: x.detach() for key, x in wanted.params.items()}) <= 1e-9
    assert phases == [UpdatePhase.WARM] * after + [UpdatePhase.FIRST] + [UpdatePhase.STEADY] * (STEPS - 1 - after)
    before = trainer.params()
    trainer.flush()
    wanted.flush()
    assert relative_error(trainer.params(), {key: x.detach() for key, x in wanted.params.items()}) <= 1e-9
    assert relative_error(trainer.params(), before) > 1e-6, "a step's gradients were held"
    assert abs(take(trainer, name, torch.optim.SGD, STEPS) - wanted.step()) <= 1e-9 * abs(loss)
    assert trainer.ranks[0].phase is UpdatePhase.FIRST


def trainer_of(plan: Plan, name: str) -> Trainer:
    (program,) = verify_plan(plan)
    transport = DistributedTransport(plan.stages[0].mesh)
    return Trainer(
        plan, (program,), build_modules(program), captured(name)[0], transport, TrainerOptions(build=build_modules)
    )


@pytest.mark.parametrize(("name", "cls"), [("gpt2", torch.optim.SGD), ("mlp", torch.optim.AdamW)])
def test_in_a_thread_each_update_has_the_rate_and_clipping_of_its_own_step(
    name: str, cls: type[torch.optim.Optimizer]
) -> None:
    """A schedule moves on, and gradients are zeroed in place, while an update is due; all parameters late, or some."""
    for every in (1, 2):
        whole = planned(name, "one", "host", "momentum" if cls is torch.optim.SGD else "adamw")
        plan = late(whole if every == 1 else moved(whole, every, states_alone=True), 1)
        trainer, wanted = trainer_of(plan, name), Reference(name, plan, cls)
        optimizer = trainer.optimizer(cls, **options(cls))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step) / rate(0))
        for _ in range(STEPS):
            loss = float(trainer.step(wanted.batch))
            trainer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            schedule.step()
            assert abs(loss - wanted.step()) <= 1e-9 * abs(loss)
        wanted.flush()
        found = trainer.full_state_dict()
        assert relative_error(found, {key: x.detach() for key, x in wanted.params.items()}) <= 1e-9
        assert float(trainer.step(wanted.batch)) == pytest.approx(
            float(trainer.eval_step(wanted.batch).loss), rel=1e-12
        )


def whole(x: Tensor) -> Tensor:
    """Of a state dict, which has DTensors where there is a process group."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def test_a_run_that_goes_on_from_a_checkpoint_equals_the_one_that_wrote_it() -> None:
    plan = late(planned("gpt2", "one", "host"), 2)

    def go_on(trainer: Trainer, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, Tensor]:
        for _ in range(steps):
            trainer.step(captured("gpt2")[2])
            optimizer.step()
            optimizer.zero_grad()
        return trainer.full_state_dict()

    for steps in (1, 2, 4):  # in the first steps, at their end, and with updates due
        trainer = trainer_of(plan, "gpt2")
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=1e-2)
        go_on(trainer, optimizer, steps)
        model = {name: x.clone() for name, x in trainer.state_dict().items()}
        states = copy.deepcopy(trainer.optimizer_state_dict(optimizer))
        assert all(torch.equal(x, whole(model[name])) for name, x in trainer.full_tensors().items() if name in model)
        other = trainer_of(plan, "gpt2")
        theirs = other.optimizer(torch.optim.AdamW, lr=1e-2)
        other.optimizer_state_dict(theirs, create=True)
        other.load_state_dict(model)
        other.load_optimizer_state_dict(theirs, states)
        assert other.steps_done == trainer.steps_done
        wanted, found = go_on(trainer, optimizer, 3), go_on(other, theirs, 3)
        assert all(torch.equal(x, found[name]) for name, x in wanted.items())


def test_an_optimizers_own_state_dict_has_every_step() -> None:
    plan = late(planned("mlp", "one", "host"), 0)
    trainer, wanted = trainer_of(plan, "mlp"), Reference("mlp", plan, torch.optim.AdamW)
    optimizer = trainer.optimizer(torch.optim.AdamW, lr=rate(0))
    for _ in range(2):
        trainer.step(wanted.batch)
        optimizer.step()
        optimizer.zero_grad()
    counts = {float(state["step"]) for state in optimizer.state_dict()["state"].values()}
    assert counts == {2.0}
    trainer.step(wanted.batch)
    optimizer.step()
    assert trainer.state.is_due
    trainer.load_full_state_dict({name: x.detach() for name, x in wanted.params.items()})
    assert not trainer.state.is_due, "gradients of parameters that are no more"


def test_what_cannot_be_late_is_refused() -> None:
    plan = late(planned("mlp", "one", "host"), 0)
    trainer = trainer_of(plan, "mlp")
    optimizer = trainer.optimizer(torch.optim.AdamW, lr=1e-2)
    loss = trainer.step(captured("mlp")[2])
    with pytest.raises(PlanMismatchError, match=r"step\(closure\) .* call step\(\) without a closure, or plan without"):
        optimizer.step(lambda: loss)
    optimizer.step()
    for param in trainer.state.params.values():
        param.grad = torch.zeros_like(param)
    with pytest.raises(PlanMismatchError, match=r"called twice .*; call trainer.flush\(\) between"):
        optimizer.step()
    with pytest.raises(InvalidPlanError, match="no parameter's states are where the host updates them"):
        verify_plan(late(planned("mlp", "one", "none"), 0))
    with pytest.raises(InvalidPlanError, match="delayed_update is -1: at least 0 steps"):
        verify_plan(late(plan, -1))
    with pytest.raises(ConstraintError, match="delayed_update=-1: at least 0 steps"):
        check_constraints(Constraints(delayed_update=-1, offload="host"), 1)
    for states in ("none", "fetched", "disk", "all"):
        with pytest.raises(ConstraintError, match=f"with offload_states={states!r} there is nothing; give place_"):
            check_constraints(Constraints(delayed_update=1, offload_states=states), 1)
    with pytest.raises(PlanMismatchError, match="plans with delayed_update cannot share a trainer"):
        check_buckets([plan, plan])
    assert [warm_up_steps(given) for given in (None, False, True, 0, 7)] == [None, None, 40, 0, 7]


def test_a_parameter_is_late_in_all_stages_or_in_none() -> None:
    plan = late(planned("gpt2", "pp", "host"), 0)
    verify_plan(plan)
    *before, stage = plan.stages
    shared = next(name for name in before[0].params if name in stage.params)
    params = {**stage.params, shared: msgspec.structs.replace(stage.params[shared], fetched=True)}
    stages = (*before, msgspec.structs.replace(stage, params=params))
    with pytest.raises(InvalidPlanError, match=f"stage {len(before)}: parameter {shared} .* late in some alone"):
        verify_plan(msgspec.structs.replace(plan, stages=stages))


def test_a_failed_step_leaves_the_update_that_was_begun() -> None:
    """What was begun beside a step that fails is in the parameters of the next one."""
    plan = late(planned("mlp", "one", "host", "momentum"), 0)
    trainer, wanted = trainer_of(plan, "mlp"), Reference("mlp", plan, torch.optim.SGD)
    optimizer = trainer.optimizer(torch.optim.SGD, **options(torch.optim.SGD))
    for step in range(4):
        if step == 2:
            modules, name = trainer.state.executor.modules, next(iter(trainer.state.executor.modules))
            module = modules[name]
            modules[name] = lambda given: 1 / 0
            with pytest.raises(RuntimeFailure, match="ZeroDivisionError"):
                trainer.step(wanted.batch)
            modules[name] = module
            wanted.flush()
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        loss = float(trainer.step(wanted.batch))
        trainer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert abs(loss - wanted.step()) <= 1e-9 * abs(loss)


def layers(host_rate: float, precision: str = "fp32") -> Job:
    """Twelve layers of 1,024 on one H100 whose host updates at a rate."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12)))
    program = capture(model, {"input": torch.randn(2048, 1024)}, loss_fn=squares, precision=precision)
    return updated_at(host_rate, replace(job(program, 1), cluster=parse_cluster("1xH100")))


@pytest.mark.parametrize("host_rate", [76.8e9, 7680e9])
def test_a_late_update_hides_behind_forward_and_backward(host_rate: float) -> None:
    plan = search(layers(host_rate), Constraints(offload_states="host", microbatches=1), certify=False).plan
    timely, after = (simulate_plan(each, lower(each)) for each in (plan, late(plan, 3)))
    trace, without = after.traces[0], timely.traces[0]
    (update_s,) = trace.update_s.values()
    (in_time_s,) = without.update_s.values()
    assert without.exposed_update_s == pytest.approx(in_time_s, rel=1e-12)
    assert trace.exposed_update_s < update_s
    assert after.step_s == pytest.approx(timely.step_s - in_time_s + trace.exposed_update_s, rel=1e-9)
    assert after.step_s >= max(update_s, trace.bound_s)
    assert after.peak_bytes == timely.peak_bytes
    grads = sum(param.spec.nbytes for param in plan.program.params.values())
    taken_s = grads / host_rate / efficiency_of("cuda").memory
    assert in_time_s <= update_s <= in_time_s + taken_s * (1 + 1e-9), "gradients go through the host's memory too"
    assert (update_s > in_time_s) == (trace.exposed_update_s > 0.0) == (host_rate == 76.8e9)
    assert after.tier_peak_bytes["host"] == timely.tier_peak_bytes["host"] + grads


@pytest.mark.parametrize("host_rate", [76.8e9, 768e9])
def test_the_planner_updates_late_where_it_may_and_that_is_faster(host_rate: float) -> None:
    given = layers(host_rate)
    plans = {
        states: search(given, Constraints(offload_states=states, microbatches=1), certify=False).plan
        for states in ("none", "host", "fetched")
    }
    steps = {states: simulate_plan(plan, lower(plan)).step_s for states, plan in plans.items()}
    steps["late"] = simulate_plan(late(plans["host"], 5), lower(late(plans["host"], 5))).step_s
    pins = Constraints(offload_states="host", delayed_update=5, microbatches=1)
    found = search(given, pins).plan
    assert found.delayed_update == 5 and found.prediction is not None and found.certificate is not None
    assert found.prediction.step_s == steps["late"] < steps["host"]
    assert found.certificate.bound_s <= found.prediction.step_s
    assert any("one step late" in note for note in found.notes)
    prediction = plans["none"].prediction
    assert prediction is not None
    pins = Constraints(
        offload="host",
        recompute="none",
        delayed_update=5,
        microbatches=1,
        memory_bytes=int(0.9 * max(prediction.peak_bytes)),
    )
    best, without = (search(given, each).plan for each in (pins, msgspec.structs.replace(pins, delayed_update=None)))
    assert best.prediction is not None and without.prediction is not None
    assert best.prediction.step_s <= without.prediction.step_s
    assert best.prediction.step_s <= min(steps["late"], steps["fetched"]) * (1 + 1e-9)
    assert without.delayed_update is None


def test_a_host_without_room_for_held_gradients_updates_in_time() -> None:
    given = layers(768e9)
    host = Constraints(offload_states="host", microbatches=1)
    plan = search(given, host, certify=False).plan
    assert plan.prediction is not None
    (group,) = given.cluster.groups
    room = plan.prediction.tier_peak_bytes["host"] + 4096
    group = msgspec.structs.replace(group, host_memory_bytes=room * group.devices_per_node)
    given = replace(given, cluster=msgspec.structs.replace(given.cluster, groups=(group,)))
    found = search(given, msgspec.structs.replace(host, delayed_update=0), certify=False).plan
    assert found.delayed_update is None


def test_phases_are_the_same_blocks_with_fewer_steps() -> None:
    plan = planned("gpt2", "zero1", "host")
    (timely, *_), (program, *_) = verify_plan(plan), verify_plan(late(plan, 1))
    warm, first = (in_phase(program, phase) for phase in (UpdatePhase.WARM, UpdatePhase.FIRST))
    assert in_phase(program, UpdatePhase.STEADY) == program and in_phase(timely, UpdatePhase.FIRST) == timely
    assert not flush_steps(timely)
    assert {name.role for name in program.outer} - {name.role for name in warm.outer} == {Role.LATE}
    without = [step for step in warm.steps if step.kind is not StepKind.DROP]
    assert [step.kind for step in without] == [step.kind for step in timely.steps if step.kind is not StepKind.DROP]
    flush = flush_steps(program)
    assert [step.kind for step in flush[:2]] == [StepKind.UPDATE, StepKind.UPDATED] and len(flush) > 2
    assert len(first.steps) == len(program.steps) - len(flush) + 1
    assert program.steps[0] == flush[0], "before all else"


def test_the_lists_of_steps_are_parts_of_the_program() -> None:
    plan = planned("gpt2", "zero1", "host")
    for program in (verify_plan(plan)[0], verify_plan(late(plan, 1))[0]):
        lists = step_lists(program)
        for phase, steps in lists.phases.items():
            assert (*steps.before, *steps.after) == in_phase(program, phase).steps
            assert steps.brought == (*lists.ahead, *steps.after)
            left_out = [step for step in steps.after if step not in steps.again]
            assert {step.kind for step in left_out} <= {StepKind.DROP, StepKind.ACCUMULATE}
            assert (
                {*steps.grads}
                == {n for step in left_out for n in (*step.drops, *step.args[1:])}
                >= {name for name in program.grads.values() if name not in program.outer}
            )
        assert lists.flush == flush_steps(program)
        assert all(step.kind is StepKind.CALL for step in lists.restoring)
