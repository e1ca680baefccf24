"""Tabu search over sequences of a job shop: the neighbours are what may shorten a critical path.

Only an order of operations on a critical path can make the step shorter, and there only a swap at either end of a block
(operations of one position that follow each other without a gap) or moving one to the block's front or end (Nowicki and
Smutnicki 1996; Balas and Vazacopoulos 1998). Moves that deadlock, overflow memory or take a queue out of order are left
out. The best neighbour is taken even where it is worse, unless it undoes a recent move without being the best ever.
"""

from __future__ import annotations

from collections.abc import Iterator

from paraplan.planner.schedules.searching.job_shop import Shop
from paraplan.planner.schedules.searching.timing import Timing, timing

_TENURE = 8


def improve(shop: Shop, sequences: list[list[int]], bound_s: float, rounds: int) -> tuple[list[list[int]], float]:
    """Search on from some sequences.

    Args:
        shop: operations.
        sequences: where to start; they run and fit.
        bound_s: at which to stop.
        rounds: moves at most; it also stops after a third of them without progress.
    Returns:
        The best sequences, and their step in seconds.
    """
    now = timing(shop, sequences)
    assert now is not None, "the start deadlocks"
    queue = _queues(shop)
    best, best_s, since = [list(each) for each in sequences], now.step_s, 0
    tabu: dict[tuple[int, int], int] = {}
    sequences = best
    for turn in range(rounds):
        if best_s <= bound_s * (1 + 1e-12) or since > max(8, rounds // 3):
            break
        chosen: tuple[float, list[list[int]], Timing, tuple[int, int]] | None = None
        for position, take, put in _moves(shop, sequences, now, queue):
            moved = list(sequences[position])
            op = moved.pop(take)
            moved.insert(put, op)
            if not shop.fits(position, moved):
                continue
            trial = [moved if index == position else each for index, each in enumerate(sequences)]
            found = timing(shop, trial)
            pair = (op, sequences[position][put])
            if found is None or (tabu.get(pair, -1) >= turn and found.step_s >= best_s):
                continue
            if chosen is None or found.step_s < chosen[0]:
                chosen = (found.step_s, trial, found, pair)
        if chosen is None:
            break
        _, sequences, now, (op, other) = chosen
        tabu[other, op] = turn + _TENURE
        since += 1
        if now.step_s < best_s - 1e-12:
            best, best_s, since = sequences, now.step_s, 0
    return best, best_s


def _queues(shop: Shop) -> list[int]:
    """Per operation, the number of its queue on its position."""
    found = [0] * len(shop.actions)
    for own in shop.queues:
        for index, queue in enumerate(own):
            for op in queue:
                found[op] = index
    return found


def _moves(shop: Shop, sequences: list[list[int]], now: Timing, queue: list[int]) -> Iterator[tuple[int, int, int]]:
    """(position, index to take from, index to put at)."""
    place = [0] * len(shop.actions)
    for sequence in sequences:
        for index, op in enumerate(sequence):
            place[op] = index
    end_s = [start + seconds for start, seconds in zip(now.start_s, shop.seconds, strict=True)]
    seen: set[tuple[int, int, int]] = set()
    for block in _blocks(shop, now.critical(end_s), place):
        first, last = place[block[0]], place[block[-1]]
        position = shop.position[block[0]]
        for take, put in ((first, first + 1), (last, last - 1)):
            yield from _legal(sequences[position], position, take, put, queue, seen)
        for index in range(first + 1, last + 1):
            yield from _legal(sequences[position], position, index, first, queue, seen)
        for index in range(first, last):
            yield from _legal(sequences[position], position, index, last, queue, seen)


def _blocks(shop: Shop, path: list[int], place: list[int]) -> Iterator[list[int]]:
    """Runs of at least two operations of the path that follow each other on one position."""
    block = path[:1]
    for op in path[1:]:
        if shop.position[op] == shop.position[block[-1]] and place[op] == place[block[-1]] + 1:
            block.append(op)
            continue
        if len(block) > 1:
            yield block
        block = [op]
    if len(block) > 1:
        yield block


def _legal(
    sequence: list[int], position: int, take: int, put: int, queue: list[int], seen: set[tuple[int, int, int]]
) -> Iterator[tuple[int, int, int]]:
    """The move, unless it is known or would pass an operation of the same queue."""
    low, high = min(take, put), max(take, put)
    passed = sequence[low:high] if put < take else sequence[low + 1 : high + 1]
    if (position, take, put) in seen or any(queue[op] == queue[sequence[take]] for op in passed):
        return
    seen.add((position, take, put))
    yield position, take, put
