"""What no schedule of a job shop is shorter than.

Every operation has a head (what must pass before it can start, the pipeline's fill) and a tail (what must follow it,
its drain): longest paths over what needs what and, operations of a kind being done one after the other, over their
queue. A machine that does its operations one at a time, each not before its head and with its tail after it, takes at
least as long as when it may interrupt them: always the one with the longest tail among those there (Jackson's
preemptive schedule, Carlier 1982). The bound is the largest over positions and links.

Where memory is limited, so is what a position holds over time: an activation stays at least as long as its microbatch
takes to the last stage and back, so bytes times seconds of all of them, over the bytes there are, must pass between
fill and drain too.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

from paraplan.ir.execution.schedule import ActionKind
from paraplan.planner.schedules.searching.job_shop import Shop


def machine_bound(shop: Shop) -> tuple[float, str]:
    """The bound in seconds, and the machine it comes from."""
    count = len(shop.actions)
    after: list[list[tuple[int, float]]] = [[] for _ in range(count)]
    for op, needs in enumerate(shop.needs):
        for need in needs:
            after[need.op].append((op, need.seconds))
    for queues in shop.queues:
        for queue in queues:
            for first, second in pairwise(queue):
                after[first].append((second, 0.0))
    order = _topological(after, count)
    head, tail = [0.0] * count, [0.0] * count
    for op in order:
        for then, way_s in after[op]:
            head[then] = max(head[then], head[op] + shop.seconds[op] + way_s)
    for op in reversed(order):
        for then, way_s in after[op]:
            tail[op] = max(tail[op], way_s + shop.seconds[then] + tail[then])
    best = (0.0, "nothing to do")
    best = max([best, *_held(shop, head, tail)])
    for position, own in enumerate(shop.queues):
        jobs = [(head[op], shop.seconds[op], tail[op]) for queue in own for op in queue]
        best = max(best, (preemptive(jobs), f"position {position}: its work between fill and drain"))
    links: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    for op, needs in enumerate(shop.needs):
        for need in needs:
            if need.link is not None and need.seconds:
                end_s = head[need.op] + shop.seconds[need.op]
                links.setdefault(need.link, []).append((end_s, need.seconds, shop.seconds[op] + tail[op]))
    for (source, to), messages in sorted(links.items()):
        best = max(best, (preemptive(messages), f"link {source} to {to}: its messages between fill and drain"))
    return best


def _held(shop: Shop, head: list[float], tail: list[float]) -> list[tuple[float, str]]:
    """Per position with a limit, bytes times seconds over bytes."""
    found = []
    for position, limit in enumerate(shop.limit_bytes or ()):
        room = limit - shop.start_bytes[position]
        held = 0.0
        ops = [op for queue in shop.queues[position] for op in queue]
        for op in ops:
            action = shop.actions[op]
            if action.kind is ActionKind.F:
                held += shop.before_bytes[op] * _there_and_back_s(shop, op)
            elif action.kind is ActionKind.W:
                held -= shop.after_bytes[op] * shop.seconds[op]
        if room > 0:
            fill_s, drain_s = min(head[op] for op in ops), min(tail[op] for op in ops)
            found.append((fill_s + held / room + drain_s, f"position {position}: its memory between fill and drain"))
    return found


def _there_and_back_s(shop: Shop, op: int) -> float:
    """From the start of an F to the end of its stage's B or I, everything between done at once."""
    first = shop.actions[op]
    kinds = (ActionKind.F, ActionKind.B, ActionKind.I)
    return sum(
        shop.seconds[other] + sum(need.seconds for need in shop.needs[other] if other != op)
        for other in shop.chains[first.microbatch]
        if shop.actions[other].stage >= first.stage and shop.actions[other].kind in kinds
    )


def preemptive(jobs: Sequence[tuple[float, float, float]]) -> float:
    """Length of Jackson's preemptive schedule of (head, seconds, tail)."""
    coming = sorted(jobs)
    ready: list[list[float]] = []  # (-tail, seconds left)
    now = longest = 0.0
    index = 0
    while index < len(coming) or ready:
        if not ready:
            now = max(now, coming[index][0])
        while index < len(coming) and coming[index][0] <= now:
            heapq.heappush(ready, [-coming[index][2], coming[index][1]])
            index += 1
        until = coming[index][0] if index < len(coming) else float("inf")
        tail, left = ready[0]
        if now + left <= until:
            now += left
            heapq.heappop(ready)
            longest = max(longest, now - tail)
        else:
            ready[0][1] -= until - now
            now = until
    return longest


def _topological(after: list[list[tuple[int, float]]], count: int) -> list[int]:
    left = [0] * count
    for successors in after:
        for op, _ in successors:
            left[op] += 1
    order = [op for op in range(count) if not left[op]]
    for op in order:
        for then, _ in after[op]:
            left[then] -= 1
            if not left[then]:
                order.append(then)
    return order
