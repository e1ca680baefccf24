"""List scheduling: every position that is free takes, of what it could start, what a rule likes best.

A rule ranks F, backward and W, says how many microbatches a position lets in and whether forwards prefer the stage
furthest on. Memory is kept by never starting an F that would leave less than a microbatch needs to go through the later
stages on that position: so the first one on its way always gets through, and frees what it holds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from paraplan.ir.execution.schedule import ActionKind
from paraplan.planner.schedules.searching.job_shop import Shop

_CLASS = {ActionKind.F: 0, ActionKind.B: 1, ActionKind.I: 1, ActionKind.W: 2}


@dataclass(frozen=True)
class Rule:
    """How to choose.

    Attributes:
        rank: of F, backward and W; the least is taken first.
        ahead: per position, the most (stage, microbatch) between F and B or I.
        deep: whether forwards prefer later stages (depth first) to earlier ones.
        patience_s: for how long a position rather waits for a backward it knows is coming than starts an F.
    """

    rank: tuple[int, int, int]
    ahead: tuple[int, ...]
    deep: bool
    patience_s: float = 0.0


def rules(shop: Shop, num_positions: int) -> Iterator[Rule]:
    """A grid of rules: ranks, depths, and how many are let in, the same everywhere or more at the front."""
    held = [sum(shop.actions[queue[0]].kind is ActionKind.F for queue in own) for own in shop.queues]
    most = max(len(queue) for own in shop.queues for queue in own)
    mean_s = sum(shop.seconds) / len(shop.seconds)
    split = any(action.kind is ActionKind.W for action in shop.actions)
    shapes = []
    for extra in range(0, min(most, num_positions + 2) + 1):
        shapes.append(tuple(max(1, num_positions - p + extra) * held[p] for p in range(num_positions)))
        shapes.append((max(1, extra) * max(held),) * num_positions)
        shapes.append(tuple(max(1, 2 * (num_positions - p) + extra - 1) * held[p] for p in range(num_positions)))
    shapes.append((most * max(held),) * num_positions)
    for ahead in dict.fromkeys(shapes):
        for rank in ((1, 0, 2), (0, 1, 2), (2, 0, 1), (1, 0, 0)) if split else ((1, 0, 2), (0, 1, 2)):
            for deep in (True, False) if max(held) > 1 else (True,):
                for patience_s in (0.0, 0.5 * mean_s):
                    yield Rule(rank, ahead, deep, patience_s)


def dispatch(shop: Shop, rule: Rule) -> list[list[int]] | None:
    """Sequences by a rule; None where it got stuck (memory that what W needs overflows)."""
    return _Dispatch(shop, rule).run()


class _Dispatch:
    def __init__(self, shop: Shop, rule: Rule) -> None:
        self.shop, self.rule = shop, rule
        size = len(shop.queues)
        self.arrived: dict[int, float] = {}
        self.missing = [len(needs) for needs in shop.needs]
        self.ready_s = [0.0] * len(shop.actions)
        self.head = [[0] * len(own) for own in shop.queues]
        self.free_s, self.live = [0.0] * size, list(shop.start_bytes)
        self.flying = [0] * size
        self.sequences: list[list[int]] = [[] for _ in range(size)]
        self.link_s: dict[tuple[int, int], float] = {}
        self.heap = [(0.0, position) for position in range(size)]
        stage_bytes = [
            {
                shop.actions[queue[0]].stage: shop.before_bytes[queue[0]]
                for queue in own
                if shop.actions[queue[0]].kind is ActionKind.F
            }
            for own in shop.queues
        ]
        self.reserve = [
            {stage: sum(size for later, size in own.items() if later > stage) for stage in own} for own in stage_bytes
        ]

    def run(self) -> list[list[int]] | None:
        while self.heap:
            now, position = heapq.heappop(self.heap)
            if self.free_s[position] > now:
                continue
            op = self._choose(position, now)
            if op is not None:
                self._start(position, op, now)
        done = sum(map(len, self.sequences))
        return self.sequences if done == len(self.shop.actions) else None

    def _choose(self, position: int, now: float) -> int | None:
        best: tuple[int, int, int] | None = None
        chosen = None
        soon = now + self.rule.patience_s
        for index, queue in enumerate(self.shop.queues[position]):
            at = self.head[position][index]
            if at == len(queue):
                continue
            op = queue[at]
            if self.missing[op] or self.ready_s[op] > soon:
                continue
            action = self.shop.actions[op]
            which = _CLASS[action.kind]
            late = self.ready_s[op] > now
            if (late and which != 1) or not self._allowed(position, op, which):
                continue
            depth = -action.stage if which or self.rule.deep else action.stage
            key = (self.rule.rank[which], action.microbatch if self.rule.deep else depth, depth)
            if best is None or key < best:
                best, chosen = key, None if late else op
        return chosen

    def _allowed(self, position: int, op: int, which: int) -> bool:
        shop = self.shop
        if which == 0 and self.flying[position] >= self.rule.ahead[position]:
            return False
        if shop.limit_bytes is None:
            return True
        need = shop.before_bytes[op] + max(0, shop.after_bytes[op])
        if which == 0:
            need += self.reserve[position][shop.actions[op].stage]
        return self.live[position] + need <= shop.limit_bytes[position]

    def _start(self, position: int, op: int, now: float) -> None:
        shop = self.shop
        end_s = now + shop.seconds[op]
        self.sequences[position].append(op)
        self.free_s[position] = end_s
        self.live[position] += shop.before_bytes[op] + shop.after_bytes[op]
        self.flying[position] += {0: 1, 1: -1, 2: 0}[_CLASS[shop.actions[op].kind]]
        for index, queue in enumerate(shop.queues[position]):
            at = self.head[position][index]
            if at < len(queue) and queue[at] == op:
                self.head[position][index] += 1
        heapq.heappush(self.heap, (end_s, position))
        for reader in shop.readers[op]:
            when = end_s
            if reader.link is not None:
                when = max(end_s, self.link_s.get(reader.link, 0.0)) + reader.seconds
                self.link_s[reader.link] = when
            self.missing[reader.op] -= 1
            self.ready_s[reader.op] = max(self.ready_s[reader.op], when)
            if not self.missing[reader.op]:
                to = shop.position[reader.op]
                heapq.heappush(self.heap, (max(when - self.rule.patience_s, now, 0.0), to))
                heapq.heappush(self.heap, (when, to))
