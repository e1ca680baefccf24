"""Batch norms that a rank computes alone: joined where they may be, with the numbers of their parts."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from paraplan.capture import capture
from paraplan.codegen.block_graph import emit_block
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.predict import simulate_plan
from paraplan.ir.execution.rank_program import Block, Instr, LocalValue, RankProgram
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.lowering import implement
from paraplan.lowering.blocks.finish import with_frees
from paraplan.lowering.rank_classes import lower_anew
from paraplan.lowering.rewrites.whole_norms import WHOLE, WHOLE_GRAD, join_norms
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search
from paraplan.planner.sharding import prices


class Model(nn.Module):
    """Norms before a relu, a residual sum and a shortcut's norm, a norm nobody follows, and one with no statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=0.3), nn.BatchNorm2d(4)
        self.alone, self.plain = nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False, track_running_stats=False)
        self.mix = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x)
        y = torch.relu(self.first(x))
        y = torch.relu(self.second(y) + self.third(x))
        y = torch.relu(self.alone(y).sin() + y) + self.plain(y).tanh()
        return y.square().mean()


@cache
def _program(precision: str) -> Program:
    return capture(Model().train(), {"x": torch.randn(8, 4, 6, 6)}, precision=precision)


def _planned(
    cluster: ClusterSpec, precision: str, certify: bool = False, reduce_dtype: str = "", **constraints: Any
) -> Plan:
    job = Job(_program(precision), cluster, OPTIMIZERS["sgd"], ModelRef(display="model"), {}, reduce_dtype=reduce_dtype)
    return search(job, Constraints(**constraints), certify=certify).plan


def _targets(block: Block) -> Counter[str]:
    return Counter(instr.target for instr in block.instrs)


def _drawn(value: LocalValue, generator: torch.Generator) -> Tensor:
    dtype = getattr(torch, value.dtype)
    if not dtype.is_floating_point:
        return torch.ones(value.shape, dtype=dtype)
    made = torch.randn(value.shape, generator=generator, dtype=torch.float64).add(0.5)
    return torch.empty_strided(value.shape, value.strides, dtype=dtype).copy_(made)


def _ran(block: Block, inputs: list[Tensor]) -> list[Tensor]:
    made = emit_block(block)(*[x.clone() for x in inputs])
    return [x for x in made if x is not None]


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_joined_blocks_give_the_bits_of_their_parts(precision: str, recompute: str) -> None:
    """Every result and every saved value, forward and backward; recomputed forwards too."""
    generator = torch.Generator().manual_seed(0)
    joined: Counter[str] = Counter()
    for block in lower_anew(_planned(ClusterSpec.local(1), precision, recompute=recompute))[0].blocks.values():
        other = join_norms(block)
        assert (other is block) == (not {WHOLE, WHOLE_GRAD} & set(_targets(other)))
        assert (other.inputs, other.outputs, other.saved) == (block.inputs, block.outputs, block.saved)
        joined += _targets(other)
        if other is not block:
            inputs = [_drawn(block.values[name], generator) for name in block.inputs]
            for mine, part in zip(_ran(other, inputs), _ran(block, inputs), strict=True):
                assert mine.dtype == part.dtype and mine.stride() == part.stride() and torch.equal(mine, part)
    assert joined[WHOLE_GRAD] == 5 and joined[WHOLE] == (5 if recompute == "none" else 10)
    assert not any("bn_" in target and target not in (WHOLE, WHOLE_GRAD) for target in joined)


def _joined(rank: RankProgram, target: str) -> list[Instr]:
    return [instr for block in rank.blocks.values() for instr in block.instrs if instr.target == target]


def test_what_follows_is_joined_too() -> None:
    """Relus and the sum that a norm's result alone goes through; the gradient before a relu is kept where others read
    it."""
    (rank,) = lower_anew(_planned(parse_cluster("1xH100"), "bf16"))
    forwards, backwards = _joined(rank, WHOLE), _joined(rank, WHOLE_GRAD)
    assert len(forwards) == len(backwards) == 5 and {each.kernel for each in (*forwards, *backwards)} == {"triton"}
    assert sorted((each.args[5] is not None, each.args[8]) for each in forwards) == [
        (False, False),
        (False, False),
        (False, False),
        (False, True),
        (True, True),
    ]
    assert sorted((each.args[2] is not None, each.args[7]) for each in backwards) == [
        (False, False),
        (False, False),
        (False, False),
        (True, False),
        (True, True),
    ]
    assert sum(each.outs[3] is not None for each in forwards) == 4, "one keeps no statistics"


def test_sums_of_a_sharded_batch_stay_apart() -> None:
    for rank in lower_anew(_planned(parse_cluster("2xH100"), "bf16", dp=2)):
        assert not _joined(rank, WHOLE) and not _joined(rank, WHOLE_GRAD)
        assert len(_joined(rank, "paraplan.bn_squares")) == 5


def _forward() -> Block:
    blocks = lower_anew(_planned(ClusterSpec.local(1), "fp32"))[0].blocks
    return next(block for name, block in blocks.items() if name.endswith(".F") and _targets(join_norms(block))[WHOLE])


def test_what_others_read_or_counts_otherwise_stays_apart() -> None:
    block = _forward()
    before = _targets(join_norms(block))[WHOLE]
    squares = next(instr for instr in block.instrs if instr.target == "paraplan.bn_squares")
    saved = msgspec.structs.replace(block, saved=(*block.saved, *squares.outs))
    names = {out for out in saved.saved if out is not None}
    saved = msgspec.structs.replace(saved, instrs=with_frees(names | {*saved.outputs}, list(saved.instrs)))
    assert _targets(join_norms(saved))[WHOLE] == before - 1
    at = next(at for at, instr in enumerate(block.instrs) if instr.target == "paraplan.bn_rstd")
    of_more = msgspec.structs.replace(block.instrs[at], args=(block.instrs[at].args[0], 576, block.instrs[at].args[2]))
    other = msgspec.structs.replace(block, instrs=(*block.instrs[:at], of_more, *block.instrs[at + 1 :]))
    assert _targets(join_norms(other))[WHOLE] == before - 1, "a batch of twice as many samples"


def test_less_time_and_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _planned(parse_cluster("1xH100"), "bf16")
    joined = simulate_plan(plan, lower_anew(plan))
    monkeypatch.setattr(implement, "join_norms", lambda block: block)
    apart = simulate_plan(plan, lower_anew(plan))
    assert joined.step_s < apart.step_s and max(joined.peak_bytes) <= max(apart.peak_bytes)


@pytest.mark.parametrize(
    ("cluster", "constraints"),
    [
        ("1xH100", {}),
        ("1xH100", {"recompute": "full"}),
        ("2xH100", {"dp": 2, "zero": 1, "reduce_dtype": "fp32"}),
        ("2xH100", {"tp": 2}),
    ],
)
def test_no_plan_is_faster_than_what_is_proved(cluster: str, constraints: dict[str, Any]) -> None:
    """The planner prices parts at what they add to a joined op: above that, a bound would be no bound."""
    plan = _planned(parse_cluster(cluster), "bf16", certify=True, **constraints)
    assert plan.certificate is not None and plan.prediction is not None
    assert 0 < plan.certificate.bound_s <= plan.prediction.step_s


def test_a_bound_on_parts_is_none_on_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prices, "vanishing", lambda graph: frozenset())
    plan = _planned(parse_cluster("1xH100"), "bf16", certify=True)
    assert plan.certificate is not None and plan.certificate.bound_s == 0.0
    assert any("above the simulated step" in note for note in plan.notes)
