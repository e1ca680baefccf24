"""When operations of a job shop start, given every machine's sequence; what is on the critical path.

The same as `evaluate.py`, but on numbers: the search asks some ten thousand times.
"""

from __future__ import annotations

from dataclasses import dataclass

from paraplan.planner.schedules.searching.job_shop import Shop


@dataclass(frozen=True)
class Timing:
    """Times of some sequences.

    Attributes:
        step_s: until the last operation ends.
        start_s: per operation.
        cause: per operation, the one that let it start no earlier; -1 for none. Through a message it is the sender's
            operation, or the one whose message was on the link before.
    """

    step_s: float
    start_s: list[float]
    cause: list[int]

    def critical(self, end_s: list[float]) -> list[int]:
        """Operations of one critical path, in order, from the ends of all."""
        op = max(range(len(end_s)), key=lambda each: (end_s[each], -each))
        path = [op]
        while self.cause[op] >= 0:
            op = self.cause[op]
            path.append(op)
        return path[::-1]


def timing(shop: Shop, sequences: list[list[int]]) -> Timing | None:
    """Start every operation as early as its machine's sequence and what it needs allow; None where they deadlock."""
    count = len(shop.actions)
    start_s, end_s, cause = [0.0] * count, [-1.0] * count, [-1] * count
    arrived: dict[tuple[int, int], tuple[float, int]] = {}
    link_s: dict[tuple[int, int], tuple[float, int]] = {}
    seconds, all_needs, readers, position = shop.seconds, shop.needs, shop.readers, shop.position
    at = [0] * len(sequences)
    last = [-1] * len(sequences)
    waiting = list(range(len(sequences)))
    left = count
    while waiting:
        here = waiting.pop()
        sequence = sequences[here]
        while at[here] < len(sequence):
            op = sequence[at[here]]
            ready, why = (end_s[last[here]], last[here]) if last[here] >= 0 else (0.0, -1)
            for need in all_needs[op]:
                if end_s[need.op] < 0:
                    break
                when, by = (end_s[need.op], need.op) if need.link is None else arrived[need.op, op]
                if when > ready:
                    ready, why = when, by
            else:
                start_s[op], cause[op] = ready, why
                end_s[op] = ready + seconds[op]
                at[here] += 1
                last[here] = op
                left -= 1
                for reader in readers[op]:
                    if reader.link is not None:
                        free_s, by = link_s.get(reader.link, (0.0, -1))
                        begin, by = (free_s, by) if free_s > end_s[op] else (end_s[op], op)
                        arrived[op, reader.op] = (begin + reader.seconds, by)
                        link_s[reader.link] = (begin + reader.seconds, by)
                        waiting.append(position[reader.op])
                continue
            break
    return None if left else Timing(max(end_s, default=0.0), start_s, cause)
