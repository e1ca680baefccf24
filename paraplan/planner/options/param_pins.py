"""What a pin of a parameter says: its layouts, and where it and what belongs to it are."""

from __future__ import annotations

from typing import NamedTuple

from paraplan.ir.errors import ConstraintError
from paraplan.ir.machine.tier_placement import HERE, PLACEMENTS, TierPlacement, parse_placement
from paraplan.ir.param_layouts import AHEAD


class ParamPin(NamedTuple):
    """A parameter's pinned layouts; where states and stored copy are; whether that is gathered ahead."""

    stored: str
    grad: str
    state: str
    place: TierPlacement
    ahead: bool


def parse_param_pin(name: str, text: str) -> ParamPin:
    """`"S0/S0/S0@host"` or `"R/P/S0+ahead"` in parts; without "@" that is the device.

    Raises:
        ConstraintError: not three layouts, or states cannot be there.
    """
    lies, _, at = text.partition("@")
    layouts = lies.removesuffix(AHEAD)
    parts = layouts.split("/")
    if len(parts) != 3:
        raise ConstraintError(
            f"params[{name!r}] = {text!r}: give stored/grad/state, e.g. 'R,S0/R,S0/R,S0', and after it "
            f"'@host' where the states are to be in the host's memory (or another of {', '.join(PLACEMENTS)}), or "
            f"'{AHEAD}' where the stored copy is gathered once a step"
        )
    try:
        place = parse_placement(at) if at else HERE
    except ConstraintError as fault:
        raise ConstraintError(f"params[{name!r}] = {text!r}: {fault}") from None
    return ParamPin(parts[0], parts[1], parts[2], place, layouts != lies)
