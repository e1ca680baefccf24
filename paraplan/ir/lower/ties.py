"""What ranks of different stages exchange at the end of a step: gradients of parameters they share, and the loss.

A parameter that several groups of ranks hold (tied weights, the stages of bidirectional pipelines, a weight that one
stage trains and another reads) gets the sum of their gradients in all of them: each that makes one sends it, once
reduced to the layout of its optimizer, to the others, and all add them up in the order of the groups, so that the
copies stay equal to the bit. Gradients go in bundles of the plan's
size, of which two are under way, in the order of the parameters in the model: the first that has not arrived anywhere
is waited for by nobody who has not sent it, so groups that share different parameters do not wait in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paraplan.ir import names as outer_names
from paraplan.ir.lower.kind import Given
from paraplan.ir.lower.parcels import local_bytes
from paraplan.ir.lower.transfers import Message
from paraplan.ir.mesh import Layout, R, parse_layout
from paraplan.ir.names import Name
from paraplan.ir.rank_program import StepKind

if TYPE_CHECKING:
    from paraplan.ir.lower.program import RankSteps

Coming = tuple[Message, Name]
"""A message and the outer name of what it brings."""


def exchange_ends(steps: RankSteps, coming: Sequence[Coming] = ()) -> dict[str, Name]:
    """Write the exchange, with the end of what else is `coming`; the loss is whole afterwards.

    Returns:
        Parameter -> outer name of its whole gradient.
    """
    grads = {name: steps.reductions.grads[name] for name in steps.holding.graded}
    ties = {name: _makers(steps, name) for name in steps.trained if len(_holders(steps, name)) > 1}
    before: list[str] = []
    for bundle in _bundles(steps, list(ties)):
        for name in bundle:
            _send(steps, name, grads.get(name))
        for name in bundle:
            for message, outer in _coming(steps, name, ties[name]):
                steps.messages.receive(message, outer)
        for name in before:
            _arrive(steps, name, ties[name])
            _add(steps, name, grads.get(name), ties[name])
        before = bundle
    exchange_loss(steps, [*(each for name in before for each in _coming(steps, name, ties[name])), *coming])
    for name in before:
        _add(steps, name, grads.get(name), ties[name])
    return grads | {name: outer_names.tied(name) for name in ties}


def _bundles(steps: RankSteps, names: Sequence[str]) -> list[list[str]]:
    """Names in order, in bundles of the plan's size or of one."""
    found: list[list[str]] = []
    room = 0
    for name in names:
        nbytes = local_bytes(steps.grad_spec(name), _state(steps, name, steps.group), steps.extended)
        if not found or nbytes > room:
            found.append([])
            room = steps.plan.bundle_bytes
        found[-1].append(name)
        room -= nbytes
    return found


def _send(steps: RankSteps, name: str, grad: Name | None) -> None:
    if grad is None:
        return
    strides = steps.strides_of.get(grad) if grad == outer_names.accumulator(name) else None
    given = Given(_state(steps, name, steps.group), strides)
    for target in _holders(steps, name):
        if target != steps.group:
            steps.messages.send_now(_tie(steps, name, steps.group, target), grad, given)


def _coming(steps: RankSteps, name: str, groups: Sequence[int]) -> list[Coming]:
    return [
        (_tie(steps, name, source, steps.group), outer_names.grad(name).of_group(source))
        for source in groups
        if source != steps.group
    ]


def _arrive(steps: RankSteps, name: str, groups: Sequence[int]) -> None:
    for target in _holders(steps, name):
        if target != steps.group:
            steps.messages.sent(_tie(steps, name, steps.group, target))
    for message, outer in _coming(steps, name, groups):
        steps.messages.arrived(message, outer)


def _add(steps: RankSteps, name: str, grad: Name | None, groups: Sequence[int]) -> None:
    for group in groups:
        addend = outer_names.grad(name).of_group(group) if grad is None or group != steps.group else grad
        steps.add(StepKind.ACCUMULATE, args=(outer_names.tied(name), addend))


def exchange_loss(steps: RankSteps, coming: Sequence[Coming] = ()) -> None:
    """Write the exchange of the loss and the end of all messages, those still `coming` with their names included."""
    _send_loss(steps)
    every = [
        *coming,
        *(
            (_loss(steps, name, source, steps.group), steps.share_of(name, source))
            for name in (outer_names.LOSS, *steps.metrics.values())
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


def _makers(steps: RankSteps, name: str) -> list[int]:
    return [group for group, holding in enumerate(steps.lowered.held) if name in holding.graded]


def _state(steps: RankSteps, name: str, group: int) -> Layout:
    return (R, *parse_layout(steps.lowered.held[group].params[name].state))


def _tie(steps: RankSteps, name: str, source: int, target: int) -> Message:
    spec, layout = steps.grad_spec(name), _state(steps, name, source)
    return steps.lowered.message(
        f"grad:{name}:{source}>{target}", spec, layout, source, target, _state(steps, name, target)
    )


def _loss(steps: RankSteps, name: Name, source: int, target: int) -> Message:
    whole, there = ((R,) * (1 + len(steps.lowered.held[group].mesh.shape)) for group in (source, target))
    return steps.lowered.message(f"{name}:{source}>{target}", steps.loss_spec(), whole, source, target, there)


def _send_loss(steps: RankSteps) -> None:
    whole = Given((R,) * len(steps.extended))
    for name in steps.losses(steps.group):
        for target in range(len(steps.lowered.held)):
            if target != steps.group:
                message = _loss(steps, name, steps.group, target)
                steps.messages.send_now(message, steps.share_of(name, steps.group), whole)
