"""Named recomputation against what the systems it is named after do, op by op; and layers joined, bit for bit."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from benchmarks.attentions import Stack
from benchmarks.zoo import build
from paraplan.capture import capture
from paraplan.capture.reference import StepResult, run_step
from paraplan.codegen import build_modules
from paraplan.ir.errors import ConstraintError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.graph import Phase, target_parts
from paraplan.ir.model.layers import layers_of
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.lowering import lower
from paraplan.lowering.blocks.remat import recomputable, remat_of
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.lowering.verification.verify_program import verify_program
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.recompute.presets import layered, preset_fates
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer
from tests.captures import program_of
from tests.numerics import relative_error

torch.set_num_threads(1)


class _Case:
    """A small model, its capture, and one step of that on one device."""

    def __init__(self, name: str, dropout: float = 0.1) -> None:
        self.small = build(name, dropout)
        self.program = program_of(name, dropout)
        self.wanted = self.step(self.program)

    def step(self, program: Program) -> StepResult:
        tensors = dict(self.small.model.named_parameters(remove_duplicate=False))
        buffers = dict(self.small.model.named_buffers(remove_duplicate=False))
        held = {name: x.double() if x.is_floating_point() else x for name, x in buffers.items()}
        return run_step(program, {name: tensors[name].detach() for name in program.params}, held, self.small.batch, 0)

    def plan(self, ranks: int, **pins: object) -> Plan:
        job = Job(self.program, ClusterSpec.local(ranks), OPTIMIZERS["sgd"], ModelRef(display=""), {})
        return search(job, Constraints(**pins), time_limit_s=4.0, certify=False).plan  # type: ignore[arg-type]

    def check(self, plan: Plan) -> None:
        """A step of all ranks is the one device's."""
        programs = verify_plan(plan)
        trainer = InProcessTrainer(plan, programs, [build_modules(p) for p in programs], self.small.model)
        assert float(abs(trainer.step(self.small.batch) - self.wanted.loss) / abs(self.wanted.loss)) <= 1e-9
        assert relative_error(trainer.grads(), self.wanted.grads) <= 1e-9


@pytest.fixture(scope="module")
def gpt2() -> _Case:
    return _Case("gpt2")


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("gpt2", (range(1, 3), range(3, 5))),
        ("t5", (range(1, 2), range(4, 7), range(7, 10))),  # an encoder block whose end is one with the last norm
        ("mixtral", (range(1, 4), range(4, 6))),  # the router's logits are read by a loss at the end
        ("albert", (range(2, 4), range(4, 6))),  # one layer's parameters, read twice
        ("mamba", (range(1, 2), range(2, 3))),  # with its loop over time, a layer is a segment
        ("lstm", ()),
    ],
)
def test_layers_joined_are_the_program(name: str, layers: tuple[range, ...]) -> None:
    case = _Case(name)
    assert layers_of(case.program) == layers
    joined, _ = layered(case.program)
    verify_program(joined)
    assert len(joined.segments) == len(case.program.segments) - sum(len(run) - 1 for run in layers)
    assert layered(joined) == (joined, None)
    found = case.step(joined)
    assert torch.equal(found.loss, case.wanted.loss) and found.grads.keys() == case.wanted.grads.keys()
    for key, grad in case.wanted.grads.items():
        assert found.grads[key] is grad is None or torch.equal(found.grads[key], grad), key  # type: ignore[arg-type]


def _executed_again(program: Program, name: str) -> Counter[str]:
    """Products, attention and norms of a GPT-2 layer that its backward executes again."""
    (kind,) = {program.segments[run.start].kind for run in layers_of(program)}
    remat = remat_of(program.kinds[kind], preset_fates(program, name)[kind])
    ops = [program.kinds[kind].graph.ops[index].target.split(".")[1] for index in (*remat.again, *remat.rerun)]
    return Counter(op for op in ops if op in ("linear", "attention", "layer_norm", "gelu", "dropout", "add"))


def test_what_systems_make_again(gpt2: _Case) -> None:
    """Two norms, four linear layers, attention, the activation, three dropouts (one in attention), two residuals."""
    program, _ = layered(gpt2.program)
    (kind,) = {program.segments[run.start].kind for run in layers_of(program)}
    forward = [op for op in program.kinds[kind].graph.ops if op.phase is Phase.FORWARD]
    every = remat_of(program.kinds[kind], preset_fates(program, "full")[kind])
    assert len(every.again) + len(every.rerun) == len(forward) and every.saved == ()
    assert _executed_again(program, "full")["linear"] == 4
    early = _executed_again(program, "full-early-stop")
    assert early["linear"] == 3 and early["attention"] == 1, "the layer's last product is read by nothing"
    assert _executed_again(program, "selective") == {"attention": 1}
    assert _executed_again(program, "cheap")["linear"] == 0 and _executed_again(program, "cheap")["gelu"] == 1
    assert _executed_again(program, "alternate")["linear"] == 1, "of four the second; the last is read by nothing"
    assert preset_fates(program, "full")[program.segments[0].kind] == {}, "embeddings are in no layer"


