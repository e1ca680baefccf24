"""What ranks of different stages exchange at the end of a step: gradients of parameters they share, and the loss.

A parameter that several groups of ranks hold (tied weights) gets the sum of their gradients in all of them: each sends
its own, once reduced to the layout of its optimizer, to the others, and all add them up in the order of the groups, so
that the copies stay equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paraplan.ir.lower.kind import Given
from paraplan.ir.lower.transfers import Message
from paraplan.ir.mesh import Layout, R, parse_layout
from paraplan.ir.rank_program import StepKind

if TYPE_CHECKING:
    from paraplan.ir.lower.program import RankSteps


def exchange_ends(steps: RankSteps) -> dict[str, str]:
    """Write the exchange; the loss is whole afterwards.

    Returns:
        Parameter -> outer name of its whole gradient.
    """
    grads = {name: steps.reductions.grads[name] for name in steps.trained}
    ties = {name: groups for name in steps.trained if len(groups := _holders(steps, name)) > 1}
    for name, groups in ties.items():
        path = grads[name] != f"acc:{name}"
        layout, strides = _state(steps, name, steps.group), None if path else steps.strides_of.get(grads[name])
        for target in groups:
            if target != steps.group:
                steps.messages.send_now(_tie(steps, name, steps.group, target), grads[name], Given(layout, strides))
    coming = [
        (_tie(steps, name, source, steps.group), f"grad:{name}<{source}")
        for name, groups in ties.items()
        for source in groups
        if source != steps.group
    ]
    exchange_loss(steps, coming)
    for name, groups in ties.items():
        for group in groups:
            addend = grads[name] if group == steps.group else f"grad:{name}<{group}"
            steps.add(StepKind.ACCUMULATE, args=(f"tied:{name}", addend))
    return grads | {name: f"tied:{name}" for name in ties}


def exchange_loss(steps: RankSteps, coming: Sequence[tuple[Message, str]] = ()) -> None:
    """Write the exchange of the loss and the end of all messages, those still `coming` with their names included."""
    _send_loss(steps)
    every = [
        *coming,
        *(
            (_loss(steps, name, source, steps.group), steps.share_of(name, source))
            for name in ("loss", *steps.metrics.values())
            for source in steps.sharers(name)
            if source != steps.group
        ),
    ]
    for message, name in every:
        steps.messages.receive(message, name)
    steps.messages.drain()
    for message, name in every:
        steps.messages.arrived(message, name)
    steps.add_loss()


def _holders(steps: RankSteps, name: str) -> list[int]:
    return [group for group, holding in enumerate(steps.lowered.held) if name in holding.trained]


def _state(steps: RankSteps, name: str, group: int) -> Layout:
    return (R, *parse_layout(steps.lowered.held[group].params[name].state))


def _tie(steps: RankSteps, name: str, source: int, target: int) -> Message:
    spec, layout = steps.grad_spec(name), _state(steps, name, source)
    return steps.lowered.message(
        f"grad:{name}:{source}>{target}", spec, layout, source, target, _state(steps, name, target)
    )


def _loss(steps: RankSteps, name: str, source: int, target: int) -> Message:
    whole, there = ((R,) * (1 + len(steps.lowered.held[group].mesh.shape)) for group in (source, target))
    return steps.lowered.message(f"{name}:{source}>{target}", steps.loss_spec(), whole, source, target, there)


def _send_loss(steps: RankSteps) -> None:
    whole = Given((R,) * len(steps.extended))
    for name in steps.losses(steps.group):
        for target in range(len(steps.lowered.held)):
            if target != steps.group:
                message = _loss(steps, name, steps.group, target)
                steps.messages.send_now(message, steps.share_of(name, steps.group), whole)
