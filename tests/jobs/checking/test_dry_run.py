"""Plans for CUDA run on tensors without data: the kernels that run are the kernels that are chosen and priced."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import msgspec
import pytest
import torch
from torch import Tensor, nn

from benchmarks.attentions import ATTENTIONS, Stack
from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.errors import CodegenError
from paraplan.ir.execution.rank_program import Block, Instr, InstrKind, RankProgram
from paraplan.ir.model.program import Program
from paraplan.ir.model.strides import is_contiguous
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.jobs.checking.dry_run import InstrRun, dry_run
from paraplan.jobs.measuring.local_ops import whole_plan
from paraplan.lowering import lower
from paraplan.lowering.evaluation import lower_evaluation
from paraplan.lowering.implement import call_of
from paraplan.planner.assemble import Job
from paraplan.planner.sampling import random_plan
from paraplan.rules.device_kernels.kernel_counts import launch_count
from paraplan.rules.layers.float8 import filled
from tests.captures import program_of

pytest.importorskip("triton")
ADAMW = OPTIMIZERS["adamw"]
UNCOUNTED = {"paraplan.stack", "paraplan.unstack"}
"""Padded layouts launch by their padding."""


def _program(name: str, precision: str = "bf16") -> Program:
    return program_of(name, 0.1, precision)


def _programs(program: Program, seeds: tuple[int, ...] = (1,)) -> Iterator[RankProgram]:
    """One device's, and those of random plans of four."""
    yield lower(whole_plan(program, parse_cluster("1xH100"), ADAMW))[0]
    for seed in seeds:
        yield from lower(random_plan(Job(program, parse_cluster("4xH100"), ADAMW, ModelRef(display="x"), {}), seed))


def _ran(rank: RankProgram) -> Iterator[tuple[Block, Instr, InstrRun]]:
    for name, runs in dry_run(rank, "cuda").items():
        block = rank.blocks[name]
        for run in runs:
            if block.instrs[run.index].kind is InstrKind.OP:
                yield block, block.instrs[run.index], run


@pytest.mark.parametrize(
    "name",
    ["gpt2", "llama", "unet", "dlrm", "gpt2_lora", "resnet", "mixtral", "gshard"],
)
def test_what_is_launched_is_what_is_priced(name: str) -> None:
    """The plan of GPT-2 splits tensors over two axes."""
    _assert_launched(_program(name), (0 if name == "gpt2" else 1,))


# In "linear" a broadcast gradient is added to a transposed one, and fake tensors lay their sum out as no kernel does.
@pytest.mark.parametrize(("seed", "name"), list(enumerate(name for name in ATTENTIONS if name != "linear")))
def test_hand_written_attentions_launch_what_is_priced(seed: int, name: str) -> None:
    ids = torch.zeros((4, 16), dtype=torch.int64)
    program = capture(Stack(name, layers=1), {"ids": ids, "labels": ids}, precision="bf16")
    assert any(op.target == "paraplan.batched_product" for kind in program.kinds for op in kind.graph.ops)
    _assert_launched(program, (seed % 2,))


def _assert_launched(program: Program, seeds: tuple[int, ...]) -> None:
    for rank in _programs(program, seeds):
        for block, instr, run in _ran(rank):
            where = (block.name, run.index, instr.target, instr.kernel)
            if instr.target not in UNCOUNTED:
                counted, ran = launch_count("cuda", instr.target, instr.kernel, call_of(block, instr)), run.launches
                assert counted == len(ran) or _is_in_the_future(instr, run), where
                assert run.workspace_bytes <= instr.workspace_bytes, where


def _is_in_the_future(instr: Instr, run: InstrRun) -> bool:
    """Whether the first rank has nothing to do for its block of a causal ring."""
    ours = instr.kernel in ("cudnn", "flash", "efficient")
    return ours and all(".new_zeros." in launch.op for launch in run.launches)


