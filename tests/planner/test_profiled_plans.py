"""Plans made with measured times: what is priced is what was measured, the plan carries it, and its bound holds."""

from __future__ import annotations

import random
import re

import msgspec
import pytest
from msgspec.structs import replace

from benchmarks.zoo import build
from paraplan.capture import capture
from paraplan.cost_models.costs import Costs
from paraplan.cost_models.ops.roofline import op_cost, op_time_s, variant
from paraplan.cost_models.predict import plan_costs, simulate_plan
from paraplan.cost_models.profiles.measured import INTERPOLATED, MEASURED, MeasuredTimes
from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.mesh import make_mesh
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.ir.profile import VIEW, CollectiveTime, Measured, OpTime, Profile, shape_key
from paraplan.ir.struct import from_json, to_json
from paraplan.jobs.measuring.local_ops import LocalOp, block_ops, families, meshes, moves
from paraplan.lowering import lower
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.sampling import random_plan
from paraplan.planner.search import search

ADAMW = OPTIMIZERS["adamw"]


@pytest.fixture(scope="module")
def program() -> Program:
    small = build("llama", 0.0)
    return capture(small.model, small.batch)


def all_ops(program: Program, ways: int) -> list[LocalOp]:
    found = {op.full_key: op for each in families(program, ClusterSpec.local(1), ADAMW, ways) for op in each.make()}
    return list(found.values())


def made_up(ops: list[LocalOp], seed: int, share: float = 1.0) -> Profile:
    """Times within a factor of three of the analytic model's, and a view's and collectives' besides."""
    rng, device = random.Random(seed), ClusterSpec.local(1).groups[0].device

    def seconds(op: LocalOp) -> float:
        return op_time_s(op_cost(op.target, op.args, op.kwargs, op.inputs, op.outputs), device) * rng.uniform(0.33, 3)

    times = [
        OpTime(
            target=op.target,
            flag=op.flag,
            inputs=op.inputs,
            outputs=op.outputs,
            detail=op.detail,
            seconds=seconds(op),
            samples=5,
        )
        for op in ops
        if rng.random() < share
    ]
    times.append(OpTime(target=VIEW, flag=0, inputs=(), outputs=(), seconds=1e-6))
    for size in (64, 4096, 65536):
        spec = Measured("float32", (size,))
        update = OpTime(
            target="update.adamw.fused", flag=0, inputs=(spec,), outputs=(spec,), seconds=1e-6 + size * 5e-9
        )
        times.append(update)
    sent = [
        CollectiveTime(
            target=target,
            size=n,
            local_size=n,
            input_bytes=nbytes,
            seconds=(seconds_of := (1e-4 + nbytes * 2e-9) * rng.uniform(0.7, 1.4)),
            called_s=seconds_of * rng.uniform(0, 0.7),
        )
        for target in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        for n in (2, 4)
        for nbytes in (1 << 10, 1 << 14, 1 << 18)
    ]
    return Profile(
        device="cpu", name="made up", torch="2.13.0", source="p.db", ops=tuple(times), collectives=tuple(sent)
    )


def test_every_op_of_any_legal_plan_is_among_the_local_ops(program: Program) -> None:
    """Held against random plans without chunks, whose sizes are interpolated: what their blocks run is what is
    measured, by shape, and mostly by strides too."""
    seen, exact = among_local_ops(program, 24)
    assert seen > 500
    assert exact > 0.75 * seen


def test_casts_that_are_held_are_among_them() -> None:
    """And the products that read them."""
    small = build("llama", 0.0)
    program = capture(small.model.float(), small.batch, precision="fp8")
    seen, exact = among_local_ops(program, 6, hold_casts=True)
    assert seen > 100
    assert exact > 0.75 * seen


