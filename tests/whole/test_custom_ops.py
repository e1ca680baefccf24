"""Ops nobody wrote a rule for, through everything: registered, discovered, and replicated for want of a rule."""

from __future__ import annotations

import io
from collections.abc import Iterator

import msgspec
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import paraplan as pp
from paraplan import api
from paraplan.capture import capture, run_program
from paraplan.codegen import build_modules
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.errors import CodegenError, InvalidPlanError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.op_rule import DISCOVERED, REGISTERED, UNKNOWN, OpRule
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.ir.struct import from_json, to_json
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.sampling import random_plan
from paraplan.rules.registered_rules import forget
from paraplan.runtime.executing import targets
from paraplan.runtime.in_process import InProcessTrainer
from paraplan.terminal.show import show_plan
from tests.numerics import relative_error

torch.set_num_threads(1)
SPACE = "paraplan_custom_test"
MLP, GRAD = f"{SPACE}::fused_mlp", f"{SPACE}::fused_mlp_backward"


@torch.library.custom_op(MLP, mutates_args=())
def fused_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.gelu(x @ up) @ down


@fused_mlp.register_fake
def _(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], down.shape[1]))


@torch.library.custom_op(GRAD, mutates_args=())
def fused_mlp_backward(g: Tensor, x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    before = x @ up
    middle = torch.ops.aten.gelu_backward(g @ down.t(), before)
    flat = middle.flatten(0, -2)
    return middle @ up.t(), x.flatten(0, -2).t() @ flat, F.gelu(before).flatten(0, -2).t() @ g.flatten(0, -2)


@fused_mlp_backward.register_fake
def _(g: Tensor, x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(up), torch.empty_like(down)


fused_mlp.register_autograd(
    lambda ctx, g: torch.ops.paraplan_custom_test.fused_mlp_backward(g, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op(f"{SPACE}::mix", mutates_args=())
def mix(x: Tensor) -> Tensor:
    """Every result depends on every element, its place included."""
    flat = x.flatten()
    return (flat.sort().values * torch.linspace(1, 2, flat.numel(), dtype=x.dtype).tanh()).cumsum(0).view(x.shape).t()


@mix.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x).t()


class Block(nn.Module):
    """A fused op between linears, an op of torch without a rule (lgamma), and one that no rule fits."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 4)
        self.up, self.down = nn.Parameter(torch.randn(8, 16) * 0.3), nn.Parameter(torch.randn(16, 8) * 0.3)
        self.scale = nn.Parameter(torch.randn(2, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.enter(x)
        h = h + torch.ops.paraplan_custom_test.fused_mlp(torch.lgamma(h.abs() + 1), self.up, self.down)
        if self.training:
            h = h * (1 + 0.01 * torch.ops.paraplan_custom_test.mix(self.scale.detach()).sum(1))
        return F.mse_loss(self.leave(h), y)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    yield
    for op in (MLP, GRAD):
        forget(op.replace("::", ".") + ".default")


def register() -> None:
    pp.register_rule(MLP, "b s h, h f, f n -> b s n", contracted={"f": "sum"}, linear=(2,), whole="h")
    pp.register_rule(
        GRAD, "b s n, b s _, _ f, f n -> b s _, _ f, f n", contracted=dict.fromkeys("bsfn", "sum"), linear=(0,)
    )
    pp.register_cost(MLP, flops=lambda x, up, down: 2 * x[0] * x[1] * up[1] * (x[2] + down[1]))


def make(train: bool) -> tuple[nn.Module, dict[str, Tensor], Program]:
    torch.manual_seed(0)
    model = Block().train(train)
    batch = {"x": torch.randn(8, 4, 6), "y": torch.randn(8, 4, 4)}
    program = capture(model, batch, precision="fp64")
    return model.double(), {name: value.double() for name, value in batch.items()}, program


def rules(program: Program) -> dict[str, OpRule]:
    return {op.target: op.rule for kind in program.kinds for op in kind.graph.ops if op.rule is not None}


def check_plan(plan: Plan, model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Values, entries and peak of a plan, as read back from a file."""
    plan = from_json(to_json(plan), Plan, "plan", InvalidPlanError)
    programs = verify_plan(plan)
    params = {name: p.detach() for name, p in model.named_parameters()}
    loss, grads = run_program(plan.program, params, {}, batch, 0)
    trainer = InProcessTrainer(plan, programs, [build_modules(p) for p in programs], model)
    assert float(abs(trainer.step(batch) - loss) / abs(loss)) <= 1e-9
    assert relative_error(trainer.grads(), grads) <= 1e-9
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3)
    trainer.step(batch)
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3)
    predicted = [entry.key for entry in entries(programs[0])]
    peak = max(simulate_plan(plan, programs).peak_bytes)
    for rank in range(plan.cluster.num_devices):
        assert [entry.key for entry in trainer.entries(rank)] == predicted
        assert 1.0 <= peak / trainer.peak_bytes(rank) <= 1.02


@pytest.mark.parametrize("how", [REGISTERED, DISCOVERED])
def test_a_custom_op_trains_exactly_under_random_plans(how: str) -> None:
    if how == REGISTERED:
        register()
    model, batch, program = make(train=False)
    found = rules(program)
    custom = [found[f"{SPACE}.{name}.default"] for name in ("fused_mlp", "fused_mlp_backward")]
    assert [rule.source for rule in custom] == [how, how]
    assert custom[0].contracted and len(custom[0].sizes) == len(custom[1].sizes) == 4
    assert custom[0].workspace and bool(custom[0].flops) == (how == REGISTERED)
    assert found["aten.lgamma.default"].source == DISCOVERED and len(found["aten.lgamma.default"].sizes) == 3
    forget(f"{SPACE}.fused_mlp.default")  # a plan carries what it needs
    chosen = set()
    for seed in range(4):
        job = Job(program, ClusterSpec.local((2, 4)[seed % 2]), OPTIMIZERS["adamw"], ModelRef(display="block"), {})
        plan = random_plan(job, seed, max_microbatches=4)
        check_plan(plan, model, batch)
        for choice in plan.stages[0].choices:
            pairs = zip(choice.ops, program.kinds[choice.kind].graph.ops, strict=True)
            chosen |= {part for key, op in pairs if op.target.startswith(SPACE) for part in key.split("|")}
    assert len({part.split(">")[0] for part in chosen}) >= 4, f"too few strategies were drawn: {chosen}"
    said = "registered" if how == REGISTERED else "found by running it"
    assert any(said in note and "fused_mlp" in note for note in plan.notes)


def test_an_op_without_any_rule_is_replicated_and_said_so() -> None:
    model, batch, program = make(train=True)
    rule = rules(program)[f"{SPACE}.mix.default"]
    assert rule.source == UNKNOWN and rule.is_whole and rule.lies == ("1,0",)
    job = Job(program, ClusterSpec.local(2), OPTIMIZERS["adamw"], ModelRef(display="block"), {})
    for seed in range(2):
        plan = random_plan(job, seed, max_microbatches=2)
        check_plan(plan, model, batch)
    notes = [note for note in plan.notes if "mix" in note]
    assert len(notes) == 1 and "runs replicated" in notes[0] and "found no dim" in notes[0]
    written = io.StringIO()
    show_plan(Console(file=written, width=400), api.Plan(plan, verify_plan(plan)))
    assert notes[0] in written.getvalue()
    assert "fused_mlp_backward.default has a rule that was found by running it" in written.getvalue()


def test_a_registered_cost_is_priced_and_travels() -> None:
    register()
    _, _, program = make(train=False)
    job = Job(program, ClusterSpec.local(2), OPTIMIZERS["adamw"], ModelRef(display="block"), {})
    plan = random_plan(job, 0, max_microbatches=1)
    forget(f"{SPACE}.fused_mlp.default")
    again = from_json(to_json(plan), Plan, "plan", InvalidPlanError)
    assert simulate_plan(again, verify_plan(again)).step_s == simulate_plan(plan, verify_plan(plan)).step_s

    def heavier(program: Program, factor: float) -> Program:
        def op(each):  # type: ignore[no-untyped-def]
            if each.rule is None or not each.rule.flops:
                return each
            flops = tuple(msgspec.structs.replace(term, amount=term.amount * factor) for term in each.rule.flops)
            return msgspec.structs.replace(each, rule=msgspec.structs.replace(each.rule, flops=flops))

        kinds = tuple(
            msgspec.structs.replace(
                kind, graph=msgspec.structs.replace(kind.graph, ops=tuple(op(each) for each in kind.graph.ops))
            )
            for kind in program.kinds
        )
        return msgspec.structs.replace(program, kinds=kinds)

    dear = msgspec.structs.replace(plan, program=heavier(program, 1e6))
    assert simulate_plan(dear, verify_plan(dear)).step_s > 2 * simulate_plan(plan, verify_plan(plan)).step_s


def test_a_plan_with_a_wrong_rule_is_refused() -> None:
    _, _, program = make(train=False)
    job = Job(program, ClusterSpec.local(2), OPTIMIZERS["adamw"], ModelRef(display="block"), {})
    text = to_json(random_plan(job, 0, max_microbatches=1)).decode()
    for right, wrong, said in (
        ('"contracted":{"c":"sum"}', '"contracted":{"z":"sum"}', "dim 'z' stands in no input"),
        ('"contracted":{"c":"sum"}', '"contracted":{"c":"mean"}', "reduced by 'mean'"),
        ('"shapes":[[8,4,8],[8,16],[16,8]]', '"shapes":[[8,4,8],[8,16],[16,9]]', "made for inputs of shapes"),
        ('"source":"discovered"', '"source":"guessed"', "its source is 'guessed'"),
    ):
        assert right in text
        broken = from_json(text.replace(right, wrong, 1).encode(), Plan, "plan", InvalidPlanError)
        with pytest.raises(InvalidPlanError, match=said):
            verify_plan(broken)


def test_an_op_that_is_not_registered_is_named() -> None:
    with pytest.raises(CodegenError, match=r"nowhere.op.default.*import the module"):
        targets.resolve("nowhere.op.default")
    assert targets.resolve(f"{SPACE}.mix.default") is torch.ops.paraplan_custom_test.mix.default
    assert not targets.is_factory(f"{SPACE}.mix.default")
