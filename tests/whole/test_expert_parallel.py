"""Expert parallelism as a layout: mixtures of fixed capacity and dropless ones, pinned, routed and as planned.

Values in float64 against the single device (the balancing loss is part of the loss), every rank's record against the
prediction, and the measured peak of live bytes against the predicted one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn

import paraplan as pp
from benchmarks.zoo import Small, build
from examples.models.switch import Mixture, Switch
from paraplan.capture import capture
from paraplan.capture.reference import StepResult, run_step
from paraplan.codegen import build_modules
from paraplan.cost_models.machine.catalog import catalog_cluster
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.errors import ConstraintError
from paraplan.ir.execution.rank_program import Instr, InstrKind, RankProgram
from paraplan.ir.machine.cluster import ClusterSpec, Link
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.jobs.files import write_plan
from paraplan.kernels.route_kernels import route_plan
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner import search as searching
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.contradictions import check_constraints
from paraplan.planner.pipeline.meshes import candidate_meshes
from paraplan.planner.sampling import random_plan
from paraplan.planner.search import search
from paraplan.planner.sharding import pins
from paraplan.rules.expansions.route import expected_rows
from paraplan.runtime.in_process import InProcessTrainer
from paraplan.runtime.transport.launch import spawn_local
from tests.captures import program_of
from tests.numerics import relative_error
from tests.told import assert_told

torch.set_num_threads(1)
PRODUCTS = ("aten.bmm.default", "paraplan.experts", "paraplan.experts_grad")


@cache
def captured(name: str) -> tuple[Small, Program, StepResult]:
    """A model, its program, and one step of it on one device."""
    small, program = build(name, 0.0), program_of(name, 0.0)
    tensors = dict(small.model.named_parameters(remove_duplicate=False))
    params = {key: tensors[key].detach() for key in program.params}
    buffers = {key: b.double() if b.is_floating_point() else b for key, b in small.model.named_buffers()}
    return small, program, run_step(program, params, buffers, small.batch, 0)


def two_nodes(ranks: int, bytes_per_s: float) -> ClusterSpec:
    """CPU processes, as many on each of two nodes with some bandwidth between them."""
    cluster = ClusterSpec.local(ranks // 2)
    link = Link(bytes_per_s=bytes_per_s, latency_s=1e-5)
    group = msgspec.structs.replace(cluster.groups[0], nodes=2, between_nodes=link)
    return msgspec.structs.replace(cluster, groups=(group,))


def planned(name: str, cluster: int | ClusterSpec, constraints: Constraints) -> tuple[Plan, tuple[RankProgram, ...]]:
    """A plan for a cluster, or for so many processes of this machine."""
    cluster = ClusterSpec.local(cluster) if isinstance(cluster, int) else cluster
    job = Job(captured(name)[1], cluster, OPTIMIZERS["adamw"], ModelRef(display=name), {})
    plan = search(job, constraints, 30.0, certify=False).plan
    return plan, verify_plan(plan)


def keys_of(plan: Plan, targets: tuple[str, ...]) -> set[str]:
    pairs = zip(plan.stages[0].choices, plan.program.kinds, strict=True)
    ops = [pair for choice, kind in pairs for pair in zip(choice.ops, kind.graph.ops, strict=True)]
    return {key for key, op in ops if op.target in targets}


def collectives(program: RankProgram, keep: Callable[[Instr], bool]) -> Counter[str]:
    """Collectives in one call of every block."""
    every = (instr for block in program.blocks.values() for instr in block.instrs)
    return Counter(i.target for i in every if i.kind is InstrKind.COLLECTIVE and keep(i))


def routed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves dropless experts no other way than to exchange tokens."""
    allowed = pins.ExpertAxis.allows

    def only(self: pins.ExpertAxis, kind: int, position: int, part: str, batch: str) -> bool:
        return part == "route" if self.must.get((kind, position)) == "e" else allowed(self, kind, position, part, batch)

    monkeypatch.setattr(pins.ExpertAxis, "allows", only)


