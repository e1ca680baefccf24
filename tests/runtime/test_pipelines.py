"""Pipelines equal one device: values that skip stages, tied weights, several losses, statistics, split backwards."""

from __future__ import annotations

import functools
import itertools

import msgspec
import pytest
import torch
from torch import Tensor, nn

from benchmarks.zoo import build
from paraplan.capture import capture
from paraplan.codegen import build_modules
from paraplan.cost_models.predict import simulate_plan
from paraplan.ir.errors import ConstraintError, CostModelError, InvalidPlanError
from paraplan.ir.execution import names
from paraplan.ir.execution.name import Name, Role
from paraplan.ir.execution.rank_program import BlockRole, StepKind
from paraplan.ir.model.program import Program
from paraplan.ir.plan import Plan, Stage
from paraplan.lowering import lower, lower_evaluation
from paraplan.lowering.blocks.remat import recomputable
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.constraints import Constraints
from paraplan.planner.sampling import random_plan
from paraplan.planner.schedules.named import NAMED
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer
from tests.against_eager import eager_error, loss_by
from tests.liveness import left_alive
from tests.runtime.pipelines import account, cut, job_of, mixed, pipeline_of, run
from tests.runtime.web import batch, one_stage, program, stages_of, web

GRAD = "paraplan.group_norm_grad"
SCHEDULES = tuple(NAMED)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_equals_one_device(schedule: str) -> None:
    one = one_stage()
    stages = cut(len(one.program.segments), stages_of(schedule, 2))
    assert run(pipeline_of(one, schedule, 2, stages), web().double(), batch(), clip=0.1) <= 1e-9


@pytest.mark.parametrize("positions", [3, 4])
def test_uneven_stages_equal_one_device(positions: int) -> None:
    one = one_stage()
    stages = cut(len(one.program.segments), positions, uneven=True)
    assert run(pipeline_of(one, "1f1b", positions, stages), web().double(), batch()) <= 1e-9


@pytest.mark.parametrize("parted", [False, True])
@pytest.mark.parametrize("seed", [0, 40, 80])
def test_sharded_stages_equal_one_device(seed: int, parted: bool) -> None:
    one = one_stage(2, 2, seed)
    stages = cut(len(one.program.segments), 2)
    plan = msgspec.structs.replace(pipeline_of(one, "1f1b", 2, stages), parted_messages=parted)
    assert run(plan, web().double(), batch()) <= 1e-9


def test_messages_in_parts_are_smaller_and_give_the_same() -> None:
    one = search(job_of(program(), 2), Constraints(tp=2, microbatches=2, recompute="full"), certify=False).plan
    whole = pipeline_of(one, "interleaved", 2, cut(len(program().segments), stages_of("interleaved", 2)))
    parted = msgspec.structs.replace(whole, parted_messages=True)
    assert run(parted, web().double(), batch()) <= 1e-9

    def sent(plan: Plan) -> int:
        return sum(each.nbytes for rank in lower(plan) for each in rank.transfers.values() if each.sends)

    assert sent(parted) < sent(whole)
    assert not any(left_alive(program) for plan in (parted, whole) for program in lower(plan))


