"""A closed form of what a combination's step takes, by which combinations are put in order before any is simulated."""

from __future__ import annotations

import math

from paraplan.cost_models.communication.collectives import p2p_s
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.device import Link
from paraplan.planner.joint.combinations import Combination
from paraplan.planner.passes.grad_reductions import ROOM
from paraplan.planner.pipeline.stage_totals import Totals
from paraplan.planner.schedules.named import NAMED


class ClosedForm:
    """Closed forms on a cluster.

    Args:
        cluster: of all positions.
        budget: bytes a device may hold.
    """

    def __init__(self, cluster: ClusterSpec, budget: int) -> None:
        self.cluster, self.budget = cluster, budget
        self._links: dict[int, tuple[Link, str, str]] = {}

    def quick_s(self, combination: Combination, totals: Totals, mesh_shape: tuple[int, ...]) -> float:
        """A closed form, by which combinations are put in order: positions share the work out evenly, a pipeline fills
        and drains, and what does not fit is recomputed.

        Fill and drain are (pp - 1) / (microbatches · stages a position) of the work, less what a schedule's split
        backwards or second direction fill (`Named.idle`), and every hop of a first and a last microbatch. Infinite
        where what a position keeps does not fit.

        Args:
            combination: degrees, schedule and microbatches.
            totals: of the sharding that its positions have.
            mesh_shape: of a position.
        """
        pp, each = combination.pp, combination.each
        schedule = NAMED[combination.schedule]
        replicas = schedule.num_replicas
        keeps = totals.keeps(mesh_shape)
        room = self.room(totals.workspace_bytes, pp) - replicas * keeps.all_bytes / pp
        if room <= 0:
            return math.inf
        flying = min(float(combination.microbatches), schedule.flying(pp, 0, each))
        if flying == combination.microbatches:  # all forwards before the first backward
            room += replicas * keeps.grad_bytes / pp
        work_s = combination.microbatches * (totals.seconds / pp + each * totals.cut_s)
        held = totals.saved_bytes / pp
        again_s = 0.0
        if held * flying > room:
            extra_s = totals.least_extra_s(room * pp / flying)
            if math.isinf(extra_s):
                return math.inf
            again_s = combination.microbatches * extra_s / pp
        fill = schedule.idle * (pp - 1) / (combination.microbatches * each)
        parts = pp * each if pp > 1 else totals.num_segments  # of one stage, all but a segment's go on beside others
        once_s = totals.once_s / parts + totals.update_s / pp
        size = math.prod(mesh_shape)
        if replicas > 1:
            once_s += self.message_s(keeps.grad_bytes * replicas // pp, size)
        hops_s = 0.0
        if pp > 1:
            hop_bytes = totals.hop_bytes // (combination.microbatches * size)
            hops_s = 2 * (combination.num_stages - 1) * self.message_s(hop_bytes, size)
        return max((work_s + again_s) * (1 + fill) + hops_s, totals.reduce_s / pp) + once_s

    def room(self, workspace_bytes: int, pp: int) -> int:
        """What a position may hold beside what calls and, in a pipeline, reductions under way hold for a moment."""
        return self.budget - workspace_bytes - (self.budget // ROOM if pp > 1 else 0)

    def message_s(self, nbytes: int, size: int) -> float:
        """From a position of so many devices to the next, rank to rank."""
        if size not in self._links:
            level = self.cluster.span((0, size))
            link = self.cluster.link(level, 0) if level == "in_node" else self.cluster.network((0, size))
            self._links[size] = link, self.cluster.group_of(0).device.backend, level
        return p2p_s(nbytes, *self._links[size])