def check(name: str, plan: Plan, programs: tuple[RankProgram, ...]) -> None:
    """Loss, gradients and two updates against one device; records against the prediction."""
    small, _, expected = captured(name)
    assert_told(plan, programs)
    trainer = InProcessTrainer(plan, programs, [build_modules(p) for p in programs], small.model)
    assert float(abs(trainer.step(small.batch) - expected.loss) / abs(expected.loss)) <= 1e-12
    assert relative_error(trainer.grads(), expected.grads) <= 1e-9
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3)
    trainer.step(small.batch)
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3)
    predicted = [entry.key for entry in entries(programs[0])]
    peak = max(simulate_plan(plan, programs).peak_bytes)
    for rank in range(plan.stages[0].mesh.size):
        assert [entry.key for entry in trainer.entries(rank)] == predicted
        assert 1.0 <= peak / trainer.peak_bytes(rank) <= 1.02


@pytest.mark.parametrize(
    ("name", "ranks", "given"),
    [
        ("switch", 4, {"ep": 2, "microbatches": 2}),
        ("gshard", 4, {"ep": 2, "dp": 2, "tp": 2}),
        ("mixtral", 2, {"ep": 2}),
        ("qwen3_moe", 4, {"ep": 4, "zero": 3}),
    ],
)
def test_pinned(name: str, ranks: int, given: dict[str, int]) -> None:
    plan, programs = planned(name, ranks, Constraints(**given))  # type: ignore[arg-type]
    axis = plan.stages[0].mesh.axes.index("ep")
    assert plan.stages[0].mesh.shape[axis] == given["ep"]
    stacks = [at for key, at in plan.stages[0].params.items() if "experts" in key]
    assert stacks
    assert {text.split(",")[axis] for at in stacks for text in (at.stored, at.grad, at.state)} == {"S0"}
    assert {layout.split(",")[axis] for layout in plan.stages[0].batch.values()} == {"S0"}
    check(name, plan, programs)


class Stacks(nn.Module):
    """Tokens go to experts by their place; `matmul` broadcasts the stacks over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.w_in, self.w_out = nn.Parameter(torch.randn(4, 8, 16)), nn.Parameter(torch.randn(4, 16, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).view(len(x), 4, -1, 8)
        return (x + (torch.relu(y @ self.w_in) @ self.w_out).reshape(x.shape)).square().mean()


def test_stacks_are_found_where_products_have_samples_too() -> None:
    torch.manual_seed(0)
    model, x = Stacks().double(), torch.randn(4, 8, 8, dtype=torch.float64)
    plan = pp.compile(model, "local:2", example_inputs={"x": x}, precision="fp64", ep=2)
    assert {name: at.stored for name, at in plan.data.stages[0].params.items() if "w_" in name} == {
        "w_in": "S0",
        "w_out": "S0",
    }
    trainer = InProcessTrainer(plan.data, plan.programs, [build_modules(p) for p in plan.programs], model)
    loss = model(x)
    loss.backward()
    assert trainer.step({"x": x}).item() == pytest.approx(loss.item(), rel=1e-12)
    assert relative_error(trainer.grads(), {name: w.grad for name, w in model.named_parameters()}) <= 1e-10


@pytest.mark.parametrize(("name", "ranks", "ep"), [("mixtral", 2, 2), ("qwen3_moe", 4, 4), ("qwen3_moe", 4, 2)])
def test_dropless_tokens_go_to_their_experts(name: str, ranks: int, ep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    routed(monkeypatch)
    plan, programs = planned(name, ranks, Constraints(pp=1, ep=ep))
    axis = plan.stages[0].mesh.axes.index("ep")
    assert {key.split("|")[axis] for key in keys_of(plan, PRODUCTS[1:])} == {"route"}
    assert any("even routing" in note for note in plan.notes)
    check(name, plan, programs)
    layers = len({segment.kind for segment in plan.program.segments if _has_experts(plan, segment.kind)})
    # tokens there and results back; backward tokens and gradients there, gradients of tokens and of weights back
    assert collectives(programs[0], lambda i: i.target == "route") == {"route": 6 * layers}


def over_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves a pinned degree of experts no other mesh than the one with an axis over nodes."""
    monkeypatch.setattr(searching, "candidate_meshes", lambda job, pinned: candidate_meshes(job, pinned)[-1:])