def test_losses_are_begun_together_where_one_is_summed_by_itself() -> None:
    """On a mesh of two axes numerators may lie differently: one as gradients do that are reduced, another not."""
    plan = random_plan(job_of(program(), 4), 0, max_microbatches=4)
    (lowered,) = {id(each): each for each in verify_plan(plan)}.values()
    begun = [step for step in lowered.steps if step.block == "loss.issue"]
    reduced = [step for step in lowered.steps if step.block.startswith("reduce.")]
    assert plan.stages[0].mesh.shape == (2, 2) and begun and reduced
    assert run(plan, web().double(), batch()) <= 1e-9


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_activations_wait_on_tiers_with_several_microbatches_in_flight(schedule: str) -> None:
    one = one_stage()
    (stage,) = one.stages
    choices = []
    for choice in stage.choices:
        names = recomputable(one.program.kinds[choice.kind])
        fates = {name: ("host", "disk")[index % 2] for index, name in enumerate(names)}
        choices.append(msgspec.structs.replace(choice, activations=fates))
    away = msgspec.structs.replace(one, stages=(msgspec.structs.replace(stage, choices=tuple(choices)),))
    plan = pipeline_of(away, schedule, 2, cut(len(one.program.segments), 2))
    assert set(simulate_plan(plan, verify_plan(plan)).tier_peak_bytes) == {"host", "disk"}
    assert run(plan, web().double(), batch()) <= 1e-9


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 4), (4, 2), (4, 1, 2)])
@pytest.mark.parametrize("seed", [0, 40])
def test_stages_on_meshes_of_different_shapes_equal_one_device(sizes: tuple[int, ...], seed: int) -> None:
    ones = [one_stage(size, 2, seed) for size in sizes]
    plan = mixed(ones, "1f1b", cut(len(program().segments), len(sizes)))
    assert run(plan, web().double(), batch()) <= 1e-9


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (4, 2)])
@pytest.mark.parametrize("seed", [120, 240])
def test_several_values_of_one_shape_cross_between_meshes_in_layouts_of_their_own(
    schedule: str, sizes: tuple[int, ...], seed: int
) -> None:
    """Of two stages a position; what arrives in parts and what arrives whole are told apart."""
    ones = [one_stage(size, 2, seed) for size in sizes]
    found = account(mixed(ones, schedule, cut(len(program().segments), 4)), web().double(), batch())
    assert found.error <= 1e-9 and found.entries_equal


def test_ranks_that_wait_for_each_other_are_named() -> None:
    one = one_stage()
    plan = pipeline_of(one, "1f1b", 2, cut(len(program().segments), 2))
    programs = list(lower(plan))
    steps = [step for step in programs[1].steps if step.kind is not StepKind.SEND]
    programs[1] = msgspec.structs.replace(programs[1], steps=tuple(steps))
    with pytest.raises(CostModelError, match=r"deadlocks.*class 0, 0B0 waits for message d:"):
        simulate_plan(plan, programs)


def replicated(schedule: str, positions: int, size: int = 1, seed: int = 0, bundle_bytes: int = 8 << 20) -> Plan:
    """A pipeline whose stages several groups of ranks hold, of a random plan of one stage."""
    one = msgspec.structs.replace(one_stage(size, 4, seed), bundle_bytes=bundle_bytes)
    return pipeline_of(one, schedule, positions, cut(len(program().segments), positions))


@pytest.mark.parametrize(
    ("schedule", "positions", "size", "seed", "bundle_bytes"),
    [("gems", 3, 1, 0, 0), ("gems", 4, 2, 0, 8 << 20), ("chimera", 4, 2, 40, 0), ("chimera", 4, 1, 0, 8 << 20)],
)
def test_stages_held_by_several_groups_equal_one_device(
    schedule: str, positions: int, size: int, seed: int, bundle_bytes: int
) -> None:
    plan = replicated(schedule, positions, size, seed, bundle_bytes)
    assert run(plan, web().double(), batch(), clip=0.1) <= 1e-9


def test_the_copies_of_a_stage_stay_equal_to_the_bit() -> None:
    plan = replicated("chimera", 4)
    programs = verify_plan(plan)
    trainer = InProcessTrainer(plan, programs, [build_modules(each) for each in programs], web().double())
    for _ in range(3):
        trainer.step(batch())
        trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2)
    for rank, other in ((0, 3), (1, 2)):
        mine, theirs = trainer.stored_params(rank), trainer.stored_params(other)
        assert mine and mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert all(torch.equal(x, trainer.buffers(other)[name]) for name, x in trainer.buffers(rank).items())
    writers = [rank for rank in range(4) if trainer.buffers(rank).get("seen", torch.zeros(1)).any()]
    assert len(writers) == 2


def test_a_group_reads_the_microbatches_it_runs_and_all_that_the_loss_counts() -> None:
    for of_rank in verify_plan(replicated("chimera", 2)):
        assert sum(map(_is_x, of_rank.outer)) == 2
        assert {*of_rank.outer} >= {names.batch("y", m) for m in range(4)}
    programs = verify_plan(replicated("chimera", 4))
    assert sorted(sum(map(_is_x, each.outer)) for each in programs) == [0, 0, 2, 2]


