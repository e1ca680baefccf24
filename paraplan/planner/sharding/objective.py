"""The cost of given choices, computed afresh from the option space: what a solver's objective must equal."""

from __future__ import annotations

from collections.abc import Sequence

from paraplan.ir.machine.mesh import Layout
from paraplan.planner.sharding.prices import Price, add, scale
from paraplan.planner.sharding.space import Space, saved_as


def work_of_choices(space: Space, choices: Sequence[int]) -> Price:
    """Seconds per stream of a whole step.

    Args:
        space: the problem.
        choices: per decider, the option taken.
    Raises:
        ValueError: a reader wants a layout that cannot be reached.
    """
    total = space.prices.zero
    for decider, choice in zip(space.deciders, choices, strict=True):
        total = add(total, decider.prices[choice])
    for transfer in space.transfers:
        have = transfer.source.layouts[choices[transfer.source.decider]]
        wants: dict[Layout, None] = dict.fromkeys(end.layouts[choices[end.decider]] for end in transfer.readers)
        for want in wants:
            if transfer.lean:
                if not saved_as(space.prices, transfer.spec, have, want):
                    raise ValueError(f"{transfer.what}: made in {have}, not saved in {want}, which takes more bytes")
                continue
            price = space.prices.reshard(transfer.spec, have, want, transfer.bundled, transfer.wire)
            if price is None:
                raise ValueError(f"{transfer.what}: no way from {have} to {want}")
            total = add(total, scale(price, transfer.count))
    return total


def held_bytes(space: Space, choices: Sequence[int]) -> tuple[int, int]:
    """Bytes alive at the loss and at the update, as the ILP counts them."""
    loss = sum(options[choices[decider]] for decider, options in space.at_loss)
    update = sum(options[choices[decider]] for decider, options in space.at_update)
    return loss, update + max((options[choices[decider]] for decider, options in space.update_workspace), default=0)
