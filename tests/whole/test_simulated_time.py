"""The simulated step is what the executor takes when every kernel, collective, message and copy takes its price.

Ranks are threads whose clocks only count (`benchmarks.sleeping`), so nothing here depends on a real clock.
"""

from __future__ import annotations

from functools import cache

import msgspec
import pytest
import transformers as hf

from benchmarks.pipelines import tokens
from benchmarks.sleeping import step_by_threads
from paraplan.capture import capture
from paraplan.cost_models.predict import simulate_plan
from paraplan.ir.model.program import Program
from paraplan.ir.plan import Plan
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.constraints import Constraints
from paraplan.planner.sampling import random_plan
from paraplan.planner.search import search
from tests.runtime.pipelines import cut, job_of, mixed, pipeline_of


@cache
def gpt2() -> Program:
    config = hf.GPT2Config(n_positions=16, n_embd=16, n_layer=2, n_head=2, vocab_size=64)
    batch = {name: x.repeat(2, 1) for name, x in tokens(64).items()}
    return capture(hf.GPT2LMHeadModel(config).train(), batch)


@cache
def one(ranks: int, **pins: int | str) -> Plan:
    return search(job_of(gpt2(), ranks), Constraints(microbatches=2, **pins), certify=False).plan


def agree(plan: Plan) -> None:
    programs = verify_plan(plan)
    simulation = simulate_plan(plan, programs)
    assert step_by_threads(plan, programs, simulation) == pytest.approx(simulation.step_s, rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_random_plans(seed: int) -> None:
    agree(random_plan(job_of(gpt2(), 2), seed, 2))


def test_two_axes() -> None:
    agree(one(4, dp=2, tp=2, zero=3))


@pytest.mark.parametrize("states", ["host", "disk", "disk-all", "fetched"])
def test_states_elsewhere(states: str) -> None:
    agree(msgspec.structs.replace(one(2, dp=2, zero=3, offload_states=states), bundle_bytes=8192))


@pytest.mark.parametrize("schedule, stages", (("1f1b", 2), ("zb-v", 4), ("chimera", 2)))
def test_pipelines(schedule: str, stages: int) -> None:
    agree(pipeline_of(one(1), schedule, 2, cut(len(gpt2().segments), stages)))


def test_meshes_of_unequal_size() -> None:
    """A rank that sends to two others cuts out one part after the other."""
    agree(mixed((one(2, dp=2), one(4, dp=4)), "1f1b", cut(len(gpt2().segments), 2)))


def test_another_plans_step_does_not_agree() -> None:
    plan, other = one(2, dp=2), one(2, dp=2, zero=3)
    simulation = simulate_plan(other, verify_plan(other))
    assert step_by_threads(plan, verify_plan(plan), simulation) != pytest.approx(simulation.step_s, rel=1e-3)
