"""The pins of a plan file: data that anyone may have written, read as constraints or refused with their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from paraplan.ir.errors import ConstraintError, InvalidPlanError
from paraplan.ir.plan import Plan
from paraplan.planner.constraints import Constraints


def constraints_from(pins: Mapping[str, Any], place: str = "pins") -> Constraints:
    """Pins as constraints.

    Args:
        pins: as `Constraints.as_data` made them.
        place: where the file has them.
    Raises:
        InvalidPlanError: an unknown name, a wrong type, or a value that makes no sense.
    """
    try:
        return msgspec.convert(pins, Constraints)
    except (msgspec.ValidationError, ConstraintError, TypeError, ValueError) as fault:
        said = str(fault).replace("`$", f"`{place}")
        raise InvalidPlanError(f"the plan's {place} are none ({said}): the file was edited. Plan again") from None


def check_pins(plan: Plan) -> None:
    """Refuse a plan whose own pins, or those of what was tried beside it, are none.

    Raises:
        InvalidPlanError: names the place.
    """
    constraints_from(plan.pins)
    for number, each in enumerate(plan.tried):
        constraints_from(each.pins, f"tried[{number}].pins")