def _is_x(name: Name) -> bool:
    return (name.role, name.source) == (Role.BATCH, "x")


def test_replicas_that_mean_nothing_are_refused() -> None:
    plan = replicated("chimera", 2, 2)
    first, second = plan.stages

    def refused(match: str, stages: tuple[Stage, ...] = plan.stages, num_replicas: int = 2) -> None:
        schedule = msgspec.structs.replace(plan.schedule, num_replicas=num_replicas)
        with pytest.raises(InvalidPlanError, match=match):
            verify_plan(msgspec.structs.replace(plan, stages=stages, schedule=schedule))

    refused("2 meshes hold it, schedule chimera is for 1", num_replicas=1)
    other = msgspec.structs.replace(first.mesh, axes=("other",) * len(first.mesh.axes))
    refused("give its replicas meshes of one shape", (msgspec.structs.replace(first, replicas=(other,)), second))
    refused("the rank holds stages", (msgspec.structs.replace(first, replicas=()), second))
    idle = pipeline_of(one_stage(2, 4), "1f1b", 2, cut(len(program().segments), 2))
    both = msgspec.structs.replace(idle.stages[0], replicas=(idle.stages[1].mesh,))
    schedule = msgspec.structs.replace(idle.schedule, num_replicas=2)
    with pytest.raises(InvalidPlanError, match="rank 2 holds stage 0 and runs no microbatch of it"):
        lower(msgspec.structs.replace(idle, stages=(both, idle.stages[1]), schedule=schedule))


def test_stages_that_share_ranks_share_a_mesh() -> None:
    plan = pipeline_of(one_stage(2, 2), "1f1b", 2, cut(len(program().segments), 2))
    overlapping = plan.stages[1].mesh.over((1, 2))
    stages = (plan.stages[0], msgspec.structs.replace(plan.stages[1], mesh=overlapping))
    with pytest.raises(InvalidPlanError, match="rank 1 holds stage 0 on mesh"):
        lower(msgspec.structs.replace(plan, stages=stages))


@pytest.mark.parametrize("schedule", ["interleaved", "chimera"])
def test_evaluations_of_pipelines_give_the_loss(schedule: str) -> None:
    plan = pipeline_of(one_stage(), schedule, 2, cut(len(program().segments), stages_of(schedule, 2)))
    programs = verify_plan(plan)
    modules = [build_modules(each) for each in programs]
    trainer = InProcessTrainer(plan, programs, modules, web().double(), build=build_modules)
    found = trainer.eval_step(batch())
    assert torch.allclose(found.loss, trainer.step(batch()), rtol=1e-12)
    assert set(found.metrics) == {"main", "small"}
    with pytest.raises(ConstraintError, match="evaluates only its loss"):
        lower_evaluation(plan, ["anything"])