@pytest.mark.parametrize(
    ("name", "ranks", "given", "axes"),
    [
        ("mixtral", 4, {"ep": 4}, ("ep_nodes", "ep")),
        ("qwen3_moe", 4, {"ep": 4, "zero": 3}, ("ep_nodes", "ep")),
        ("qwen3_moe", 8, {"ep": 4, "tp": 2}, ("ep_nodes", "ep", "tp")),
    ],
)
def test_tokens_go_to_nodes_and_on_to_their_experts(
    name: str, ranks: int, given: dict[str, int], axes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both phases, over either axis as often as over one."""
    routed(monkeypatch)
    over_nodes(monkeypatch)
    plan, programs = planned(name, two_nodes(ranks, 1e8), Constraints(pp=1, **given))  # type: ignore[arg-type]
    assert plan.stages[0].mesh.axes == axes
    assert {tuple(key.split("|")[:2]) for key in keys_of(plan, PRODUCTS[1:])} == {("route", "route")}
    stacks = [at for key, at in plan.stages[0].params.items() if "experts" in key]
    assert {tuple(text.split(",")[:2]) for at in stacks for text in (at.stored, at.grad, at.state)} == {("S0", "S0")}
    check(name, plan, programs)
    layers = len({segment.kind for segment in plan.program.segments if _has_experts(plan, segment.kind)})
    for axis in range(2):
        found = collectives(programs[0], lambda i, axis=axis: i.target == "route" and i.axis == axis)  # type: ignore[misc]
        assert found == {"route": 6 * layers}


def test_all_tokens_may_choose_the_same_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers that prefer none: every token goes to the same two of four experts, and two ranks get nothing."""
    routed(monkeypatch)
    over_nodes(monkeypatch)
    plan, programs = planned("mixtral", two_nodes(4, 1e8), Constraints(pp=1, ep=4))
    small, program = build("mixtral", 0.0), captured("mixtral")[1]
    tensors = dict(small.model.named_parameters(remove_duplicate=False))
    routers = [name for name in program.params if name.endswith("gate.weight")]
    with torch.no_grad():
        for name in routers:
            tensors[name].zero_()
    params = {key: tensors[key].detach().clone() for key in program.params}
    buffers = {key: b.double() if b.is_floating_point() else b for key, b in small.model.named_buffers()}
    expected = run_step(program, params, buffers, small.batch, 0)
    unused = [
        name for name, grad in expected.grads.items() if "experts" in name and (grad.flatten(1) == 0).all(1).any()
    ]
    assert routers and unused
    trainer = InProcessTrainer(plan, programs, [build_modules(p) for p in programs], small.model)
    assert float(abs(trainer.step(small.batch) - expected.loss) / abs(expected.loss)) <= 1e-12
    assert relative_error(trainer.grads(), expected.grads) <= 1e-9


def test_experts_of_fixed_capacity_lie_over_nodes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    over_nodes(monkeypatch)
    plan, programs = planned("switch", two_nodes(4, 1e8), Constraints(pp=1, ep=4, zero=1))
    assert plan.stages[0].mesh.axes == ("ep_nodes", "ep")
    stacks = [at for key, at in plan.stages[0].params.items() if "experts" in key]
    assert {text for at in stacks for text in (at.stored, at.grad, at.state)} == {"S0,S0"}
    check("switch", plan, programs)


def test_the_planner_routes_in_two_levels_where_nodes_are_far_apart() -> None:
    plan, _ = planned("qwen3_moe", two_nodes(4, 1e6), Constraints(pp=1, ep=4))
    assert plan.stages[0].mesh.axes == ("ep_nodes", "ep")
    assert keys_of(plan, PRODUCTS[1:]) == {"route|route"}


def test_in_one_node_experts_have_one_axis() -> None:
    assert planned("qwen3_moe", 4, Constraints(pp=1, ep=4))[0].stages[0].mesh.axes == ("ep",)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"ep": 8}, [{"ep": 8}, {"ep_nodes": 2, "ep": 4}]),
        ({"ep": 4}, [{"dp": 2, "ep": 4}]),
        ({"ep": 2}, [{"dp": 4, "ep": 2}]),
        ({"ep": 4, "tp": 2}, [{"ep": 4, "tp": 2}, {"ep_nodes": 2, "ep": 2, "tp": 2}]),
        ({"ep": 2, "tp": 4}, [{"ep": 2, "tp": 4}]),
        ({"dp": 4, "ep": 4}, [{"ep": 4, "free": 2}, {"ep_nodes": 2, "ep": 2, "free": 2}]),
        ({"dp": 8}, [{"dp": 8}]),
    ],
)
def test_experts_have_an_axis_over_nodes_where_their_ranks_span_some(
    given: dict[str, int], wanted: list[dict[str, int]]
) -> None:
    job = Job(captured("mixtral")[1], two_nodes(8, 1e8), OPTIMIZERS["adamw"], ModelRef(display="mixtral"), {})
    found = candidate_meshes(job, Constraints(**given))  # type: ignore[arg-type]
    assert [dict(zip(mesh.axes, mesh.shape, strict=True)) for mesh in found] == wanted


