"""A closed form of what a combination's step takes, by which combinations are put in order before any is simulated."""

from __future__ import annotations

import itertools
import math
from collections import Counter

from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.planner.joint.combinations import Combination
from paraplan.planner.passes.grad_reductions import ROOM
from paraplan.planner.pipeline.links import LinkWay, message_s, ways
from paraplan.planner.pipeline.prices.stage_totals import Totals
from paraplan.planner.schedules.named import NAMED


class ClosedForm:
    """Closed forms on a cluster.

    Args:
        cluster: of all positions.
        budget: bytes a device may hold.
    """

    def __init__(self, cluster: ClusterSpec, budget: int) -> None:
        self.cluster, self.budget = cluster, budget
        self._ways: dict[tuple[int, int, int], tuple[LinkWay, ...]] = {}
        self._hops: dict[tuple[int, int], Counter[tuple[LinkWay, ...]]] = {}

    def quick_s(self, combination: Combination, totals: Totals, mesh_shape: tuple[int, ...]) -> float:
        """A closed form, by which combinations are put in order: positions share work out evenly (those of one stage
        as evenly as the chain can be cut), a pipeline fills and drains, and what does not fit is recomputed.

        Fill and drain are (pp - 1) / (microbatches · stages a position) of the work, less what a schedule's split
        backwards or second direction fill (`Named.idle`), and every hop of a first and a last microbatch. A microbatch
        takes no less than the slowest link its messages. Infinite where what a position keeps does not fit.

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
        passed_s, slowest_s = self._hops_s(combination, totals, math.prod(mesh_shape))
        share = totals.longest(pp) if each == replicas == 1 else 1 / pp
        busy_s = max(share * totals.seconds + each * totals.cut_s, each * slowest_s)
        work_s = combination.microbatches * busy_s
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
            once_s += self.message_s(keeps.grad_bytes * replicas // pp, size, (0, pp - 1))
        return max((work_s + again_s) * (1 + fill) + passed_s, totals.reduce_s / pp) + once_s

    def room(self, workspace_bytes: int, pp: int) -> int:
        """What a position may hold beside what calls and, in a pipeline, reductions under way hold for a moment."""
        return self.budget - workspace_bytes - (self.budget // ROOM if pp > 1 else 0)

    def message_s(self, nbytes: int, size: int, hop: tuple[int, int] = (0, 1)) -> float:
        """From a position to another, rank to rank.

        Args:
            nbytes: of the message.
            size: devices of a position.
            hop: the numbers of both.
        """
        key = (size, *hop)
        if key not in self._ways:
            self._ways[key] = ways(self.cluster, *((at * size, (at + 1) * size - 1) for at in hop))
        return message_s(nbytes, self._ways[key])

    def _hops_s(self, combination: Combination, totals: Totals, size: int) -> tuple[float, float]:
        """What a first and a last microbatch take from position to position, and the slowest hop of one."""
        pp = combination.pp
        if pp == 1:
            return 0.0, 0.0
        if (size, pp) not in self._hops:
            ends = [(at * size, (at + 1) * size - 1) for at in range(pp)]
            self._hops[size, pp] = Counter(ways(self.cluster, *pair) for pair in itertools.pairwise(ends))
        hop_bytes = totals.hop_bytes // (combination.microbatches * size)
        each_s = {over: message_s(hop_bytes, over) for over in self._hops[size, pp]}
        mean_s = sum(count * each_s[over] for over, count in self._hops[size, pp].items()) / (pp - 1)
        return 2 * (combination.num_stages - 1) * mean_s, max(each_s.values())
