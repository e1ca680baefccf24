"""The parts of a step add up to it, and each is what can be reckoned by hand."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor, nn

import paraplan as pp
from paraplan.cost_models.costs import lowered_op
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.realised_plan import Realised, realised
from paraplan.cost_models.simulator.rank_trace import RankTrace
from paraplan.cost_models.simulator.timeline import Span
from paraplan.ir.execution import streams
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.device import Link
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.ir.profile import Profile
from paraplan.lowering import lower
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.sampling import random_plan
from paraplan.planner.search import search
from paraplan.report.diagnosis.faster import TENTH, faster, quicker
from paraplan.report.diagnosis.memory_use import keeping_compute_s, memory_use, priced_without, saving
from paraplan.report.diagnosis.records import (
    COMPUTE,
    FILL_AND_DRAIN,
    ISSUING,
    OTHERS,
    PART_WORDS,
    RECOMPUTATION,
    Breakdown,
)
from paraplan.report.diagnosis.sentences import part_words
from paraplan.report.diagnosis.step_parts import breakdowns, step_parts
from tests.captures import program_of

LAYERS = 6


class Deep(nn.Module):
    """Equal layers, whose activations are most of what a step holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64, bias=False), nn.Tanh(), nn.Linear(64, 16, bias=False))
            for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def slow(devices: int, bytes_per_s: float) -> ClusterSpec:
    """Processes of one machine whose link is slow, without latency, and takes nothing of compute."""
    cluster = ClusterSpec.local(devices)
    link = Link(bytes_per_s=bytes_per_s, latency_s=0.0)
    groups = tuple(msgspec.structs.replace(group, in_node=link) for group in cluster.groups)
    return msgspec.structs.replace(cluster, groups=groups)


def broken_down(made: Realised) -> tuple[Breakdown, ...]:
    return breakdowns(made.plan, made.programs, made.simulation, keeping_compute_s(priced_without(made.plan)))


@pytest.mark.parametrize(
    ("name", "seed"),
    [*(("gpt2", seed) for seed in (0, 2, 4)), *((n, seed) for n in ("bert", "llama") for seed in (1, 3, 5))],
)
def test_parts_of_every_position_add_up_to_the_step(name: str, seed: int) -> None:
    program = program_of(name, 0.1 if seed % 2 else 0.0)
    job = Job(program, ClusterSpec.local(2 if seed % 3 else 4), OPTIMIZERS["adamw"], ModelRef(display=name), {})
    made = realised(random_plan(job, seed, max_microbatches=4, states_leave=True))
    for each in broken_down(made):
        assert sum(part.seconds for part in each.parts) == pytest.approx(each.step_s, rel=1e-9)
        assert all(part.seconds >= 0 and part.key in PART_WORDS for part in each.parts)
    found = pp.explain(pp.Plan(made.plan, made.programs), time_limit_s=0)
    assert found._repr_html_() and sum(row.nbytes for row in found.memory.parts) == found.memory.peak_bytes
    away = [each.what for each in found.saving if " on " in each.what]
    tiers = {name.rpartition(" ")[2] for name in away}
    assert tiers <= set(made.simulation.tier_peak_bytes) and all(each.saved_s >= -1e-9 for each in found.faster[:1])


def test_a_tenth_more_of_a_slow_link_saves_an_eleventh_of_its_bytes_time() -> None:
    """All is waited for, so the step is compute and what bytes take: seconds' = compute + bytes / (1.1 rate)."""
    plan = pp.compile(Deep(), slow(2, 1e3), example_inputs=(torch.zeros(8, 16),), dp=2, zero=0).data
    made = realised(plan)
    (parts,) = broken_down(made)
    gradients = LAYERS * 2 * 16 * 64 * 4
    assert parts.of("in_node") > 0.99 * parts.step_s
    (found,) = [each for each in faster(plan, made.programs, made.simulation) if each.what == "in_node"]
    busy = sum(made.simulation.comm_s.values())
    assert busy == pytest.approx(gradients / 1e3, rel=0.05)  # an all-reduce over two moves each byte once each way
    assert found.saved_s == pytest.approx(busy * (1 - 1 / TENTH), rel=1e-3)
    assert found.saved_s_per_gb_per_s == pytest.approx(found.saved_s / (0.1 * 1e3 / 1e9))


def test_a_faster_device_saves_an_eleventh_of_what_is_computed() -> None:
    """On one device nothing else takes time but kernels' launches, which stay."""
    plan = pp.compile(Deep(), "local:1", example_inputs=(torch.zeros(4096, 16),), recompute="none").data
    made = realised(plan)
    free = msgspec.structs.replace(plan.cluster, groups=tuple(map(_without_launches, plan.cluster.groups)))
    simulation = simulate_plan(msgspec.structs.replace(plan, cluster=free), made.programs)
    found = {each.what: each for each in faster(msgspec.structs.replace(plan, cluster=free), made.programs, simulation)}
    assert found["device"].saved_s == pytest.approx(simulation.step_s * (1 - 1 / TENTH), rel=1e-6)
    assert 0 < found["products"].saved_s < found["device"].saved_s and "in_node" not in found


