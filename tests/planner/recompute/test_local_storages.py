"""What options say a kind saves is what its lowered forward does."""

from __future__ import annotations

import msgspec
import pytest

from paraplan.ir.plan import Plan
from paraplan.lowering.stage_blocks import PlanBlocks
from paraplan.planner.recompute.stage_recompute import options_of
from paraplan.planner.sampling import random_plan
from tests.captures import program_of
from tests.runtime.pipelines import job_of


def saved_bytes(plan: Plan, kind: int) -> int:
    """Of the storages that a segment of a kind saves, those that are its own."""
    parts = PlanBlocks(plan).routes[0].parts[0]
    first = next(index for index, segment in enumerate(plan.program.segments) if segment.kind == kind)
    block = parts.forwards[first].block
    handed = {block.values[local].base for local in block.outputs if local is not None}
    own = {block.values[local].base for local, _ in parts.forwards[first].saved.values()}
    return sum(block.values[base].storage_bytes for base in own - handed - set(block.inputs))


def doing(plan: Plan, activations: dict[int, dict[str, str]]) -> Plan:
    """The plan with these activations by kind, and nothing in chunks."""
    stage = plan.stages[0]
    choices = tuple(
        msgspec.structs.replace(choice, activations=activations.get(choice.kind, {}), split=None)
        for choice in stage.choices
    )
    return msgspec.structs.replace(plan, stages=(msgspec.structs.replace(stage, choices=choices),))


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt2", "llama", "qwen3_moe", "t5", "vit"])
@pytest.mark.parametrize("seed", range(4))
def test_an_option_says_what_is_saved(name: str, seed: int) -> None:
    plan = doing(random_plan(job_of(program_of(name, 0.0), 4), seed, max_microbatches=1), {})
    options = options_of(plan)
    other = 0
    for number in range(max(map(len, options))):
        taken = {kind: each[min(number, len(each) - 1)] for kind, each in enumerate(options)}
        made = doing(plan, {kind: option.activations for kind, option in taken.items()})
        for kind, option in taken.items():
            if number == 0:
                assert option.saved_bytes == saved_bytes(made, kind)
            other += abs(option.saved_bytes - saved_bytes(made, kind)) > 0.01 * options[kind][0].saved_bytes
    assert other <= 1, "partial sums that only what is executed again reads are kept as they were made"
