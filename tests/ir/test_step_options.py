"""Options of a whole step are declared once, and everything that carries them does so by that record."""

from __future__ import annotations

import json

import msgspec

from paraplan.ir.plan import Plan
from paraplan.ir.step_options import ROOMY, StepOptions
from paraplan.jobs.files import encode_plan
from paraplan.planner.assemble import assemble, decided
from paraplan.planner.sampling import DRAWN, DRAWN_ELSEWHERE, NOT_DRAWN, random_plan

EVERY = StepOptions(
    bundle_bytes=1,
    reducing_bytes=2,
    reduce_every=3,
    hold_casts=True,
    delayed_update=4,
    params_ahead=True,
    states_ahead=True,
    parted_messages=True,
)
"""None as it is by default."""


def test_every_option_is_drawn_or_said_not_to_be() -> None:
    assert all(getattr(EVERY, name) != getattr(StepOptions(), name) for name in StepOptions.__struct_fields__)
    assert {*DRAWN, *DRAWN_ELSEWHERE, *NOT_DRAWN} == {*StepOptions.__struct_fields__}
    assert len(DRAWN) + len(DRAWN_ELSEWHERE) + len(NOT_DRAWN) == len(StepOptions.__struct_fields__)


def test_plans_decisions_and_options_agree(tiny_gpt2) -> None:  # type: ignore[no-untyped-def]
    job = tiny_gpt2.job(2)
    plan = msgspec.structs.replace(random_plan(job, 0), **msgspec.structs.asdict(EVERY))
    assert plan.options == EVERY
    decisions = decided(plan, plan.stages[0].mesh)
    assert decisions.options == EVERY.before_passes == ROOMY.but(bundle_bytes=1)
    assert assemble(job, decisions).options == decisions.options


def test_files_have_the_order_that_they_had(tiny_gpt2) -> None:  # type: ignore[no-untyped-def]
    """Options stand among the plan's fields as they did when each was one of those."""
    plan: Plan = random_plan(tiny_gpt2.job(2), 0)
    written = [name for name in json.loads(encode_plan(plan)) if name in ORDER]
    assert written == [*ORDER]


ORDER = (
    *("version", "made_with", "model", "program", "cluster", "num_microbatches", "optimizer", "bundle_bytes"),
    *("reducing_bytes", "reduce_every", "sum_products", "compiled", "reduce_dtype", "hold_casts", "delayed_update"),
    *("params_ahead", "states_ahead", "parted_messages", "stages", "schedule", "memory_actions", "profile"),
    *("prediction", "certificate", "notes"),
)