def test_measured_times_are_divided_with_the_device() -> None:
    plan = pp.compile(Deep(), "local:1", example_inputs=(torch.zeros(64, 16),), recompute="none").data
    made = realised(plan)
    known = [lowered_op(block, instr) for block in made.programs[0].blocks.values() for instr in block.instrs]
    times = {op.full_key: msgspec.structs.replace(op, seconds=1e-3, samples=3) for op in known if op is not None}
    profile = Profile(device=plan.cluster.groups[0].device.kind, name="", torch="", ops=tuple(times.values()))
    free = msgspec.structs.replace(plan.cluster, groups=tuple(map(_without_launches, plan.cluster.groups)))
    plan = msgspec.structs.replace(plan, cluster=free, profile=profile)
    simulation = simulate_plan(plan, made.programs)
    assert simulation.step_s > 10 * made.simulation.step_s and len(times) > 5
    (found,) = faster(plan, made.programs, simulation)
    assert found.what == "device" and found.saved_s == pytest.approx(simulation.step_s / 11, rel=1e-6)


def _without_launches(group):  # type: ignore[no-untyped-def]
    return msgspec.structs.replace(group, device=msgspec.structs.replace(group.device, launch_s=0.0))


def test_only_what_is_named_is_quicker() -> None:
    cluster = slow(2, 1e3)
    (group,) = quicker(cluster, "host", 2.0).groups
    (before,) = cluster.groups
    assert group.host.bytes_per_s == 2 * before.host.bytes_per_s
    assert msgspec.structs.replace(group, host=before.host) == before
    (group,) = quicker(cluster, "latency", 2.0).groups
    assert group.host.latency_s == before.host.latency_s / 2 and group.host.bytes_per_s == before.host.bytes_per_s
    (group,) = quicker(cluster, "launches", 2.0).groups
    device = msgspec.structs.replace(group.device, launch_s=before.device.launch_s)
    assert msgspec.structs.replace(group, device=device) == before


def test_delays_are_told_apart_from_rates() -> None:
    """Of a step that launches kernels of next to nothing on one device, an eleventh of what all launches take."""
    plan = pp.compile(Deep(), "local:1", example_inputs=(torch.zeros(1, 16),), recompute="none").data
    launches = msgspec.structs.replace(plan.cluster, groups=tuple(map(_of_launches, plan.cluster.groups)))
    plan = msgspec.structs.replace(plan, cluster=launches)
    made = realised(plan)
    first, *others = faster(plan, made.programs, made.simulation)
    assert first.what == "launches" and first.saved_s == pytest.approx(made.simulation.step_s / 11, rel=1e-3)
    assert all(each.saved_s < 1e-3 * first.saved_s for each in others)


def test_waiting_for_the_host_is_a_part_and_what_a_quicker_host_saves() -> None:
    plan = pp.compile(Deep(), "local:1", example_inputs=(torch.zeros(1, 16),), recompute="none").data
    made = realised(plan)
    slow_host = msgspec.structs.replace(plan.cluster, groups=tuple(_with_host(each) for each in plan.cluster.groups))
    plan = msgspec.structs.replace(plan, cluster=slow_host)
    simulation = simulate_plan(plan, made.programs)
    (told,) = breakdowns(plan, made.programs, simulation)
    part = told.parts[0]
    assert part.key == ISSUING and part.seconds > 0.99 * simulation.step_s
    assert sum(each.seconds for each in told.parts) == pytest.approx(simulation.step_s, rel=1e-9)
    assert "CUDA graphs" in part_words(told, part)
    first, *_ = faster(plan, made.programs, simulation)
    assert first.what == ISSUING and first.saved_s == pytest.approx(simulation.step_s / 11, rel=1e-2)


def _with_host(group):  # type: ignore[no-untyped-def]
    return msgspec.structs.replace(group, device=msgspec.structs.replace(group.device, issue_s=1.0))


def _of_launches(group):  # type: ignore[no-untyped-def]
    return msgspec.structs.replace(group, device=msgspec.structs.replace(group.device, launch_s=1.0))


def trace_of(
    spans: list[tuple[str, float, float]], bubbles: tuple[tuple[float, float], ...], step_s: float
) -> RankTrace:
    """A trace of compute spans (phase, start, end) and bubbles."""
    made = tuple(
        Span(
            stream=streams.COMPUTE,
            start_s=start,
            end_s=end,
            label="",
            action="",
            segment=0,
            microbatch=0,
            phase=phase,
            busy_s=end - start,
        )
        for phase, start, end in spans
    )
    return RankTrace(
        step_s=step_s,
        peak_bytes=0,
        peak_step=-1,
        peak_instr=-1,
        start_bytes=0,
        compute_s=sum(span.busy_s for span in made),
        comm_s={},
        exposed_comm_s=0.0,
        spans=made,
        memory=(),
        bubbles=bubbles,
        bubble_s=sum(end - begin for begin, end in bubbles),
    )