def _has_experts(plan: Plan, kind: int) -> bool:
    return any(op.target == "paraplan.experts" for op in plan.program.kinds[kind].graph.ops)


def test_terms_of_the_loss_wait_for_the_denominators_they_divide_by() -> None:
    """A plan where the balancing loss is a partial sum and the labels were counted whole: one term is divided first."""
    job = Job(captured("qwen3_moe")[1], ClusterSpec.local(2), OPTIMIZERS["adamw"], ModelRef(display="qwen3_moe"), {})
    for seed in range(12):
        for program in verify_plan(random_plan(job, seed, max_microbatches=4)):
            assert list(entries(program))  # every step reads what exists


def test_capacity_needs_four_all_to_alls_a_layer_and_moves_no_weights() -> None:
    """There and back in each phase: nothing is exchanged twice, and no stack is gathered or reduced."""
    plan, programs = planned("switch", 2, Constraints(ep=2))
    assert collectives(programs[0], lambda i: i.target == "all_to_all") == {"all_to_all": 4 * 2}
    stacks = {value.shape for value in programs[0].outer.values() if value.source.endswith(("w_in", "w_out"))}
    assert stacks == {(4, 32, 48), (4, 48, 32)}
    blocks = programs[0].blocks.values()
    moved = [block.values[out].shape for block in blocks for i in block.instrs for out in i.outs if _moves(i) and out]
    params = plan.program.params
    others = sum(math.prod(params[name].spec.shape) for name in params if not name.endswith(("w_in", "w_out")))
    bundles = [math.prod(shape) for shape in moved if len(shape) == 1]
    assert max(math.prod(shape) for shape in moved if len(shape) > 1) < 8 * 32 * 48
    assert max(bundles) <= others, "what is bundled is small parameters, together no more than all but the stacks"


def _moves(instr: Instr) -> bool:
    return instr.kind is InstrKind.COLLECTIVE and instr.target in ("all_gather", "reduce_scatter", "all_to_all")


def test_the_planner_exchanges_tokens_where_experts_are_many() -> None:
    """64 experts of 25 M parameters on two nodes: gathering or reducing them costs more than sending tokens to them."""
    with torch.device("meta"):
        model = Switch(vocabulary=512, hidden=1024, width=4096, heads=8, layers=1, experts=64, group=256)
    batch = {name: torch.zeros(16, 512, dtype=torch.int64) for name in ("tokens", "labels")}
    program = capture(model, batch, precision="bf16")
    job = Job(program, catalog_cluster("H100", 8), OPTIMIZERS["adamw"], ModelRef(display="switch"), {})
    plan = search(job, Constraints(mesh=(8,)), 60.0, certify=False).plan
    assert {at.stored for key, at in plan.stages[0].params.items() if "experts.w" in key} == {"S0"}
    assert collectives(verify_plan(plan)[0], lambda i: i.target == "all_to_all")["all_to_all"] >= 4