@pytest.mark.parametrize(("name", "precision"), [("mixtral", "bf16"), ("mixtral", "fp16"), ("qwen3_moe", "fp32")])
def test_experts_run_as_grouped_products(name: str, precision: str) -> None:
    (rank,) = lower(whole_plan(_program(name, precision), parse_cluster("1xH100"), ADAMW))
    ran = [(instr, run) for _, instr, run in _ran(rank) if "experts" in instr.target]
    assert {instr.kernel for instr, _ in ran} == {"grouped"}
    torchs = [sum("_grouped_mm" in launch.op for launch in run.launches) for _, run in ran]
    assert set(torchs) == ({2, 5} if precision == "bf16" else {0})
    assert {len(run.launches) for _, run in ran} == {7, 11}
    assert all(0.98 * instr.workspace_bytes <= run.workspace_bytes for instr, run in ran)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_is_launched_in_float8(name: str) -> None:
    """A tensor is cast in three launches, also to its transpose; a product is one, and a copy of a weight that lies the
    other way."""
    most = {"scale": 2, "cast": 1, "cast_both": 1, "linear": 2, "linear_grad_input": 2, "linear_grad_weight": 1}
    seen = set()
    program = _program(name, "fp8")
    held = msgspec.structs.replace(whole_plan(program, parse_cluster("1xH100"), ADAMW), hold_casts=True)
    for rank in (*_programs(program), lower(held)[0]):
        for block, instr, run in _ran(rank):
            where = (block.name, run.index, instr.target, instr.kernel)
            if instr.target not in UNCOUNTED:
                call = call_of(block, instr)
                assert launch_count("cuda", instr.target, instr.kernel, call) == len(run.launches), where
                assert run.workspace_bytes <= instr.workspace_bytes, where
            what = instr.target.removeprefix("paraplan.float8_")
            if what in most:
                seen.add(what)
                inputs = [x for x in call_of(block, instr).inputs if x is not None]
                copied = sum(not is_contiguous(x.shape, x.strides) for x in inputs)
                copied += 2 * len(filled(inputs)) if what == "linear_grad_weight" else 0
                assert len(run.launches) <= most[what] + copied, where
    assert seen == set(most)
    products = [run for _, instr, run in _ran(lower(held)[0]) if instr.target.startswith("paraplan.float8_linear")]
    aligned = [run for run in products if "grad_weight" not in run.target]
    assert aligned and all(len(run.launches) == 1 for run in aligned), "held casts lie as every product wants them"


@pytest.mark.parametrize("name", ["gpt2", "unet"])
def test_evaluations_run_the_chosen_kernels(name: str) -> None:
    cluster = parse_cluster("1xH100")
    plan = whole_plan(_program(name), cluster, ADAMW)
    (rank,) = lower_evaluation(plan)
    trained = [instr for block in lower(plan)[0].blocks.values() for instr in block.instrs]
    plain = {
        instr.target for instr in trained if not instr.kernel
    }  # a convolution of one pixel has no kernel of its own
    chosen = {instr.target for instr in trained} - plain
    ran = [instr for _, instr, _ in _ran(rank)]
    assert any(instr.kernel for instr in ran) and chosen
    assert all(instr.kernel for instr in ran if instr.target in chosen and "dropout" not in instr.target)


@cache
def _attending(precision: str, dropout: float) -> Program:
    return capture(Attending(dropout), {"x": torch.zeros(1, 512, 32)}, precision=precision)


def _attention(precision: str, dropout: float) -> dict[str, str]:
    (rank,) = lower(whole_plan(_attending(precision, dropout), parse_cluster("1xH100"), ADAMW))
    return {i.target: i.kernel for block in rank.blocks.values() for i in block.instrs if "attention" in i.target}


def test_which_attention_runs() -> None:
    """Without dropout cuDNN's in half precision, torch's in float32; tiles of ours else; a composition in float64."""

    def both(kernel: str) -> dict[str, str]:
        return {"paraplan.attention": kernel, "paraplan.attention_grad": kernel}

    assert _attention("bf16", 0.0) == both("cudnn")
    assert _attention("bf16", 0.1) == both("triton")
    assert _attention("fp32", 0.0) == both("efficient")
    assert _attention("fp32", 0.1) == both("triton")
    assert _attention("fp64", 0.1) == both("")


def test_a_plan_for_cpus_has_reference_kernels_alone() -> None:
    (rank,) = lower(whole_plan(_program("gpt2"), parse_cluster("local:1"), ADAMW))
    assert not any(instr.kernel for block in rank.blocks.values() for instr in block.instrs)