def test_bubbles_at_both_ends_fill_and_drain_and_those_between_wait_for_others() -> None:
    """F waits 1 s at first and 2 s before B; 3 s between; 4 s after the last F; the rank ends 5 s before the step."""
    spans = [("F", 1.0, 2.0), ("B", 4.0, 5.0), ("F", 8.0, 9.0), ("B", 13.0, 14.0)]
    trace = trace_of(spans, ((0.0, 1.0), (2.0, 4.0), (5.0, 8.0), (9.0, 13.0)), 14.0)
    found = {part.key: part.seconds for part in step_parts(ClusterSpec.local(2), trace, {}, 19.0, None)}
    assert found == {FILL_AND_DRAIN: 1 + 2 + 4 + 5, OTHERS: 3.0, COMPUTE: 4.0}


def test_recomputation_is_what_is_computed_twice() -> None:
    """With every layer made again each of its ops of the forward is computed once more."""
    options = {"example_inputs": (torch.zeros(512, 16),), "microbatches": 1}
    kept = realised(pp.compile(Deep(), "local:1", recompute="none", **options).data)
    again = realised(pp.compile(Deep(), "local:1", recompute="full", **options).data)
    (parts,) = broken_down(again)
    assert parts.of(RECOMPUTATION) == pytest.approx(again.simulation.step_s - kept.simulation.step_s, rel=1e-6)
    assert parts.of(RECOMPUTATION) > 0 and not broken_down(kept)[0].of(RECOMPUTATION)


def test_what_fills_the_fullest_device_adds_up_and_memory_is_named_where_it_forces() -> None:
    data = pp.compile(Deep(), "local:1", example_inputs=(torch.zeros(512, 16),), microbatches=1, recompute="full").data
    made = realised(data)
    whole = realised(_kept(data))
    use, without = memory_use(made, made.peak_bytes), priced_without(data)
    assert sum(row.nbytes for row in use.parts) == use.peak_bytes == made.peak_bytes
    (forced,) = saving(made, without, made.peak_bytes, lambda what: False)
    assert forced.what == "recomputation" and forced.forced
    assert forced.over_bytes == whole.peak_bytes - made.peak_bytes > 0
    assert forced.costs_s == pytest.approx(made.simulation.step_s - whole.simulation.step_s)
    (asked,) = saving(made, without, made.peak_bytes, lambda what: True)
    (roomy,) = saving(made, without, whole.peak_bytes, lambda what: False)
    assert not asked.forced and not roomy.forced and not roomy.over_bytes
    assert not saving(whole, priced_without(whole.plan), 0, lambda what: False)


def _kept(plan: Plan) -> Plan:
    stages = tuple(
        msgspec.structs.replace(s, choices=tuple(msgspec.structs.replace(c, activations={}) for c in s.choices))
        for s in plan.stages
    )
    return msgspec.structs.replace(plan, stages=stages)


def test_a_schedule_of_ops_is_what_one_device_holds_less_by() -> None:
    job = Job(program_of("gpt2", 0.0), ClusterSpec.local(1), OPTIMIZERS["adamw"], ModelRef(display="gpt2"), {})
    alone = Constraints(microbatches=1, reserve_bytes=0)
    budget = 3 * realised(search(job, alone, certify=False).plan).peak_bytes // 4
    within = msgspec.structs.replace(alone, memory_bytes=budget)
    made = realised(search(job, within, certify=False).plan)
    assert made.plan.memory_actions is not None
    (parts,) = broken_down(made)
    (found,) = saving(made, priced_without(made.plan), budget, lambda what: False)
    assert found.what.startswith("a schedule of ops") and found.forced and found.over_bytes > 0
    assert parts.of(RECOMPUTATION) == pytest.approx(found.costs_s, rel=1e-6)


def test_what_is_on_the_host_is_named_with_what_it_costs() -> None:
    plan = pp.compile(
        Deep(), "local:1", example_inputs=(torch.zeros(8, 16),), place_states="host", update_on="host"
    ).data
    made = realised(plan)
    (found,) = saving(made, priced_without(plan), 1 << 40, lambda what: True)
    assert found.what == "states on host" and found.pinned and found.costs_s > 0 and not found.over_bytes
    assert found.peak_bytes > max(simulate_plan(plan, lower(plan)).peak_bytes)
    assert broken_down(made)[0].of("host") + broken_down(made)[0].of("host_update") > 0
