"""Where the planner has parameters and states live when memory is short: against every assignment, and run."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from paraplan.capture import capture
from paraplan.capture.reference import run_step
from paraplan.codegen import build_modules
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.realised_plan import realised
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.errors import NoPlanError, SolverLimitError
from paraplan.ir.machine.tier_placement import HERE, PLACEMENTS, TierPlacement
from paraplan.ir.plan import Plan
from paraplan.lowering import lower
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.decision_classes import param_classes
from paraplan.planner.passes.state_placement import choose_places, with_places
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer
from tests.numerics import relative_error
from tests.whole.offloaded_states import captured, job, squares, updated_at, with_host

SIZES = ((96, 128), (128, 64), (64, 8))


@cache
def layers() -> tuple[nn.Module, Job, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(*size, bias=False) for size in SIZES))
    batch = {"input": torch.randn(16, 96)}
    program = capture(model, batch, loss_fn=squares, precision="fp64")
    return model, updated_at(8e9, job(program, 1, "momentum")), batch


@cache
def kept() -> Plan:
    return search(layers()[1], Constraints(offload_states="none", microbatches=1), certify=False).plan


def may_be(place: TierPlacement, tiers: tuple[str, ...]) -> bool:
    return place.states in ("", *tiers) and not place.grads_wait


@cache
def every(tiers: tuple[str, ...] = ("host",)) -> tuple[tuple[float, int, dict[str, int], tuple[Any, ...]], ...]:
    """(step, peak, peaks of tiers, places) of every assignment of parameters to places."""
    names, found = list(kept().stages[0].params), []
    for places in itertools.product([p for p in PLACEMENTS.values() if may_be(p, tiers)], repeat=len(names)):
        plan = with_places(kept(), dict(zip(names, places, strict=True)))
        if "disk" in tiers:
            plan = msgspec.structs.replace(plan, bundle_bytes=0)
        simulation = simulate_plan(plan, lower(plan))
        found.append((simulation.step_s, simulation.peak_bytes[0], simulation.tier_peak_bytes, places))
    return tuple(found)


def limit_of(share: float) -> int:
    """A budget so far between the least that any assignment peaks at and what all on the device takes."""
    least = min(peak for _, peak, _, _ in every())
    return int(least + share * (max(realised(kept()).simulation.peak_bytes) - least))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.95])
def test_the_step_is_that_of_the_best_assignment(share: float) -> None:
    limit = limit_of(share)
    best = min(step_s for step_s, peak, _, _ in every() if peak <= limit)
    pins = Constraints(offload="host", recompute="none", memory_bytes=limit, microbatches=1)
    plan = search(layers()[1], pins).plan
    assert plan.prediction is not None and plan.certificate is not None
    assert max(plan.prediction.peak_bytes) <= limit
    assert plan.certificate.bound_s <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= plan.prediction.step_s <= best * 1.02


def test_parameters_leave_where_nothing_else_fits_and_the_notes_say_so() -> None:
    limit = limit_of(0.0)
    states_only = [peak for _, peak, _, places in every() if not any(place.params for place in places)]
    assert limit < min(states_only), "with all parameters on the device nothing fits"
    pins = Constraints(offload="host", recompute="none", memory_bytes=limit, microbatches=1)
    plan = search(layers()[1], pins).plan
    assert "host" in {layouts.stored_tier for layouts in plan.stages[0].params.values()}
    (note,) = [note for note in plan.notes if "parameters on the host" in note]
    assert "no plan was found to keep parameters on the device" in note
    with pytest.raises(NoPlanError):
        search(layers()[1], msgspec.structs.replace(pins, offload="none"))
    with pytest.raises(NoPlanError):
        search(layers()[1], msgspec.structs.replace(pins, offload_states="either"))


@pytest.mark.parametrize(
    "pinned",
    [
        {"place_states": "disk"},
        {"place_params": "host"},
        {"place_states": "disk", "place_grads": "disk", "update_on": "host"},
    ],
)
def test_where_a_place_is_pinned_no_note_speaks_of_plans_without(pinned: dict[str, str]) -> None:
    plan = search(layers()[1], Constraints(recompute="none", microbatches=1, **pinned)).plan  # type: ignore[arg-type]
    assert not any("no plan was found" in note for note in plan.notes)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_what_was_chosen_runs_as_one_device_does(share: float) -> None:
    model, given, batch = layers()
    pins = Constraints(offload="host", recompute="none", memory_bytes=limit_of(share), microbatches=1)
    as_one_device(search(given, pins, certify=False).plan, model, batch)


def as_one_device(plan: Plan, model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    programs = verify_plan(plan)
    simulation = simulate_plan(plan, programs)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    params = {key: nn.Parameter(tensors[key].detach().double().clone()) for key in plan.program.params}
    optimizer = torch.optim.SGD(params.values(), lr=0.05, momentum=0.9)
    trainer = InProcessTrainer(plan, programs, [build_modules(p) for p in programs], model)
    for _ in range(3):
        batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
        values = {key: value.detach() for key, value in params.items()}
        loss, grads, _ = run_step(plan.program, values, dict(model.named_buffers()), batch, 0)
        for key, param in params.items():
            param.grad = grads[key]
        optimizer.step()
        found = float(trainer.step(batch))
        assert abs(found - float(loss)) <= 1e-9 * abs(float(loss))
        assert relative_error(trainer.grads(), grads) <= 1e-9
        trainer.apply_optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)
        assert relative_error(trainer.params(), {key: value.detach() for key, value in params.items()}) <= 1e-9
    for rank in range(len(trainer.ranks)):
        of = plan.schedule.rank_class[rank]
        assert [entry.key for entry in trainer.entries(rank)] == [entry.key for entry in entries(programs[of])]
        assert 1.0 <= simulation.peak_bytes[of] / trainer.peak_bytes(rank) <= 1.001
        assert trainer.tier_peak_bytes(rank) == simulation.traces[of].tier_peak_bytes


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_of_equal_layers_some_come_home(share: float) -> None:
    """One class of parameters, which layouts can only move together."""
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64, bias=False), nn.Tanh())))
    program = capture(model, {"input": torch.randn(8, 64)}, loss_fn=squares, precision="fp64")
    given = updated_at(8e9, job(program, 1, "momentum"))
    assert len(param_classes(program)) < 6
    free, away = (
        search(given, Constraints(offload_states=states, microbatches=1), certify=False).plan
        for states in ("none", "all")
    )
    assert free.prediction is not None and away.prediction is not None
    low, high = max(away.prediction.peak_bytes), max(free.prediction.peak_bytes)
    pins = Constraints(offload="host", recompute="none", memory_bytes=int(low + share * (high - low)), microbatches=1)
    plan = search(given, pins, certify=False).plan
    places = [layouts.place for layouts in plan.stages[0].params.values()]
    assert 0 < sum(place != HERE for place in places) < len(places)
    assert plan.prediction is not None and plan.prediction.step_s < away.prediction.step_s


def test_a_search_from_any_assignment_ends_near_the_best() -> None:
    limit = limit_of(0.3)
    best = min(step_s for step_s, peak, _, _ in every() if peak <= limit)

    def price(plan: Plan) -> tuple[float, float]:
        made = realised(plan)
        return made.simulation.step_s, made.peak_bytes - limit

    for place in (HERE, PLACEMENTS["all"], PLACEMENTS["all-fetched"]):
        start = with_places(kept(), dict.fromkeys(kept().stages[0].params, place))
        found = choose_places(start, [each for each in PLACEMENTS.values() if may_be(each, ("host",))], price)
        assert price(found)[1] <= 0 and price(found)[0] <= best * 1.02


@pytest.mark.parametrize(("share", "room"), [(0.1, 0.6), (0.5, 0.5)])
def test_where_the_host_lacks_room_states_go_to_disk(share: float, room: float) -> None:
    """Against every assignment to host and disk."""
    model, given, batch = layers()
    limit, host = limit_of(share), int(room * max(tiers.get("host", 0) for _, _, tiers, _ in every()))
    fitting = [x for x in every(("host", "disk")) if x[1] <= limit and x[2].get("host", 0) <= host]
    assert fitting and all(any(place.states == "disk" for place in places) for *_, places in fitting)
    pins = Constraints(offload="disk", recompute="none", memory_bytes=limit, microbatches=1)
    plan = search(with_host(given, host), pins).plan
    assert plan.prediction is not None and plan.certificate is not None
    assert max(plan.prediction.peak_bytes) <= limit and plan.prediction.tier_peak_bytes["host"] <= host
    assert plan.prediction.step_s <= min(fitting)[0] * 1.02
    assert plan.certificate.bound_s <= min(fitting)[0] * (1 + 1e-9)
    assert "disk" in {layouts.state_tier for layouts in plan.stages[0].params.values()}
    assert any(note.startswith("optimizer states on disk") for note in plan.notes)
    as_one_device(plan, model, batch)
    roomy = search(given, pins, certify=False).plan
    assert "disk" not in {layouts.state_tier for layouts in roomy.stages[0].params.values()}, "the host is faster"
    with pytest.raises(NoPlanError, match=r"room for .* on host.*offload='disk'"):
        search(with_host(given, host), msgspec.structs.replace(pins, offload="host"), certify=False)


def test_a_device_too_small_for_its_states_is_told_what_would_do() -> None:
    """Where an update with workspace is what peaks: the least budget that is named does, one byte less does not,
    offloading does."""
    fused = job(captured("mlp")[1], 1)
    given = replace(fused, optimizer=msgspec.structs.replace(fused.optimizer, fused=False))
    free = search(given, Constraints(microbatches=1), certify=False).plan
    assert free.prediction is not None
    pins = Constraints(microbatches=1, memory_bytes=int(0.999 * max(free.prediction.peak_bytes)))
    with pytest.raises(
        SolverLimitError, match=r"peaks at .* at its update.*offload='host'.*optimizer of fewer"
    ) as told:
        search(given, pins, certify=False)
    words = r"The least budget found to do is .*? \((\d+) bytes\), and none below .*?\((\d+) bytes\)"
    named = re.search(words, str(told.value))
    assert named is not None
    found, need = int(named[1]), int(named[2])
    assert pins.memory_bytes is not None and pins.memory_bytes < need <= found
    assert search(given, msgspec.structs.replace(pins, memory_bytes=found), certify=False).plan is not None
    with pytest.raises(NoPlanError):
        search(given, msgspec.structs.replace(pins, memory_bytes=need - 1), certify=False)
    away = search(given, msgspec.structs.replace(pins, offload="host"), certify=False).plan
    assert away.prediction is not None and max(away.prediction.peak_bytes) <= pins.memory_bytes
