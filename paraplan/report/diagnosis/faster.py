"""The same plan simulated on a cluster of which something is a tenth faster: what bandwidth and compute are worth.

Nothing is planned again, so a plan that could make more of the faster part is not found; what is saved here is saved
for certain, by the model. Rates and delays (launches of kernels, latencies of links) are told apart. Measured times of
a profile are divided as a whole, by device and by link, as nobody knows what they consist of.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.rank_trace import Simulation
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.machine.cluster import ClusterSpec, NodeGroup
from paraplan.ir.machine.device import Device, Link
from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.plan import Plan
from paraplan.ir.profile import CollectiveTime, OpTime, Profile
from paraplan.report.diagnosis.records import ISSUING, TIER_MEMORY, TIER_UPDATE, Faster
from paraplan.report.diagnosis.step_parts import part_of

TENTH = 1.1
_LINKS = ("in_node", "between_nodes", *TIERS)
_TIER_RATES = tuple(kind.rate for kind in TIERS.values() if kind.rate)
_UNRATED = ("device", "products", "launches", "latency", ISSUING)


def faster(plan: Plan, programs: Sequence[RankProgram], simulation: Simulation) -> tuple[Faster, ...]:
    """What a tenth more of everything that is at work is worth, the most first.

    Args:
        plan, programs, simulation: of a plan.
    """
    streams = {stream for trace in simulation.traces for stream, busy in trace.work.items() if busy > 0}
    at_work = {part_of(stream, plan.cluster) for stream in streams}
    links = [link for link in _LINKS if link in at_work]
    memory = [TIER_MEMORY] if TIER_UPDATE in at_work else []
    delays = [
        *(["launches"] if any(g.device.launch_s for g in plan.cluster.groups) else []),
        *(["latency"] * bool(links)),
        *([ISSUING] if any(g.device.issue_s for g in plan.cluster.groups) else []),
    ]
    apart = ["products", "device_memory", *delays] if plan.profile is None else []
    found = [_simulated(plan, programs, simulation, what) for what in ("device", *apart, *links, *memory)]
    return tuple(sorted(found, key=lambda each: -each.saved_s))


def _simulated(plan: Plan, programs: Sequence[RankProgram], simulation: Simulation, what: str) -> Faster:
    other = msgspec.structs.replace(
        plan,
        cluster=quicker(plan.cluster, what),
        profile=None if plan.profile is None else _profile(plan.profile, what),
    )
    step_s = simulate_plan(other, programs).step_s
    saved, rate = simulation.step_s - step_s, _bytes_per_s(plan.cluster, what)
    more = (TENTH - 1) * rate / 1e9
    return Faster(
        what=what,
        bytes_per_s=rate,
        step_s=step_s,
        saved_s=saved,
        saved_s_per_gb_per_s=saved / more if more else 0.0,
    )


def quicker(cluster: ClusterSpec, what: str, times: float = TENTH) -> ClusterSpec:
    """The cluster of which something is so many times as fast.

    Args:
        cluster: as it is.
        what: a key of `FASTER_WORDS`; of delays, they are so many times as short.
        times: more than 1.
    """

    def device(old: Device) -> Device:
        products = {dtype: rate * times for dtype, rate in old.flops_per_s.items()}
        memory = old.memory_bytes_per_s * times
        return msgspec.structs.replace(
            old,
            flops_per_s=products if what in ("device", "products") else old.flops_per_s,
            memory_bytes_per_s=memory if what in ("device", "device_memory") else old.memory_bytes_per_s,
            launch_s=old.launch_s / times if what == "launches" else old.launch_s,
            issue_s=old.issue_s / times if what == ISSUING else old.issue_s,
        )

    def link(name: str, old: Link | None) -> Link | None:
        if old is None or what not in (name, "latency"):
            return old
        rate, latency = (
            (old.bytes_per_s, old.latency_s / times) if what == "latency" else (old.bytes_per_s * times, old.latency_s)
        )
        return msgspec.structs.replace(old, bytes_per_s=rate, latency_s=latency)

    def group(old: NodeGroup) -> NodeGroup:
        new = msgspec.structs.replace(old, device=device(old.device))
        if what == TIER_MEMORY:
            return msgspec.structs.replace(new, **{rate: getattr(old, rate) * times for rate in _TIER_RATES})
        return msgspec.structs.replace(new, **{name: link(name, getattr(old, name)) for name in _LINKS})

    between = link("between_nodes", cluster.between_nodes)
    return msgspec.structs.replace(cluster, groups=tuple(map(group, cluster.groups)), between_nodes=between)


def _profile(profile: Profile, what: str) -> Profile:
    """Measured times on the quicker cluster: all ops' on a quicker device, a link's collectives'."""
    ops: tuple[OpTime, ...] = profile.ops
    if what == "device":
        ops = tuple(msgspec.structs.replace(op, seconds=op.seconds / TENTH) for op in ops)

    def collective(each: CollectiveTime) -> CollectiveTime:
        level = "in_node" if each.size == each.local_size else "between_nodes"
        if level != what:
            return each
        return msgspec.structs.replace(each, seconds=each.seconds / TENTH, called_s=each.called_s / TENTH)

    return msgspec.structs.replace(profile, ops=ops, collectives=tuple(map(collective, profile.collectives)))


def _bytes_per_s(cluster: ClusterSpec, what: str) -> float:
    """Of the slowest link or memory of its kind; 0.0 of compute."""
    groups = cluster.groups
    if what == "device_memory":
        return min(group.device.memory_bytes_per_s for group in groups)
    if what == TIER_MEMORY:
        rates = [getattr(group, rate) for group in groups for rate in _TIER_RATES]
        return min((rate for rate in rates if rate), default=0.0)
    if what in _UNRATED:
        return 0.0
    links = [getattr(group, what) for group in groups]
    if what == "between_nodes":
        links.append(cluster.between_nodes)
    return min((link.bytes_per_s for link in links if link is not None), default=0.0)
