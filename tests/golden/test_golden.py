"""Plans, what ranks execute, predictions and code are byte for byte what they were (`python -m tests.golden`)."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.zoo import adapters, language, moe, multimodal, recommender, recurrent, seq2seq, vision
from paraplan.ir.plan import Plan
from tests.golden.__main__ import KEPT
from tests.golden.cases import CASES, plan_of
from tests.golden.texts import digest, texts_of

torch.set_num_threads(1)
FAMILIES = (adapters, language, moe, multimodal, recommender, recurrent, seq2seq, vision)


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="another torch is captured as other graphs")
@pytest.mark.parametrize("case", CASES)
def test_what_a_plan_becomes(case: str) -> None:
    assert {part: digest(text) for part, text in texts_of(plan_of(case)).items()} == json.loads(KEPT.read_text())[case]


def test_the_plans_have_every_family_and_every_part() -> None:
    plans = [plan_of(case) for case in CASES]
    models = {plan.model.display for plan in plans}
    assert all(not models.isdisjoint(family.MODELS) for family in FAMILIES)
    assert set().union(*map(_parts, plans)) == PARTS


PARTS = {
    *("pipeline", "replicas", "split backward", "chunks", "recompute", "late", "compiled", "ring", "experts", "float8"),
    *(
        f"{what} on {tier}"
        for what in ("activations", "states", "parameters", "gradients")
        for tier in ("host", "disk")
    ),
}


def _parts(plan: Plan) -> set[str]:
    """What a plan has, of `PARTS`."""
    choices = [choice for stage in plan.stages for choice in stage.choices]
    layouts = [layouts for stage in plan.stages for layouts in stage.params.values()]
    targets = {op.target for kind in plan.program.kinds for op in kind.graph.ops}
    found = {
        "pipeline": len(plan.stages) > 1,
        "replicas": any(stage.replicas for stage in plan.stages),
        "split backward": any("W" in text for actions in plan.schedule.classes for text in actions),
        "chunks": any(choice.split for choice in choices),
        "recompute": any("recompute" in choice.activations.values() for choice in choices),
        "late": plan.delayed_update is not None,
        "compiled": plan.compiled,
        "ring": any("ring" in op for choice in choices for op in choice.ops),
        "experts": any("experts" in target for target in targets),
        "float8": any("float8" in target for target in targets),
    }
    for tier in ("host", "disk"):
        found[f"activations on {tier}"] = any(tier in choice.activations.values() for choice in choices)
        found[f"states on {tier}"] = any(each.state_tier == tier for each in layouts)
        found[f"parameters on {tier}"] = any(each.stored_tier == tier for each in layouts)
        found[f"gradients on {tier}"] = any(each.grad_tier == tier for each in layouts)
    return {part for part, has in found.items() if has}
