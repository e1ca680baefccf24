"""A rule that was found, tried on what it was not found from: a property test before it is used.

The search for dims stops at the first answer that fits a few draws. So every dim, every pair of dims and every
linear set is held against the whole op once more: on other values of the same style, of other styles where the op takes
them, on values of which a few elements are changed, on another size of every dim, in the fewest and the most shards.
One failure, and nothing that running the op showed is believed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from paraplan.capture.discovery.discover_dims import (
    OpStructure,
    ShardableDim,
    counts_of,
    holds,
    joined,
    legal_together,
    shards_of,
)
from paraplan.capture.discovery.discover_draws import Draw, close, nudged
from paraplan.capture.discovery.discover_linear import is_linear
from paraplan.capture.discovery.discover_run import Bench, other_benches

MAX_NUDGED = 3


def contradiction(bench: Bench, found: OpStructure) -> str:
    """What is wrong with dims and linear sets found on a bench; "" where every test holds."""
    for other, what in other_benches(bench):
        wrong = _fault(other, found, [other.draws[1], *_nudged(other)])
        if wrong:
            return f"{wrong} on the values it was found from, and not on {what}"
    return ""


def _fault(bench: Bench, found: OpStructure, draws: Sequence[Draw]) -> str:
    fitting = [dim for dim in found.dims if _fits(bench, dim)]
    for dim in fitting:
        if not holds(bench, dim, draws):
            return f"sharding {_words(dim)} gives the whole results back"
    for one, other in itertools.combinations(fitting, 2):
        if not legal_together(bench, one, other, draws[0]):
            return f"sharding {_words(one)} and {_words(other)} at once gives the whole results back"
    for group in found.linear:
        if not is_linear(replace(bench, draws=(bench.draws[0], *draws)), group):
            return f"it is linear in input {' and '.join(map(str, group))}"
    return ""


def contradicted(bench: Bench, dims: Sequence[ShardableDim], linear: Sequence[tuple[int, ...]]) -> str:
    """What a user's rule says that running the op disproves; "" where nothing does.

    What the op refuses to run is no contradiction: it would be refused in a plan, too.

    Args:
        bench: the op, with shapes, arguments and draws.
        dims: the rule's, with their `ways`.
        linear: sets of values the rule says the op is linear in.
    """
    for dim in dims:
        for count in counts_of(bench, dim):
            for each in bench.draws:
                shards = shards_of(bench, each, ((dim, count),))
                if shards is not None and not all(
                    way is None or (a is not None and b is not None and close(a, b))
                    for way, a, b in zip(dim.ways, joined(shards, dim.ways), each.whole, strict=True)
                ):
                    ways = ", ".join(_way(way) for way in dim.ways if way is not None)
                    return f"{_words(dim)} sharded in {count}, results {ways} are not the whole ones"
    for group in linear:
        if not is_linear(bench, group):
            return f"it is not linear in input {' and '.join(map(str, group))}"
    return ""


def _way(way: int | str) -> str:
    return f"joined along dim {way}" if isinstance(way, int) else "added up" if way == "sum" else "joined by maximum"


def _fits(bench: Bench, dim: ShardableDim) -> bool:
    """Whether the dim has one size in all its members here, which is several of its smallest blocks."""
    sizes = {bench.sizing.shapes[value][position] for value, position in dim.members}
    return len(sizes) == 1 and sizes.pop() % dim.step == 0 and bool(counts_of(bench, dim))


def _words(dim: ShardableDim) -> str:
    return " with ".join(f"dim {position} of input {value}" for value, position in dim.members)


def _nudged(bench: Bench) -> Iterator[Draw]:
    """Draws with a few elements changed, where the op takes them and still gives numbers."""
    args, kwargs = bench.sizing.args, bench.sizing.kwargs
    for tensors in itertools.islice(nudged(bench.draws[-1], 17), MAX_NUDGED):
        whole = bench.run(tensors, args, kwargs)
        if whole is not None and all(out is None or bool(out.isfinite().all()) for out in whole):
            yield Draw(tensors, whole)