class Normed(nn.Module):
    """Norms of what has no weights: one op makes the gradients of its input and of its weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for norm in self.norms:
            pairs = h.view(-1, 2, 4)
            h = h + norm(torch.bmm(torch.bmm(pairs, pairs.mT), pairs).flatten(1))
        return self.last(h).pow(2).mean()


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_a_backward_whose_weights_gradients_come_with_its_inputs(schedule: str) -> None:
    batch = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(3))}
    program = capture(Normed(), batch, precision="fp64")
    alone = [kind for kind in program.kinds if {op.target for op in kind.graph.ops if "grad" in op.target} == {GRAD}]
    assert alone, "a segment of norms alone"
    one = search(job_of(program, 1, "momentum"), Constraints(microbatches=2), certify=False).plan
    plan = pipeline_of(one, schedule, 2, cut(len(program.segments), 2 if schedule == "zb-h1" else 4))
    assert eager_error(plan, Normed(), batch, loss_by(None)) <= 1e-9


@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b-zb"])
def test_experts_gradients_leave_with_those_of_inputs(schedule: str) -> None:
    small = build("deepseek_v3", 0.0)
    program = capture(small.model, small.batch, precision="fp64")
    one = search(job_of(program, 2), Constraints(microbatches=2, ep=2), certify=False).plan
    plan = pipeline_of(one, schedule, 2, cut(len(program.segments), 2))
    assert run(plan, small.model, small.batch) <= 1e-9
    experts = {name for name in program.params if ".experts." in name}
    made = [
        (step.microbatch, step.action)
        for rank in lower(plan)
        for step in rank.steps
        if step.kind is StepKind.ACCUMULATE and step.args[0] in map(names.accumulator, experts)
    ]
    assert made
    assert all(f"W{m}" not in action for m, action in made)
    for rank in lower(plan):
        for block in rank.blocks.values():
            first = {out for instr in block.instrs if instr.target == "paraplan.experts_grad" for out in instr.outs[2:]}
            assert first.isdisjoint(block.saved), "gradients wait for the second half"
            if block.role is BlockRole.BACKWARD_WEIGHTS:
                assert not any(instr.target == "paraplan.reshape_copy" for instr in block.instrs)


@pytest.mark.parametrize(("schedule", "positions"), [("1f1b-zb", 4), ("interleaved-zb", 2)])
def test_a_gradient_that_is_a_slice_of_what_the_other_half_reads(schedule: str, positions: int) -> None:
    """A U-Net's of one sample that arrive in parts: a whole backward hands them on as halves do, which copy them."""
    small = build("unet", 0.0)
    program = capture(small.model, small.batch, loss_fn=small.loss_fn, precision="fp64")
    pins = Constraints(mesh=(2,), pp=1, microbatches=program.batch_size)
    one = search(job_of(program, 2), pins, certify=False).plan
    plan = pipeline_of(one, schedule, positions, cut(len(program.segments), stages_of(schedule, positions)))
    plan = msgspec.structs.replace(plan, parted_messages=True)
    assert run(plan, small.model, small.batch) <= 1e-9


class Remembering(nn.Module):
    """Every layer reads what the first one gives, as decoders do an encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        memory = h = self.first(x).tanh()
        for layer in self.layers:
            h = h + layer(h) * memory
        return h.pow(2).mean()


@functools.cache
def remembered(size: int) -> Plan:
    """A plan of `Remembering` on one stage, its gradients of inputs whole on every rank."""
    job = job_of(remembering(), size)
    return whole_input_grads(search(job, Constraints(tp=size, pp=1, microbatches=2), certify=False).plan)


@functools.cache
def remembering() -> Program:
    return capture(Remembering().double(), vectors(), precision="fp64")


def vectors() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))}


@pytest.mark.parametrize(
    ("schedule", "sizes", "points", "comes_in_parts"),
    [
        ("1f1b", (2, 2), (3,), False),  # the memory's own stage reads it as well
        ("zb-v", (2, 2), (1, 4, 9), False),  # a later stage of its ranks does
        ("1f1b", (2, 2, 2), (1, 6), True),  # two other groups do
        ("1f1b", (2, 2, 1), (1, 6), False),  # and one of them cannot send parts
    ],
)
def test_what_is_read_in_several_places_gets_its_gradient_in_one_layout(
    schedule: str, sizes: tuple[int, ...], points: tuple[int, ...], comes_in_parts: bool
) -> None:
    batch, program, ones = vectors(), remembering(), [remembered(size) for size in sizes]
    bounds = list(itertools.pairwise((0, *points, len(program.segments))))
    if len(bounds) == len(sizes):
        whole = mixed(ones, schedule, bounds)
    else:
        whole = pipeline_of(ones[0], schedule, len(sizes), bounds)
    plan = msgspec.structs.replace(whole, parted_messages=True)
    assert run(plan, Remembering().double(), batch) <= 1e-9
    sizes_sent = {t.nbytes for rank in lower(plan) for t in rank.transfers.values() if t.message.startswith("d:s0.0")}
    microbatch_bytes = batch["x"].nbytes // plan.num_microbatches
    assert sizes_sent == {microbatch_bytes // 2 if comes_in_parts else microbatch_bytes}


def whole_input_grads(one: Plan) -> Plan:
    """The plan with every segment's gradients of its inputs whole on every rank."""
    (stage,) = one.stages
    choices = tuple(
        msgspec.structs.replace(each, input_grads=tuple(layout and "R" for layout in each.input_grads))
        for each in stage.choices
    )
    return msgspec.structs.replace(one, stages=(msgspec.structs.replace(stage, choices=choices),))
