"""One stage over unequal devices: priced at the slowest, limited by the smallest, and executed as predicted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from paraplan.codegen import build_modules
from paraplan.cost_models.costs import Costs
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.errors import CostModelError, InfeasibleError, InvalidPlanError
from paraplan.ir.machine.cluster import ClusterSpec, NodeGroup, check_cluster
from paraplan.ir.machine.mesh import make_mesh
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.mixed.group_sets import group_sets
from paraplan.planner.sampling import random_plan
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer

LOCAL = ClusterSpec.local(2)


def group(speed: float, memory_bytes: int = 4 << 30) -> NodeGroup:
    """A node of two CPU processes, `speed` times as fast as `ClusterSpec.local`'s."""
    (local,) = LOCAL.groups
    rates = {dtype: rate * speed for dtype, rate in local.device.flops_per_s.items()}
    device = msgspec.structs.replace(
        local.device,
        kind=f"cpu x{speed:g}",
        flops_per_s=rates,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=local.device.memory_bytes_per_s * speed,
    )
    return msgspec.structs.replace(local, device=device)


def cluster(*groups: NodeGroup) -> ClusterSpec:
    return check_cluster(ClusterSpec(name="mixed", groups=groups, between_nodes=LOCAL.groups[0].in_node))


MIXED = cluster(group(4.0), group(1.0))


def job(tiny: Any, on: ClusterSpec) -> Job:
    return Job(tiny.program, on, OPTIMIZERS["adamw"], ModelRef(display="tiny"), {})


def moved(plan: Plan, on: ClusterSpec) -> Plan:
    """The same decisions elsewhere, all ranks in one class."""
    schedule = msgspec.structs.replace(plan.schedule, classes=plan.schedule.classes[:1], rank_class=(0, 0, 0, 0))
    return msgspec.structs.replace(plan, cluster=on, schedule=schedule)


def test_classes_of_ranks_follow_the_kind_of_device(tiny_mlp: Any) -> None:
    plan = random_plan(job(tiny_mlp, MIXED), 0, 1)
    assert plan.schedule.rank_class == (0, 0, 1, 1)
    assert random_plan(job(tiny_mlp, cluster(group(1.0), group(1.0))), 0, 1).schedule.rank_class == (0, 0, 0, 0)
    with pytest.raises(InvalidPlanError, match=r"class 0 holds rank 0 on cpu x4 and rank 2 on cpu x1"):
        verify_plan(moved(plan, MIXED))


@pytest.mark.parametrize("seed", range(3))
def test_a_stage_over_unequal_devices_is_priced_at_the_slowest(tiny_gpt2: Any, seed: int) -> None:
    plan = random_plan(job(tiny_gpt2, MIXED), seed, 2)
    programs = verify_plan(plan)
    assert programs[0] is programs[1]
    mixed = simulate_plan(plan, programs)
    slow, fast = (simulate_plan(moved(plan, cluster(group(speed), group(speed))), programs[:1]) for speed in (1.0, 4.0))
    assert mixed.step_s == slow.step_s > fast.step_s
    assert len(mixed.peak_bytes) == 2 and set(mixed.peak_bytes) == set(slow.peak_bytes)


def test_where_neither_device_is_slower_in_all_each_op_takes_the_longer_time() -> None:
    """Fast at products but slow at memory, and the other way round."""
    first, second = group(1.0), group(1.0)
    quick = msgspec.structs.replace(first.device, flops_per_s={"float32": 1e15})
    wide = msgspec.structs.replace(second.device, memory_bytes_per_s=1e15)
    both = cluster(msgspec.structs.replace(first, device=quick), msgspec.structs.replace(second, device=wide))
    costs = Costs(both, make_mesh((4,), ("dp",)))
    alone = [Costs(cluster(each, each), make_mesh((4,), ("dp",))) for each in both.groups]
    assert costs.memory_s(1 << 20, 1 << 20) == alone[0].memory_s(1 << 20, 1 << 20) > alone[1].memory_s(1 << 20, 1 << 20)
    x, w, y = _specs()
    times = [each.op_s("paraplan.linear", (), {}, (x, w), (y,)) for each in (costs, *alone)]
    assert times[0] == times[2] > times[1]


def _specs() -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    square = TensorSpec("float32", (512, 512))
    return square, square, square


