"""Moves cheap reductions up to where their inputs are made, so that large values die early.

Models collect a value per layer and reduce all of them at the end (a mixture's router logits and the loss that balances
them): every one stays alive until then, and no position is a narrow cut. Here a group of cheap ops whose inputs
all exist is run as soon as that frees more bytes than it makes, if that carries it past heavier work. The set of ops
and what each computes stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, fx


def hoist_reductions(main: Sequence[fx.Node], is_work: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """The main nodes in an order that keeps less alive.

    Args:
        main: main nodes in a valid order.
        is_work: whether a node does heavy work: such nodes stay in their order, and only moves past one count.
    """
    order = _Order(main, is_work)
    for node in main:
        if node not in order.done:
            order.run((node,))
            for value in (*node.all_input_nodes, node):
                order.run(order.late_group(value))
    return list(order.done)


class _Order:
    """What has been run so far, in order."""

    def __init__(self, main: Sequence[fx.Node], is_work: Callable[[fx.Node], bool]) -> None:
        self.place = {node: index for index, node in enumerate(main)}
        self.done: dict[fx.Node, None] = {}
        self._work = {node for node in main if is_work(node)}
        self._works = [index for index, node in enumerate(main) if node in self._work]
        self._passed = 0

    def run(self, nodes: Sequence[fx.Node]) -> None:
        """Appends nodes."""
        self.done.update(dict.fromkeys(nodes))
        self._passed += sum(node in self._work for node in nodes)

    def late_group(self, value: fx.Node) -> list[fx.Node]:
        """The readers of a value that could run now but come after more work, with all they lead to, if it pays."""
        if value not in self.place or value not in self.done or self._passed == len(self._works):
            return []
        next_work = self._works[self._passed]
        group: dict[fx.Node, None] = {}
        queue = [user for user in value.users if self.place.get(user, -1) > next_work]
        while queue:
            node = queue.pop(0)
            if node in self.done or node in group or node in self._work or node not in self.place:
                continue
            if all(x in self.done or x in group for x in node.all_input_nodes if x in self.place):
                group[node] = None
                queue += list(node.users)
        return sorted(group, key=self.place.__getitem__) if self._reduces(group) else []

    def _reduces(self, group: dict[fx.Node, None]) -> bool:
        """Whether running a group now lets at least twice the bytes die that it leaves alive (mere views do not)."""
        read = {x for node in group for x in node.all_input_nodes if x in self.place and x not in group}
        freed = sum(_nbytes(x) for x in read if not self._waiting(x, group))
        made = sum(_nbytes(x) for x in group if self._waiting(x, group))
        return freed > 2 * made

    def _waiting(self, value: fx.Node, group: dict[fx.Node, None]) -> bool:
        """Whether some main node still reads a value after the group has run."""
        return any(user in self.place and user not in self.done and user not in group for user in value.users)


def _nbytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
