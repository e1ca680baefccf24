"""What is written over parameters and buffers at a step's end, by one launch."""

from __future__ import annotations

from collections import Counter
from functools import cache

import msgspec
import pytest
import torch
from torch import Tensor, nn

from paraplan.capture import capture
from paraplan.codegen.block_graph import emit_block
from paraplan.codegen.verify import verify, verify_program
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.predict import simulate_plan
from paraplan.ir.execution import names
from paraplan.ir.execution.name import Role
from paraplan.ir.execution.rank_program import WRITE_MANY, RankProgram, Step, StepKind
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.jobs.checking.dry_run import dry_run
from paraplan.lowering import implement
from paraplan.lowering.rank_classes import lower_anew
from paraplan.lowering.rewrites.fused_writes import write_together
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search


class Model(nn.Module):
    """Five parameters; three buffers, of two dtypes, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mix, self.second = nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.mix(self.first(x)))).square().mean()


class Deep(nn.Module):
    """Layers of two parameters each, and one more at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.last = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x)).square().mean()


@cache
def _program(model: type[nn.Module]) -> Program:
    return capture(model().train(), {"x": torch.randn(8, 8)}, precision="bf16")


def _planned(cluster: str, model: type[nn.Module] = Model, **constraints: object) -> Plan:
    of = ClusterSpec.local(1) if cluster == "local:1" else parse_cluster(cluster)
    job = Job(_program(model), of, OPTIMIZERS["adamw"], ModelRef(display="model"), {})
    return search(job, Constraints(**constraints)).plan  # type: ignore[arg-type]


def _apart(plan: Plan) -> RankProgram:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(implement, "write_together", lambda program: program)
        return lower_anew(plan)[0]


def _writes(rank: RankProgram) -> list[Step]:
    """Steps that only write."""
    return [step for step in rank.steps if step.kind is StepKind.CALL and not step.outs]


def test_one_launch_for_parameters_and_one_for_each_dtype_of_buffers() -> None:
    plan = _planned("1xH100")
    (rank,), apart = lower_anew(plan), _apart(plan)
    verify_program(rank)
    for block in rank.blocks.values():
        verify(emit_block(block), block)
    steps = [step for step in _writes(rank) if step.block.startswith("writes.")]
    assert sorted(len(step.args) // 2 for step in steps) == [2, 4, 5]
    written = (Counter(arg for step in _writes(each) for arg in step.args) for each in (rank, apart))
    assert next(written) == next(written)
    ran = [run for step in steps for run in dry_run(rank, "cuda")[step.block]]
    assert {(run.target, len(run.launches), run.workspace_bytes) for run in ran} == {(WRITE_MANY, 1, 0)}


def test_stages_write_their_own() -> None:
    """Of unlike many parameters: what is made of one stage's block is not taken for another's."""
    plan = _planned("2xH100", Deep, pp=2, microbatches=2)
    for rank in lower_anew(plan):
        (step,) = [step for step in _writes(rank) if any(arg.role is Role.PARAMETER for arg in step.args)]
        assert len(rank.blocks[step.block].inputs) == len(step.args) == 2 * len(rank.grads)
    assert len({len(rank.grads) for rank in lower_anew(plan)}) == 2


def test_less_time_and_as_much_memory() -> None:
    plan = _planned("1xH100")
    now, before = simulate_plan(plan, lower_anew(plan)), simulate_plan(plan, (_apart(plan),))
    assert now.step_s < before.step_s and now.peak_bytes == before.peak_bytes
    assert plan.certificate is not None and plan.certificate.bound_s <= now.step_s


def test_everything_is_written_and_cast() -> None:
    rank = lower_anew(_planned("1xH100"))[0]
    (step,) = [step for step in _writes(rank) if any(arg.role is Role.PARAMETER for arg in step.args)]
    block = rank.blocks[step.block]
    values = [block.values[name] for name in block.inputs]
    inputs = [torch.randn(value.shape).to(getattr(torch, value.dtype)) for value in values]
    emit_block(block)(*inputs)
    given = dict(zip(step.args, inputs, strict=True))
    assert {x.dtype for x in inputs} == {torch.bfloat16, torch.float32}
    for name, tensor in given.items():
        if name.role is Role.PARAMETER:
            assert torch.equal(tensor, given[names.state(name.source)].bfloat16())


def test_a_write_that_touches_what_another_overwrites_is_no_part_of_its_run() -> None:
    apart = _apart(_planned("1xH100"))
    assert not any(step.block.startswith("restore") for step in write_together(apart).steps)
    at = [index for index, step in enumerate(apart.steps) if step.block.startswith("restore")]
    state, param = apart.steps[at[0]].args
    others = other, other_state, other_buffer = (make("other") for make in (names.param, names.state, names.buffer))
    assert not {*others} & {*apart.outer}
    for args, joined in (
        ((other_state, other), [10]),
        ((other_state, param), [2, 8]),
        ((param, other), [2, 8]),
        ((other, state), [2, 2, 6]),
        ((other_state, other_buffer), [2, 2, 6]),
    ):
        steps = [*apart.steps]
        steps[at[1]] = msgspec.structs.replace(steps[at[1]], args=args)
        made = write_together(msgspec.structs.replace(apart, steps=tuple(steps)))
        after = [step for step in made.steps[-7:] if step.kind is StepKind.CALL and step.action == "0UPDATE"]
        assert [len(step.args) for step in after] == joined, args


def test_cpus_and_what_is_brought_from_elsewhere_write_one_by_one() -> None:
    assert not any(step.block.startswith("writes.") for step in lower_anew(_planned("local:1"))[0].steps)
    away = lower_anew(_planned("1xH100", offload_states="host"))[0]
    assert sum(step.block.startswith("restore") for step in away.steps) == 5