def among_local_ops(program: Program, plans: int, hold_casts: bool = False) -> tuple[int, int]:
    """How many ops of random plans are local ops, by shape, and how many are by strides too."""
    ways = 4
    ops = all_ops(program, ways)
    shapes = {shape_key(op.target, op.flag, op.inputs, op.outputs) for op in ops}
    full = {op.full_key for op in ops}
    job = Job(program, ClusterSpec.local(ways), ADAMW, ModelRef(display="x"), {})
    seen = exact = 0
    made = (random_plan(job, seed, max_microbatches=1) for seed in range(plans))
    for plan in (each for each in made if all(choice.split is None for choice in each.stages[0].choices)):
        for name, block in lower(msgspec.structs.replace(plan, hold_casts=hold_casts))[0].blocks.items():
            for instr, op in zip((i for i in block.instrs if _is_kernel(block, i)), block_ops(block), strict=True):
                if instr.layout_change or not name.startswith(("k", "held")) or op.target.startswith("paraplan.fill"):
                    continue
                seen += 1
                assert shape_key(op.target, op.flag, op.inputs, op.outputs) in shapes, (name, op.full_key)
                exact += op.full_key in full
    return seen, exact


def _is_kernel(block: object, instr: object) -> bool:
    from paraplan.jobs.measuring import local_ops  # noqa: PLC0415 - the very test that block_ops uses

    return instr.kind.value == "op" and not local_ops._is_view(block, instr)  # type: ignore[attr-defined]