def test_rows_expected_are_those_of_even_routing() -> None:
    """Against every way to choose 3 of 8 experts, of which a rank has 2."""
    draws = torch.combinations(torch.arange(8), 3)
    tokens, sent = route_plan(draws, 4, 2)
    assert sent.tolist() == [expected_rows(8, 2, 3, len(draws))] * 4
    for rank, rows in enumerate(tokens[: int(sent.sum())].split(sent.tolist())):
        chosen = [any(expert // 2 == rank for expert in draw) for draw in draws.tolist()]
        assert rows.tolist() == [index for index, comes in enumerate(chosen) if comes]


def test_tokens_beyond_the_capacity_are_dropped_in_their_order() -> None:
    """Against a loop over tokens: first choices before second ones, earlier tokens before later ones."""
    torch.manual_seed(0)
    mixture = Mixture(4, 2, 8, 16, 0.5, 12).double()
    x = torch.randn(3, 12, 8, dtype=torch.float64)
    combine, balance = mixture.route(x)
    probs = torch.softmax(mixture.router(x).float(), -1)
    gates, chosen = probs.topk(2, -1)
    gates = gates / gates.sum(-1, keepdim=True)
    wanted = torch.zeros(3, 12, 4, mixture.capacity)
    for group in range(3):
        taken = [0] * 4
        for choice in range(2):
            for token in range(12):
                expert = int(chosen[group, token, choice])
                if taken[expert] < mixture.capacity:
                    wanted[group, token, expert, taken[expert]] = gates[group, token, choice]
                taken[expert] += 1
    torch.testing.assert_close(combine, wanted)
    assert (wanted.sum((2, 3)) == 0).any()
    share = torch.nn.functional.one_hot(chosen[:, :, 0], 4).float().mean(1)
    torch.testing.assert_close(balance, (share * probs.mean(1)).sum(-1).mean() * 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ep": 0}, "must be at least 1"),
        ({"ep": 3}, "ep=3 does not divide the 4 data-parallel ranks"),
        ({"ep": 4, "tp": 2}, "ep=4 does not divide the 2 data-parallel ranks"),
        ({"ep": 2, "mesh": (2, 2)}, "give the mesh or the degrees"),
    ],
)
def test_pins_that_make_no_sense_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        check_constraints(Constraints(**given), 4)  # type: ignore[arg-type]


def test_experts_that_do_not_divide_or_do_not_exist_are_named() -> None:
    with pytest.raises(ConstraintError, match=r"the 4 experts of model\.layers\.0.* do not divide over 8 ranks"):
        pins.expert_axis(captured("mixtral")[1], 8)
    small = build("mlp", 0.0)
    with pytest.raises(ConstraintError, match="the model has no experts"):
        pins.expert_axis(capture(small.model, small.batch, precision="fp64"), 2)


@pytest.mark.parametrize("levels", [1, 2])
def test_processes(levels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over Gloo, fast and recorded: tokens exchanged as in one process."""
    name, ranks = "mixtral", 2 * levels
    routed(monkeypatch)
    over_nodes(monkeypatch)
    plan, _ = planned(name, two_nodes(4, 1e8) if levels == 2 else 2, Constraints(pp=1, ep=ranks))
    assert keys_of(plan, PRODUCTS[1:]) == {"|".join(["route"] * levels)}
    file = tmp_path / "plan.json"
    write_plan(plan, file)
    worker = str(Path(__file__).with_name("expert_worker.py"))
    assert spawn_local(ranks, worker, [name, str(file)]) == 0
    assert {path.name for path in tmp_path.glob("done*")} == {f"done{rank}" for rank in range(ranks)}
