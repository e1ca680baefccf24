"""A plan in a few words: what tables and comparisons call it."""

from __future__ import annotations

from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.plan import Plan

_AGAIN = frozenset({"recompute", "rerun"})
"""Fates of activations that are made again; any other is a tier's name."""


def plan_words(plan: Plan) -> str:
    """`pp=2 (4 stages, interleaved) axis0=4, 8 microbatches, recomputing`: degrees, and what is done to hold less.

    Meshes that differ are named in the order of stages: `axis0=4 then axis0=2`.
    """
    return ", ".join(plan_phrases(plan))


def plan_phrases(plan: Plan) -> tuple[str, ...]:
    """The same, one by one."""
    count = plan.num_microbatches
    axes = " then ".join(dict.fromkeys(_mesh_words(stage.mesh) for stage in plan.stages))
    positions = len({each.devices for stage in plan.stages for each in stage.meshes})
    stages = f"pp={positions} ({len(plan.stages)} stages, {plan.schedule.name}) " if positions > 1 else ""
    return (f"{stages}{axes}", f"{count} microbatch{'es' if count > 1 else ''}", *_saving(plan))


def _mesh_words(mesh: Mesh) -> str:
    return " ".join(f"{axis}={size}" for axis, size in zip(mesh.axes, mesh.shape, strict=True)) or "one device"


def _saving(plan: Plan) -> list[str]:
    choices = [choice for stage in plan.stages for choice in stage.choices]
    fates = {fate for choice in choices for fate in choice.activations.values()}
    layouts = [each for stage in plan.stages for each in stage.params.values()]
    away = {
        "activations": fates - _AGAIN,
        "states": {each.state_tier for each in layouts} - {""},
        "parameters": {each.stored_tier for each in layouts} - {""},
    }
    return [
        *(["recomputing"] if fates & _AGAIN else []),
        *(["in chunks"] if any(choice.split is not None for choice in choices) else []),
        *(["op by op"] if plan.memory_actions is not None else []),
        *(f"{what} on {' and '.join(sorted(tiers))}" for what, tiers in away.items() if tiers),
    ]
