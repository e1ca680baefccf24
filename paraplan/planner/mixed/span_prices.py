"""Prices of spans: each kind of group is priced once per mesh and samples, however many positions and orders ask.

A group is priced as a cluster of its own (`joint.pricing`), with its own devices, links and rates; groups that are
equal in all share prices. As the others hold a part of the model, it is priced as if its devices had the memory of all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from paraplan.ir.errors import ConstraintError, ParaplanError
from paraplan.lowering import lower
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints, device_budget
from paraplan.planner.deadline import Deadline
from paraplan.planner.joint.combinations import Combination
from paraplan.planner.joint.prices.pricing import PRICED_SHARE, Pricing
from paraplan.planner.joint.prices.pricing_rounds import PricingRounds
from paraplan.planner.mixed.group_sets import cluster_of
from paraplan.planner.mixed.listing import Division, inner_constraints
from paraplan.planner.mixed.positions import PositionSpan
from paraplan.planner.pipeline.prices.shorten import runs_of, shortened
from paraplan.planner.pipeline.prices.stage_prices import Sharding, StagePrices
from paraplan.planner.pipeline.prices.stage_timing import few_microbatches


@dataclass
class SpanPrices:
    """Prices of all groups.

    Attributes:
        job, constraints: what is planned, and what is pinned.
        progress: told what is being priced.
        limit_s: for all pricing.
    """

    job: Job
    constraints: Constraints
    progress: Callable[[str], None]
    limit_s: float
    _pricings: dict[bytes, Pricing] = field(default_factory=dict)
    _there: dict[tuple[PositionSpan, int, int], StagePrices | None] = field(default_factory=dict)

    @property
    def faults(self) -> tuple[ParaplanError, ...]:
        """Why some spans have no prices."""
        return tuple(fault for each in self._pricings.values() for fault in each.faults)

    def __post_init__(self) -> None:
        self._deadline = Deadline(self.limit_s)

    @property
    def num_known(self) -> int:
        """Kinds of positions that are priced."""
        return sum(len(each.prices) for each in self._pricings.values())

    def allow(self, seconds: float) -> None:
        """So many seconds from now on for pricing."""
        self._deadline = Deadline(seconds)

    def budget(self, group: int) -> int:
        """Bytes that a device of a group may hold."""
        return device_budget(self.job.cluster, self.constraints, group)

    def price(self, ways: Sequence[Division], chosen: Collection[int], share: float = 1.0) -> None:
        """Price what spans need in some numbers of microbatches, each group kind in its share of the time.

        Args:
            ways: to divide the groups; what is known already is not priced again.
            chosen: numbers of microbatches.
            share: of the time left, for all of it.
        """
        listed: dict[bytes, dict[Combination, None]] = {}
        first: dict[bytes, int] = {}
        wanted = ((spans, count) for spans, counts in ways for count in counts if count in chosen)
        for span, count in ((span, count) for spans, count in wanted for span in spans):
            kind = self._kind(span.group)
            first.setdefault(kind, span.group)
            listed.setdefault(kind, {})[_combination(span, count)] = None
        for number, (kind, combinations) in enumerate(listed.items()):
            pricing = self._pricing(first[kind])
            if self._deadline.is_over and pricing.prices:
                continue
            pricing.deadline = Deadline(self._deadline.share_s(share / (len(listed) - number)) / PRICED_SHARE)
            unknown = [each for each in combinations if pricing.kind(each) not in pricing.prices]
            PricingRounds(pricing, unknown, rivals=False).go_on()

    def of(self, span: PositionSpan, microbatches: int) -> tuple[StagePrices, ...]:
        """What was priced for a span, fastest first; nothing where there is no sharding, or none was looked for."""
        pricing = self._pricings.get(self._kind(span.group))
        return () if pricing is None else pricing.of(_combination(span, microbatches))

    def mesh_shape(self, span: PositionSpan, microbatches: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The mesh of a position, of one that was priced.

        Args:
            span: of devices.
            microbatches: of the step.
            shape: of the mesh that was priced.
        """
        return self._pricings[self._kind(span.group)].mesh_shape(_combination(span, microbatches), shape)

    def there(self, span: PositionSpan, microbatches: int, prices: StagePrices) -> StagePrices | None:
        """Prices of a sharding on a span's own mesh, where its dims may not divide (see `divides`); None where there is
        no such mesh.

        Args:
            span: of devices.
            microbatches: of the step.
            prices: of another mesh.
        """
        key = (span, microbatches, id(prices))
        if key not in self._there:
            pricing = self._pricings[self._kind(span.group)]
            try:
                part, _, mesh = pricing.position(_combination(span, microbatches))
                decisions = replace(prices.sharding.decisions, mesh=mesh, num_microbatches=microbatches)
                sharding = Sharding(part, decisions, prices.sharding.options)
                self._there[key] = replace(prices, sharding=sharding)
            except ConstraintError:
                self._there[key] = None
        return self._there[key]

    def _kind(self, group: int) -> bytes:
        """What prices of a group hang on."""
        own = self.job.cluster.groups[group]
        return msgspec.json.encode((own, self.job.cluster.between_nodes))

    def _pricing(self, group: int) -> Pricing:
        kind, cluster = self._kind(group), self.job.cluster
        if kind not in self._pricings:
            alone = cluster_of(cluster, (group,))
            groups = range(len(cluster.groups))
            sizes = [each.nodes * each.devices_per_node for each in cluster.groups]
            whole = sum(self.budget(each) * size for each, size in zip(groups, sizes, strict=True))
            job, inner = replace(self.job, cluster=alone), inner_constraints(self.constraints)
            self._pricings[kind] = Pricing(job, inner, whole // alone.num_devices, self.progress, self._deadline)
        return self._pricings[kind]


def divides(prices: StagePrices) -> bool:
    """Whether a sharding can be lowered on its mesh: its dims divide there."""
    sharding = prices.sharding
    try:
        lower(few_microbatches(shortened(sharding.whole, runs_of(sharding.whole)).plan))
    except (ParaplanError, LookupError, ValueError):
        return False
    return True


def _combination(span: PositionSpan, microbatches: int) -> Combination:
    """A span as a pipeline over its own group."""
    return Combination(span.count, span.mesh, microbatches, "1f1b", 1)
