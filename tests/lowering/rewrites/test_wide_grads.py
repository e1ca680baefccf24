"""Gradients of halves that leave a block in float32: by the products that make them, or cast together."""

from __future__ import annotations

from collections import Counter
from functools import cache

import msgspec
import pytest
import torch
from torch import Tensor, nn

from examples.models.dlrm import Tables
from paraplan.capture import capture
from paraplan.codegen.block_graph import emit_block
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.predict import simulate_plan
from paraplan.ir.execution.rank_program import CAST_MANY, SUMMED, Block, LocalValue, RankProgram
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.jobs.checking.dry_run import dry_run
from paraplan.jobs.measuring.local_ops import whole_plan
from paraplan.lowering import implement
from paraplan.lowering.rank_classes import lower_anew
from paraplan.lowering.rewrites import wide_grads
from paraplan.lowering.rewrites.wide_grads import widen_grads
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search
from paraplan.runtime.executing.instructions import cast_many

CAST = "aten._to_copy.default"


class Layer(nn.Module):
    """Gradients of two products, and of four vectors of 8 and 24."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """And of a weight that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.twice = nn.Sequential(Layer(), Layer()), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return (self.twice(x) + self.twice(torch.tanh(x))).square().mean()


@cache
def captured(precision: str) -> Program:
    return capture(Model(), {"x": torch.randn(8, 8)}, precision=precision)


def planned(cluster: str, precision: str) -> Plan:
    of = ClusterSpec.local(1) if cluster == "local:1" else parse_cluster(cluster)
    return whole_plan(captured(precision), of, OPTIMIZERS["adamw"])


class Looked(nn.Module):
    """A stack of tables and a table, of which few rows are read, and a table read whole."""

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.table, self.small = Tables(2, 32, 8), nn.Embedding(64, 8), nn.Embedding(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.tables(ids).sum(1) * self.table(ids[:, 0]) * self.small(ids[:, 1] % 8)).square().mean()


def _looked() -> tuple[RankProgram, RankProgram]:
    """Programs of one H100: as lowered, and with every cast."""
    ids = torch.randint(0, 32, (8, 2), generator=torch.Generator().manual_seed(3))
    program = capture(Looked(), {"ids": ids}, precision="bf16")
    plan = whole_plan(program, parse_cluster("1xH100"), OPTIMIZERS["adamw"])
    return lower_anew(plan)[0], _apart(plan)


def _counted(rank: RankProgram) -> Counter[str]:
    """Ops of a step's backward."""
    blocks = [rank.blocks[step.block] for step in rank.steps if (step.block or "").endswith(".B")]
    return Counter(instr.target for block in blocks for instr in block.instrs)


def _apart(plan: Plan) -> RankProgram:
    """As lowered, with every cast."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(implement, "widen_grads", lambda block, products, together: block)
        return lower_anew(plan)[0]


def test_rows_are_cast_in_place_of_larger_tables() -> None:
    """Its gradient is then float32 as it is made; nothing else of the block is another."""
    rank, apart = _looked()
    made = [(b, i) for b in rank.blocks.values() for i in b.instrs if i.target in wide_grads._TABLES]
    dtypes = {b.values[str(i.outs[0])].shape: b.values[str(i.outs[0])].dtype for b, i in made}
    assert dtypes == {(2, 32, 8): "float32", (64, 8): "float32", (8, 8): "bfloat16"}
    assert all(b.values[str(i.args[0])[1:]].dtype == b.values[str(i.outs[0])].dtype for b, i in made)
    for name, block in rank.blocks.items():
        other = apart.blocks[name]
        assert (block.inputs, block.outputs, block.saved) == (other.inputs, other.outputs, other.saved)
        assert all(block.values[out] == other.values[out] for out in block.outputs if out is not None)
    assert dry_run(rank, "cuda")


def test_sums_of_rows_cast_are_rounded_once_less() -> None:
    rank, apart = _looked()
    mine, other = (next(b for n, b in r.blocks.items() if n.endswith(".B")) for r in (rank, apart))
    generator = torch.Generator().manual_seed(0)

    def drawn(value: LocalValue) -> Tensor:
        if value.dtype == "int64":
            return torch.randint(0, 8, value.shape, generator=generator)
        return torch.randn(value.shape, generator=generator).to(getattr(torch, value.dtype))

    inputs = [drawn(mine.values[name]) for name in mine.inputs]
    for made, apart_made in zip(emit_block(mine)(*inputs), emit_block(other)(*inputs), strict=True):
        if made is not None:
            assert made.dtype == apart_made.dtype
            torch.testing.assert_close(made, apart_made, rtol=2**-8, atol=0)
            assert torch.equal(made != 0, apart_made != 0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_no_gradient_is_cast_alone(precision: str) -> None:
    """Weights are products' own results, vectors of a layer are cast by one launch; a weight that is read twice is one
    tensor alone."""
    plan = planned("1xH100", precision)
    (rank,), apart = lower_anew(plan), _apart(plan)
    made, before = _counted(rank), _counted(apart)
    assert before[CAST] == 13 and not before[CAST_MANY]
    for name, block in rank.blocks.items():
        targets = Counter(instr.target for instr in block.instrs)
        assert not name.endswith(".B") or targets[CAST] + targets[CAST_MANY] <= 1, name
    assert made[CAST] + made[CAST_MANY] == 4
    kernels = [i.kernel for block in rank.blocks.values() for i in block.instrs if i.target == SUMMED]
    assert kernels.count("wide") >= 2 and kernels.count("") == 2
    for name, block in rank.blocks.items():
        other = apart.blocks[name]
        assert (block.inputs, block.outputs, block.saved) == (other.inputs, other.outputs, other.saved)
        assert all(block.values[out] == other.values[out] for out in block.outputs if out is not None)
    launches = [len(run.launches) for runs in dry_run(rank, "cuda").values() for run in runs if run.target == CAST_MANY]
    assert launches and set(launches) == {1}


def test_less_time_and_hardly_more_memory() -> None:
    """In a model as small as this, where a vector's half counts."""
    plan = planned("1xH100", "bf16")
    now, before = simulate_plan(plan, lower_anew(plan)), simulate_plan(plan, (_apart(plan),))
    assert now.step_s < before.step_s and max(now.peak_bytes) <= 1.01 * max(before.peak_bytes)