def test_selective_makes_the_core_of_unfused_attention_again() -> None:
    case = _Case("gpt2", 0.0)
    case.small.model.set_attn_implementation("eager")
    program, _ = layered(capture(case.small.model, case.small.batch, precision="fp64"))
    (kind,) = {program.segments[run.start].kind for run in layers_of(program)}
    remat = remat_of(program.kinds[kind], preset_fates(program, "selective")[kind])
    ops = program.kinds[kind].graph.ops
    again = Counter(ops[index].target.split(".")[1] for index in (*remat.again, *remat.rerun))
    assert again["linear"] == again["layer_norm"] == 0 and again["_softmax"] == 1


@pytest.mark.parametrize("bias", ["alibi", "relative positions"])
def test_selective_makes_a_bias_again_that_no_gradient_comes_from(bias: str) -> None:
    """What is made in every layer of slopes or of a table's rows, for its attention alone, is as large as scores."""
    model = Stack(bias, hidden=16, heads=2, sequence=12).double()
    batch = {key: torch.randint(64, (2, 12)) for key in ("ids", "labels")}
    program, _ = layered(capture(model, batch, precision="fp64"))
    (kind,) = {program.segments[run.start].kind for run in layers_of(program)}
    remat = remat_of(program.kinds[kind], preset_fates(program, "selective")[kind])
    shapes = {name: spec.shape for name, spec in program.kinds[kind].graph.values.items()}
    assert remat.again and not [name for name in remat.saved if shapes[name][-2:] == (12, 12)], remat.saved


@pytest.mark.parametrize(
    ("pins", "recompute"),
    [
        ({"tp": 2}, "full"),
        ({"tp": 2}, "selective"),
        ({"dp": 2, "zero": 3, "microbatches": 2}, "full-early-stop"),
        ({"dp": 2, "zero": 3, "microbatches": 2}, "alternate"),
        ({"pp": 2, "microbatches": 2, "schedule": "zb-h1"}, "full"),
        ({"pp": 2, "microbatches": 2, "schedule": "zb-h1"}, "alternate"),
    ],
    ids=str,
)
def test_ranks_give_the_single_device_s_numbers(gpt2: _Case, recompute: str, pins: dict[str, object]) -> None:
    gpt2.check(gpt2.plan(2, recompute=recompute, **pins))


def test_full_repeats_the_last_sum_over_ranks(gpt2: _Case) -> None:
    """Megatron's forward runs again with both of its all-reduces; stopping early saves the second."""
    sums = {}
    for name in ("full-early-stop", "full"):
        plan = gpt2.plan(2, tp=2, recompute=name, microbatches=1)
        blocks = [block for block in lower(plan)[0].blocks.values() if block.name.endswith(".B")]
        sums[name] = sum(instr.target == "all_reduce" for block in blocks for instr in block.instrs)
    assert sums["full"] == sums["full-early-stop"] + 1, "of one kind of layer"


def test_stages_are_pinned_in_the_capture_s_segments(gpt2: _Case) -> None:
    """Also where one ends within a layer, which then is two for recomputation."""
    plan = gpt2.plan(2, recompute="full", pp=2, stages=((0, 2), (2, 6)), microbatches=2)
    assert [(stage.first, stage.stop) for stage in plan.stages] == [(0, 2), (2, 5)]
    gpt2.check(plan)
    with pytest.raises(ConstraintError, match=r"stage 1 is 2:9.* has 6"):
        gpt2.plan(2, recompute="full", pp=2, stages=((0, 2), (2, 9)), microbatches=2)


class _Convolved(torch.nn.Module):
    """Convolutions, and an op whose name has a product's in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(2, 4, 3), torch.nn.Conv2d(4, 1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.second(torch.nn.functional.gelu(self.first(x)))
        return torch.sin(torch.cummax(made, -1).values).square().mean()


def test_cheap_keeps_what_convolutions_make_and_not_what_is_called_like_a_product() -> None:
    program = capture(_Convolved(), {"x": torch.randn(4, 2, 8, 8)})
    fates = preset_fates(program, "cheap")
    again: set[str] = set()
    kept: set[str] = set()
    for kind, fate in zip(program.kinds, fates, strict=True):
        for op in kind.graph.ops:
            if op.phase is Phase.FORWARD and op.outs[0] in recomputable(kind):
                (again if op.outs[0] in fate else kept).add(target_parts(op.target).name)
    assert {"cummax", "sin"} <= again and "conv" in kept - again
