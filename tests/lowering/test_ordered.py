"""Programs in the order of a memory schedule: what is run, freed and made again is what the actions say.

Random schedules (ops executed again, frees put off, actions swapped) of small models are lowered, priced and run:
whatever the check accepts has the actions' peak to the byte and the single device's numbers, dropout included; whatever
breaks a rule is refused with its place.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from msgspec.structs import replace

from paraplan.codegen import build_modules
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.memory_actions import Act, Actions, format_actions, free, parse_actions, run
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.ir.struct import from_json, to_json
from paraplan.lowering import lower
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.memory.memory_schedule import evaluate, freeing
from paraplan.planner.memory.single_device import memory_tiers
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer
from tests.lowering.memory_orders import BATCH, ordered, planned, random_schedule, with_copies
from tests.numerics import relative_error

torch.set_num_threads(1)


def check_runs(actions: Actions) -> None:
    """The ordered program: peak, entries, and numbers."""
    model, _, flat, wanted = planned()
    plan = ordered(actions)
    programs = verify_plan(plan)
    problem = dataclasses.replace(flat.problem, tiers=memory_tiers(plan.cluster))
    priced = evaluate(problem, actions)
    trace = simulate_plan(plan, programs).traces[0]
    assert trace.peak_bytes == priced.peak_bytes
    assert trace.step_s == pytest.approx(priced.step_s, rel=1e-9)
    trainer = InProcessTrainer(plan, programs, [build_modules(p) for p in programs], model, seed=0)
    loss = trainer.step(BATCH)
    assert abs(loss - wanted.loss) <= 1e-12
    grads = trainer.grads()
    assert set(grads) == set(wanted.grads)
    assert relative_error(grads, wanted.grads) <= 1e-12
    for name, value in trainer.buffers().items():
        assert torch.allclose(value, wanted.buffers[name], rtol=0, atol=1e-12), name
    trainer.apply_optimizer(torch.optim.SGD, lr=0.1)
    # The workspace of so small a dropout is rounded up.
    assert 0.97 * priced.peak_bytes <= trainer.peak_bytes(0) <= priced.peak_bytes
    assert [entry.key for entry in trainer.entries(0)] == [entry.key for entry in entries(programs[0])]


def test_its_own_order() -> None:
    check_runs(planned()[2].actions)


@pytest.mark.parametrize("seed", range(12))
def test_random_schedules_run_as_priced(seed: int) -> None:
    actions = random_schedule(random.Random(seed))
    reruns = sum(action.act is Act.RUN for action in actions) - len(planned()[2].problem.ops)
    assert reruns > 5
    check_runs(actions)


@pytest.mark.parametrize("seed", range(8))
def test_copies_run_as_priced(seed: int) -> None:
    actions = with_copies(random.Random(seed))
    assert sum(action.act is Act.BACK for action in actions) > 2
    check_runs(actions)


def test_what_the_check_accepts_of_swapped_actions_is_right() -> None:
    """Hazards in place are the check's alone: `evaluate` knows nothing of them."""
    problem, draw = planned()[2].problem, random.Random(5)
    accepted = refused = hazards = 0
    for _ in range(300):
        actions = list(random_schedule(draw))
        for _ in range(draw.randint(1, 2)):
            at = draw.randrange(len(actions) - 1)
            to = min(len(actions) - 1, at + draw.choice((1, 2, 5, 20)))
            actions.insert(to, actions.pop(at))
        if draw.random() < 0.3:  # again, late: perhaps after what it reads was overwritten
            actions.insert(len(actions) - draw.randrange(20), run(draw.randrange(12)))
        try:
            evaluate(problem, tuple(actions))
            possible = True
        except InvalidPlanError:
            possible = False
        try:
            lower(ordered(tuple(actions)))
        except InvalidPlanError as fault:
            refused += 1
            hazards += possible and "overwritten" in str(fault)
            continue
        assert possible
        accepted += 1
        if accepted <= 15:
            check_runs(tuple(actions))
    assert accepted > 15 and refused > 50 and hazards > 0


def test_text_round_trips_and_lives_in_a_plan_file() -> None:
    actions = random_schedule(random.Random(3))
    assert parse_actions(format_actions(actions)) == actions
    plan = ordered(actions)
    again = from_json(to_json(plan), Plan, "test", InvalidPlanError)
    assert again == plan and to_json(again) == to_json(plan)
    plain = planned()[1]
    assert plain.memory_actions is None


def without(actions: Actions, *words: str) -> Actions:
    return tuple(action for action in actions if str(action) not in words)


def faults() -> dict[str, tuple[Actions, str]]:
    flat = planned()[2]
    problem, own = flat.problem, freeing(flat.problem, tuple(range(len(flat.problem.ops))))
    once = next(index for index, op in enumerate(problem.ops) if op.name == "accumulate")
    kept = next(index for index, tensor in enumerate(problem.tensors) if tensor.kept)
    reader = next(index for index, op in enumerate(problem.ops) if op.reads)
    made = problem.tensors[problem.ops[reader].reads[0]].maker
    write = next(index for index, op in enumerate(problem.ops) if op.name == "paraplan.write")
    first = next(index for index, op in enumerate(problem.ops) if op.makes and op.repeatable)
    held = problem.ops[first].makes[0]
    grown = flat.flat.storages[flat.flat.ops[once].writes[0]].tensor
    at, then = own.index(run(once)), own.index(run(once)) + 1
    return {
        "no op": ((*own, run(10_000)), "the step has"),
        "no tensor": ((*own, free(10_000)), "the step has"),
        "read before made": (without(own, f"R{made}"), "which is not there"),
        "freed twice": ((*own, free(0)), "is not there"),
        "twice": (tuple(a for action in own for a in ((action, action) if action == run(once) else (action,))),
                  "must not be executed twice"),
        "never runs": (without(own, f"R{write}"), "never runs"),
        "left behind": ((*own, free(kept)), "must be there in the end"),
        "there still": (tuple(a for action in without(own, f"F{held}")
                              for a in ((action, action) if action == run(first) else (action,))), "is there still"),
        "tier": ((*own[:1], *parse_actions("O0:tape"), *own[1:]), "no tier 'tape'"),
        "not stored": ((*own, *parse_actions("B0:host")), "is not on host"),
        "stale": ((*own[:at], *parse_actions(f"O{grown}:host"), *own[at:then],
                   *parse_actions(f"F{grown} B{grown}:host"), *own[then:]), "written over"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["no op", "no tensor", "read before made", "freed twice", "twice", "never runs", "left behind", "there still",
     "tier", "not stored", "stale"],
)  # fmt: skip
def test_an_impossible_schedule_is_refused(name: str) -> None:
    actions, message = faults()[name]
    with pytest.raises(InvalidPlanError, match=message):
        verify_plan(ordered(actions))


@pytest.mark.parametrize("text", ["X1", "R", "R-1", "R1:host", "O1", "R²"])
def test_no_action(text: str) -> None:
    with pytest.raises(InvalidPlanError, match="no action"):
        verify_plan(replace(planned()[1], memory_actions=text))


def test_several_devices_have_no_schedule() -> None:
    job = Job(planned()[1].program, ClusterSpec.local(2), OPTIMIZERS["sgd"], ModelRef(display="net"), {})
    plan = search(job, Constraints(mesh=(2,), microbatches=1), certify=False).plan
    with pytest.raises(InvalidPlanError, match="on 2 devices"):
        verify_plan(replace(plan, memory_actions="R0"))