def test_the_smallest_memory_limits_the_plan(tiny_gpt2: Any) -> None:
    found = search(job(tiny_gpt2, MIXED), Constraints(dp=4))
    assert found.plan.prediction is not None and found.plan.certificate is not None
    assert found.plan.certificate.bound_s <= found.plan.prediction.step_s
    need = max(found.plan.prediction.peak_bytes)
    for roomy in (0, 1):
        sizes = [4 << 30 if index == roomy else need // 8 for index in range(2)]
        small = cluster(group(4.0, sizes[0]), group(1.0, sizes[1]))
        with pytest.raises(InfeasibleError):
            search(job(tiny_gpt2, small), Constraints(dp=4, zero=0, microbatches=1))


@pytest.mark.parametrize("seed", range(3))
def test_a_mixed_plan_runs_as_predicted(tiny_mlp: Any, seed: int) -> None:
    plan = random_plan(job(tiny_mlp, MIXED), seed, 2)
    programs = verify_plan(plan)

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, value in tiny_mlp.params.items():
                layer, leaf = name.split(".")
                if not hasattr(self, layer):
                    setattr(self, layer, torch.nn.Module())
                getattr(self, layer).register_parameter(leaf, torch.nn.Parameter(value.clone()))

    trainer = InProcessTrainer(plan, programs, [build_modules(program) for program in programs], Holder())
    loss = float(trainer.step(tiny_mlp.batch))
    assert tiny_mlp.worst_error([loss], trainer.grads()) <= 1e-9
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3)
    trainer.step(tiny_mlp.batch)
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3)
    predicted = [entry.key for entry in entries(programs[0])]
    peak = max(simulate_plan(plan, programs).peak_bytes)
    assert all(1.0 <= peak / trainer.peak_bytes(rank) <= 1.02 for rank in range(4))
    assert all([entry.key for entry in trainer.entries(rank)] == predicted for rank in range(4))


def test_a_dtype_one_group_lacks_is_refused_by_name() -> None:
    costs = Costs(parse_cluster("1xV100-32+1xA100-80"), make_mesh((2,), ("dp",)))
    x, w, y = (msgspec.structs.replace(spec, dtype="bfloat16") for spec in _specs())
    with pytest.raises(CostModelError, match="V100-32 has no rate for bfloat16"):
        costs.op_s("paraplan.linear", (), {}, (x, w), (y,))


def test_a_group_that_only_slows_a_plan_down_is_left_idle(tiny_mlp: Any) -> None:
    found = search(job(tiny_mlp, MIXED), Constraints()).plan
    alone = search(job(tiny_mlp, cluster(group(4.0))), Constraints(), certify=False).plan
    assert found.prediction is not None and alone.prediction is not None and found.certificate is not None
    assert found.prediction.step_s <= alone.prediction.step_s
    assert found.cluster.name == "2xcpu x4" and found.cluster.groups == MIXED.groups[:1]
    assert found.notes[-2] == "2xcpu x1 idle: this plan is for 2xcpu x4, to be started there alone"
    assert found.certificate.bound_scope.endswith("on 2xcpu x4 alone")
    assert {"on 2xcpu x4+2xcpu x1"} < {each.what for each in found.tried}
    verify_plan(found)


def test_sets_of_groups_that_others_take_the_place_of_are_not_searched() -> None:
    fast, slow, other = group(4.0), group(1.0), msgspec.structs.replace(group(1.0), devices_per_node=4)
    assert group_sets(cluster(fast, slow)) == ((0, 1), (0,))
    assert group_sets(cluster(slow, slow)) == ((0, 1), (0,))
    assert group_sets(cluster(slow, fast, other)) == ((0, 1, 2), (1, 2), (0, 1), (1,), (2,))
    roomy = group(1.0, memory_bytes=8 << 30)
    assert group_sets(cluster(fast, roomy)) == ((0, 1), (0,), (1,))


def test_nothing_is_said_to_be_proved_that_is_proved_of_some_groups_only(tiny_stacks: tuple[Any, Any]) -> None:
    """Two devices of one group hold what four do where one of them is small."""
    pins = Constraints(dp=2, zero=0, microbatches=1, reserve_bytes=0)
    found = search(job(tiny_stacks[0], cluster(group(4.0))), pins, certify=False).plan
    assert found.prediction is not None
    need = max(found.prediction.peak_bytes)
    small = cluster(group(4.0, need), group(1.0, need // 8))
    plan = search(job(tiny_stacks[0], small), pins, certify=False).plan
    assert plan.cluster.groups == small.groups[:1]
    with pytest.raises(InfeasibleError):
        small = cluster(group(4.0, need // 32), group(1.0, need // 32))
        search(job(tiny_stacks[0], small), Constraints(pp=1, microbatches=1, reserve_bytes=0))
