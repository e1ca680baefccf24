"""Ideals of a directed acyclic graph: the sets of nodes closed under predecessors, and what is convex between two.

Ordered stages with all edges going forward are the differences of a chain of ideals, so a partition into such stages is
a path from the empty ideal to the full one. Ideals are kept as rows of bits, smaller ones first.
Source: Tarnawski et al. 2020, section 4 (a dynamic program over ideals).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Ideals:
    """Some ideals of a graph, smaller ones first; the empty and the full one among them.

    Attributes:
        member: [ideal, node].
        complete: whether they are all there are.
    """

    member: Bools
    complete: bool

    def __len__(self) -> int:
        return len(self.member)

    @cached_property
    def words(self) -> Words:
        """[ideal, word] the nodes as bits."""
        width = -(-max(self.member.shape[1], 1) // 64) * 64
        padded = np.zeros((len(self.member), width), bool)
        padded[:, : self.member.shape[1]] = self.member
        return np.packbits(padded, axis=1, bitorder="little").view(np.uint64)


def topological_order(
    num_nodes: int, edges: Iterable[tuple[int, int]], key: Callable[[int], float] | None = None
) -> list[int]:
    """Nodes so that edges go forward; of those that may come next, the least by a key.

    Args:
        num_nodes: numbered from 0.
        edges: (from, to).
        key: of a node; None: its number.
    Raises:
        ValueError: there is a cycle.
    """
    waiting, after = [0] * num_nodes, [[] for _ in range(num_nodes)]  # type: tuple[list[int], list[list[int]]]
    for source, target in edges:
        waiting[target] += 1
        after[source].append(target)
    rank = key or float
    ready = [(rank(node), node) for node in range(num_nodes) if not waiting[node]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for target in after[node]:
            waiting[target] -= 1
            if not waiting[target]:
                heapq.heappush(ready, (rank(target), target))
    if len(order) < num_nodes:
        raise ValueError(f"the graph has a cycle among {num_nodes - len(order)} nodes")
    return order


def all_ideals(num_nodes: int, edges: Sequence[tuple[int, int]], limit: int) -> Ideals | None:
    """Every ideal; None where there are more than a limit.

    Args:
        num_nodes: numbered from 0.
        edges: (from, to).
        limit: ideals at most.
    """
    topological_order(num_nodes, edges)
    needs, after = [0] * num_nodes, [[] for _ in range(num_nodes)]  # type: tuple[list[int], list[list[int]]]
    for source, target in edges:
        needs[target] |= 1 << source
        after[source].append(target)
    sources = [node for node in range(num_nodes) if not needs[node]]
    level: dict[int, frozenset[int]] = {0: frozenset(sources)}  # ideal -> what may be added
    found = [0]
    while level:
        larger: dict[int, frozenset[int]] = {}
        for ideal, addable in level.items():
            for node in addable:
                grown = ideal | 1 << node
                if grown not in larger:
                    new = {target for target in after[node] if needs[target] & ~grown == 0}
                    larger[grown] = (addable - {node}) | new
        found += larger
        if len(found) > limit:
            return None
        level = larger
    return Ideals(_bits(found, num_nodes), complete=True)


def ideals_of_orders(num_nodes: int, orders: Iterable[Sequence[int]]) -> Ideals:
    """The beginnings of some topological orders."""
    found = {0}
    for order in orders:
        ideal = 0
        for node in order:
            ideal |= 1 << node
            found.add(ideal)
    return Ideals(_bits(sorted(found, key=lambda ideal: (ideal.bit_count(), ideal)), num_nodes), complete=False)


def some_orders(num_nodes: int, edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Topological orders of several kinds: by number, breadth first, depth first, each also from the other end."""
    found = []
    for turned in (False, True):
        ends = [(b, a) for a, b in edges] if turned else list(edges)
        by_number = topological_order(num_nodes, ends)
        depth = _longest_paths(by_number, ends)
        place = {node: index for index, node in enumerate(by_number)}
        for weight in (0, num_nodes, -num_nodes):
            ranks = [place[node] + weight * depth[node] for node in range(num_nodes)]
            order = topological_order(num_nodes, ends, ranks.__getitem__)
            found.append(order[::-1] if turned else order)
    return found


def _longest_paths(order: Sequence[int], edges: Iterable[tuple[int, int]]) -> list[int]:
    depth = [0] * len(order)
    after: dict[int, list[int]] = {}
    for source, target in edges:
        after.setdefault(source, []).append(target)
    for node in order:
        for target in after.get(node, ()):
            depth[target] = max(depth[target], depth[node] + 1)
    return depth


def _bits(ideals: Sequence[int], num_nodes: int) -> Bools:
    width = max(-(-num_nodes // 8), 1)
    raw = np.frombuffer(b"".join(ideal.to_bytes(width, "little") for ideal in ideals), np.uint8)
    return np.unpackbits(raw.reshape(len(ideals), width), axis=1, bitorder="little")[:, :num_nodes].astype(bool)