class Made(nn.Module):
    """What it makes of numbers alone has no rule of ours, and was made on a CPU where it was captured."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = torch.tril_indices(8, 8)
        factors = torch.fft.fftfreq(8) * torch.hann_window(8) * torch.logspace(0, 1, 8) + torch.eye(8)
        y = self.linear(x) @ factors
        return y[:, rows].mean() + y[:, columns].square().mean()


def test_what_is_made_of_numbers_is_made_on_the_device() -> None:
    program = capture(Made(), {"x": torch.zeros(4, 8)})
    (rank,) = lower(whole_plan(program, parse_cluster("1xH100"), ADAMW))
    made = {instr.target.split(".")[1] for _, instr, _ in _ran(rank)}
    assert {"tril_indices", "fft_fftfreq", "hann_window", "logspace", "eye"} <= made


class Head(nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(16, columns, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(nn.functional.dropout(self.linear(x), 0.1), y)


@pytest.mark.parametrize("columns", [100, 50_000])
def test_launches_do_not_grow_with_the_vocabulary(columns: int) -> None:
    batch = {"x": torch.zeros(64, 16), "y": torch.zeros(64, dtype=torch.long)}
    (rank,) = lower(whole_plan(capture(Head(columns), batch, precision="bf16"), parse_cluster("1xH100"), ADAMW))
    runs = [(instr.target, run.launches) for _, instr, run in _ran(rank)]
    entropy = [launch for target, launches in runs if ".ce_" in target for launch in launches]
    dropped = [launches for target, launches in runs if target == "paraplan.dropout"]
    assert len(entropy) == 5
    assert [len(launches) for launches in dropped] == [1, 1]
    assert all(launch.nbytes <= 4.1 * 64 * columns for launches in dropped for launch in launches)


class Attending(nn.Module):
    """Two heads of 16 over 512 positions."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.project, self.p = nn.Linear(32, 96), p

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 16)).transpose(1, 2) for each in self.project(x).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=True).square().mean()


@pytest.mark.parametrize(("p", "precision"), [(0.0, "bf16"), (0.1, "bf16"), (0.1, "fp32")])
def test_scores_are_never_allocated(p: float, precision: str) -> None:
    """Attention makes nothing inside that is as large as the scores of one head; the reference does."""
    program = _attending(precision, p)
    (rank,) = lower(whole_plan(program, parse_cluster("1xH100"), ADAMW))
    (plain,) = lower(whole_plan(program, parse_cluster("local:1"), ADAMW))
    inside = [max(run.workspace_bytes, i.workspace_bytes) for _, i, run in _ran(rank) if "attention" in i.target]
    reference = [i.workspace_bytes for block in plain.blocks.values() for i in block.instrs if "attention" in i.target]
    assert len(inside) == 2 and max(inside) < 512 * 512 * 2
    assert p == 0.0 or min(reference) > 512 * 512 * 2


def _edited(rank: RankProgram, target: str, **changes: object) -> RankProgram:
    """The program with a result of an op foretold otherwise."""
    for name, block in rank.blocks.items():
        for instr in block.instrs:
            if instr.target == target and instr.outs[0] is not None:
                value = msgspec.structs.replace(block.values[instr.outs[0]], **changes)
                block = msgspec.structs.replace(block, values={**block.values, instr.outs[0]: value})
                return msgspec.structs.replace(rank, blocks={**rank.blocks, name: block})
    raise AssertionError(target)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float16"}, "the program says float16"),
        ({"shape": (3,), "strides": (1,)}, r"the program says .*\[3\]"),
    ],
)
def test_a_wrong_foretelling_is_found(changes: dict[str, object], said: str) -> None:
    (rank,) = lower(whole_plan(_program("gpt2"), parse_cluster("1xH100"), ADAMW))
    with pytest.raises(CodegenError, match=rf"paraplan.dropout: result .*{said}"):
        dry_run(_edited(rank, "paraplan.dropout", **changes), "cuda")


def test_tensors_on_two_devices_are_found() -> None:
    (rank,) = lower(whole_plan(_program("gpt2"), parse_cluster("1xH100"), ADAMW))
    name, block = next((name, block) for name, block in rank.blocks.items() if name.startswith("k1"))
    weight = next(str(instr.args[1])[1:] for instr in block.instrs if instr.target == "paraplan.linear")
    values = {**block.values, weight: msgspec.structs.replace(block.values[weight], tier="host")}
    away = msgspec.structs.replace(rank, blocks={name: msgspec.structs.replace(block, values=values)})
    with pytest.raises(CodegenError, match="device"):
        dry_run(away, "cuda")