def test_meshes_have_every_way_to_cut_up_to_so_many_devices() -> None:
    """Every product of at most `ways` devices over axes is on a listed mesh, some axes left alone."""
    for ways in range(1, 13):
        listed = meshes(ways)
        for first in range(2, ways + 1):
            for second in range(1, ways // first + 1):
                for third in range(1, ways // (first * second) + 1):
                    wanted = sorted(size for size in (first, second, third) if size > 1)
                    assert any(_contains(list(shape), wanted) for shape in listed), (ways, wanted)


def _contains(shape: list[int], wanted: list[int]) -> bool:
    for size in wanted:
        if size not in shape:
            return False
        shape.remove(size)
    return True


@pytest.mark.parametrize(
    ("share", "pins"), [(0.4, {"microbatches": 2, "pp": 1}), (1.0, {"dp": 2, "tp": 2}), (0.4, {"zero": 3, "dp": 4})]
)
def test_a_profiled_plan_carries_its_times_and_keeps_its_bound(
    program: Program, share: float, pins: dict[str, int]
) -> None:
    profile = made_up([*all_ops(program, 4), *moves()], 3, share)
    ways = 4 if "dp" in pins else 2
    job = Job(program, ClusterSpec.local(ways), ADAMW, ModelRef(display="x"), {}, profile)
    plan = search(job, Constraints(**pins)).plan  # type: ignore[arg-type]
    assert plan.certificate is not None and plan.prediction is not None and plan.profile is not None
    assert plan.certificate.bound_s <= plan.prediction.step_s
    note = next(note for note in plan.notes if note.startswith("times of"))
    assert "(p.db: made up, torch 2.13.0)" in note and note.endswith("collectives are measured")
    if share == 1.0:
        found = re.search(r"times of (\d+) of (\d+) .* (\d+) modelled", note)
        assert found is not None
        assert int(found[1]) >= 0.85 * int(found[2])
        assert int(found[3]) <= 2, "sums of labels, of which there are too few sizes"
    again = from_json(to_json(plan), Plan, "plan", InvalidPlanError)
    assert len(plan.profile.ops) < len(profile.ops)
    full = replace(plan, profile=profile)
    for other in (again, full):
        assert simulate_plan(other, lower(other)).step_s == pytest.approx(plan.prediction.step_s, rel=1e-12)
    bare = replace(plan, profile=None)
    assert simulate_plan(bare, lower(bare)).step_s != pytest.approx(plan.prediction.step_s, rel=1e-3)


def test_a_lowered_op_takes_the_time_of_its_strides_and_a_planner_the_least(program: Program) -> None:
    plan = random_plan(Job(program, ClusterSpec.local(2), ADAMW, ModelRef(display="x"), {}), 1, 1)
    block, op, instr = next(
        (block, op, instr)
        for block in lower(plan)[0].blocks.values()
        for instr, op in zip((i for i in block.instrs if _is_kernel(block, i)), block_ops(block), strict=True)
        if any(x.strides for x in op.inputs)
    )
    base = OpTime(target=op.target, flag=op.flag, inputs=op.inputs, outputs=op.outputs, detail=op.detail, seconds=5.0)
    plain = replace(base, inputs=tuple(Measured(x.dtype, x.shape) for x in op.inputs), seconds=3.0)
    profile = Profile(device="cpu", name="x", torch="2", ops=(base, plain))
    costs = Costs(ClusterSpec.local(2), make_mesh((2,), ("dp",)), profile)
    assert costs.instr_s(block, instr) == 5.0
    assert costs.op_s(op.target, instr.args, instr.kwargs, op.inputs, op.outputs) == 3.0
    assert [(found.seconds, how) for found, how in costs.used] == [(5.0, MEASURED)]
    other = Costs(ClusterSpec.local(2), make_mesh((2,), ("dp",)), replace(profile, device="H100"))
    assert other.instr_s(block, instr) < 1.0, "another device's times are not asked"


def test_interpolation_is_monotone_and_cross_validation_finds_a_scale_that_the_model_misses() -> None:
    """Times that are 2.5 times the model's, exactly: nothing is left to err."""
    device = ClusterSpec.local(1).groups[0].device

    def product(n: int) -> LocalOp:
        square = Measured("float32", (n, n))
        return LocalOp("aten.mm.default", ("%0", "%1"), {}, (square, square), (square,))

    def time_of(op: LocalOp, factor: float) -> OpTime:
        seconds = factor * op_time_s(op_cost(op.target, op.args, op.kwargs, op.inputs, op.outputs), device)
        return OpTime(
            target=op.target, flag=op.flag, inputs=op.inputs, outputs=op.outputs, detail=op.detail, seconds=seconds
        )

    known = [product(n) for n in (16, 32, 64, 128, 256, 512)]
    times = MeasuredTimes(
        Profile(device="cpu", name="x", torch="2", ops=tuple(time_of(op, 2.5) for op in known)), device
    )
    errors = times.cross_validate()["all"]
    assert errors.points == len(known)
    assert errors.ninth_decile < 1e-9
    last = 0.0
    for n in (8, 16, 100, 300, 512, 2000):
        op = product(n)
        work = op_cost(op.target, op.args, op.kwargs, op.inputs, op.outputs)
        shape = shape_key(op.target, variant(op.target, op.args, op.kwargs), op.inputs, op.outputs)
        found = times.op(shape, None, work, op.target)
        assert found is not None
        assert found[1] == (MEASURED if n in (16, 512) else INTERPOLATED)
        assert found[0] == pytest.approx(2.5 * op_time_s(work, device))
        assert found[0] > last
        last = found[0]
    noisy = [time_of(op, 2.5 if index % 2 else 1.0) for index, op in enumerate(known)]
    worse = MeasuredTimes(Profile(device="cpu", name="x", torch="2", ops=tuple(noisy)), device).cross_validate()["all"]
    assert worse.ninth_decile > 0.2


def test_plan_costs_know_the_optimizer(program: Program) -> None:
    profile = made_up([], 0)
    plan = random_plan(Job(program, ClusterSpec.local(1), ADAMW, ModelRef(display="x"), {}, profile), 1, 1)
    (costs,) = plan_costs(plan)
    assert costs.update_s((256, 256), 0, 0) == pytest.approx(2 * (1e-6 + 64 * 5e-9))
    assert costs.update_share_s(1 << 20, 0, 0) <= costs.update_s((1 << 20,), 0, 0)
