"""Gradients of weights that products add to their sums."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor, nn

from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.predict import simulate_plan
from paraplan.ir.execution.name import Role
from paraplan.ir.execution.rank_program import SUM, SUMMED, RankProgram, StepKind
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.lowering import lower
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search
from paraplan.runtime.executing.products_into import linear_grad_weight_


class Model(nn.Module):
    """Two layers, and one weight that is read twice at once."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.twice = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(torch.tanh(self.up(x)))
        return (self.twice(x) + self.twice(torch.tanh(x))).square().mean()


def planned(cluster: ClusterSpec, precision: str, microbatches: int = 4) -> Plan:
    program = capture(Model(), {"x": torch.randn(8, 8)}, precision=precision)
    ranks = cluster.num_devices
    job = Job(program, cluster, OPTIMIZERS["sgd"], ModelRef(display="model"), {})
    return search(job, Constraints(dp=ranks, zero=0, microbatches=microbatches), certify=False).plan


def sums(program: RankProgram) -> list[tuple[str, str]]:
    """Dtypes of sums and of what is multiplied, call by call."""
    calls = [program.blocks[step.block] for step in program.steps if step.kind is StepKind.CALL]
    found = [(block, instr) for block in calls for instr in block.instrs if instr.target == SUM]
    return [tuple(block.values[str(arg)[1:]].dtype for arg in instr.args[:2]) for block, instr in found]  # type: ignore[misc]


def additions(program: RankProgram) -> int:
    return sum(step.kind is StepKind.ACCUMULATE and step.args[0].role is Role.ACCUMULATOR for step in program.steps)


@pytest.mark.parametrize(
    ("cluster", "precision", "dtypes"),
    [
        (ClusterSpec.local(1), "fp64", ("float64", "float64")),
        (ClusterSpec.local(2), "fp32", ("float32", "float32")),
        (ClusterSpec.local(1), "bf16", None),  # a CPU's products of halves make halves
        (parse_cluster("2xH100"), "bf16", ("float32", "bfloat16")),
        (parse_cluster("1xH100"), "fp16", ("float32", "float16")),
    ],
)
def test_products_add_to_sums_of_dtypes_they_can(
    cluster: ClusterSpec, precision: str, dtypes: tuple[str, str] | None
) -> None:
    plan = planned(cluster, precision)
    with_, without = (lower(msgspec.structs.replace(plan, sum_products=on))[0] for on in (True, False))
    assert sums(with_) == [dtypes] * 6 * (dtypes is not None), "two weights, three microbatches after the first"
    assert sums(without) == [] and additions(without) - additions(with_) == len(sums(with_))
    again = [instr.target for step in with_.steps if step.block for instr in with_.blocks[step.block].instrs]
    assert again.count(SUMMED) == 4 * 4 - len(sums(with_)), "what is read twice is added up before"


def test_it_takes_less_time_and_no_more_memory() -> None:
    plan = planned(parse_cluster("1xH100"), "bf16")
    with_, without = (
        simulate_plan(each, lower(each)) for each in (plan, msgspec.structs.replace(plan, sum_products=False))
    )
    assert with_.step_s < without.step_s and max(with_.peak_bytes) <= max(without.peak_bytes)


def test_one_microbatch_has_nothing_to_add() -> None:
    assert sums(lower(planned(ClusterSpec.local(1), "fp32", 1))[0]) == []


@pytest.mark.parametrize("transposed", [False, True])
def test_the_kernel_adds(transposed: bool) -> None:
    g, x = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    total = torch.randn(*((4, 5) if transposed else (5, 4)), dtype=torch.float64)
    wanted = total + (torch.einsum("abk,abn->kn", x, g) if transposed else torch.einsum("abn,abk->nk", g, x))
    linear_grad_weight_(total, g, x, transposed)
    torch.testing.assert_close(total, wanted)