@pytest.mark.parametrize(("ranks", "reduce_dtype"), [(1, ""), (2, "fp32"), (2, "bf16")])
def test_no_plan_is_faster_than_what_is_proved(ranks: int, reduce_dtype: str) -> None:
    """What casts for sums over ranks cost is not known before products and others of a block are."""
    program = capture(Model(), {"x": torch.randn(8, 8)}, precision="bf16")
    job = Job(
        program,
        parse_cluster(f"{ranks}xH100"),
        OPTIMIZERS["adamw"],
        ModelRef(display="m"),
        {},
        reduce_dtype=reduce_dtype,
    )
    plan = search(job, Constraints(dp=ranks, zero=2 if ranks > 1 else 0)).plan
    assert plan.certificate is not None and plan.prediction is not None
    assert 0 < plan.certificate.bound_s <= plan.prediction.step_s


@pytest.mark.parametrize(("cluster", "precision"), [("1xH100", "fp32"), ("local:1", "bf16")])
def test_what_is_no_half_on_cuda_is_left(cluster: str, precision: str) -> None:
    plan = planned(cluster, precision)
    assert _counted(lower_anew(plan)[0]) == _counted(_apart(plan))


def test_a_compiler_fuses_casts_itself() -> None:
    plan = msgspec.structs.replace(planned("1xH100", "bf16"), compiled=True)
    made = _counted(lower_anew(plan)[0])
    assert not made[CAST_MANY] and _counted(_apart(plan))[CAST] - made[CAST] == 4


def _backward() -> Block:
    rank = _apart(planned("1xH100", "bf16"))
    return next(b for n, b in rank.blocks.items() if n.endswith(".B") and len(b.outputs) == 7)


def test_casts_together_have_the_bits_of_casts_apart() -> None:
    block = _backward()
    together = widen_grads(block, products=False, together=True)
    assert sum(i.target == CAST_MANY for i in together.instrs) == 1
    generator = torch.Generator().manual_seed(0)
    values = [block.values[name] for name in block.inputs]
    inputs = [torch.randn(value.shape, generator=generator).to(getattr(torch, value.dtype)) for value in values]
    for mine, other in zip(emit_block(together)(*inputs), emit_block(block)(*inputs), strict=True):
        assert mine is other is None or (mine.dtype == other.dtype and torch.equal(mine, other))


def test_large_tensors_and_what_is_read_besides_are_cast_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    block = _backward()
    casts = sum(i.target == CAST for i in block.instrs)
    monkeypatch.setattr(wide_grads, "MOST_BYTES", 16)
    targets = Counter(i.target for i in widen_grads(block, products=False, together=True).instrs)
    sizes = [block.values[str(i.args[0])[1:]].nbytes for i in block.instrs if i.target == CAST]
    small = sum(size <= 16 for size in sizes)
    assert 1 < small < casts and targets[CAST] == casts - small and targets[CAST_MANY] == 1
    product = next(i for i in block.instrs if i.target == SUMMED)
    kept = msgspec.structs.replace(block, saved=(*block.saved, str(product.outs[0])))
    kept = msgspec.structs.replace(
        kept,
        instrs=tuple(
            msgspec.structs.replace(i, frees=tuple(n for n in i.frees if n not in product.outs)) for i in kept.instrs
        ),
    )
    wide = [i for i in widen_grads(kept, products=True, together=False).instrs if i.target == CAST]
    assert any(i.args[0] == "%" + str(product.outs[0]) for i in wide)


def test_a_schedules_order_of_frees_is_left() -> None:
    block = _backward()
    late = tuple(msgspec.structs.replace(i, frees=()) if i.target == SUMMED else i for i in block.instrs)
    late = (*late[:-1], msgspec.structs.replace(late[-1], frees=("g0",)))
    other = msgspec.structs.replace(block, instrs=late)
    assert widen_grads(other, products=True, together=True) is other


def test_many_are_cast_as_they_lie() -> None:
    given = [
        torch.randn(3, 4).bfloat16().t(),
        torch.randn(5).bfloat16(),
        torch.randn(2, 3, 4).bfloat16().transpose(0, 2),
    ]
    made = cast_many(given, torch.float32)
    assert all(torch.equal(a, b.float()) and a.stride() == b.stride() for a, b in zip(made, given, strict=True))
