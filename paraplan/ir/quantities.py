"""Which numbers a machine may have."""

from __future__ import annotations

from decimal import Decimal

from paraplan.ir.errors import ClusterError

_MOST, _LEAST_PER_S, _MOST_S = 1e18, 1.0, 3600.0
"""Bytes or operations (a second) of the largest part of a machine, of the slowest one, and the longest latency: beyond
them sums of costs are no longer exact."""
WAY_OUT = "`paraplan cluster schema` says what each field means"


def check_positive(name: str, value: float, where: str) -> None:
    """Refuse a quantity of a cluster that is not above zero, or that no machine has.

    Args:
        name: of the cluster.
        value: the quantity.
        where: its field, whose name ends in its unit.
    Raises:
        ClusterError: so it is.
    """
    if not value > 0 or value == float("inf"):
        raise ClusterError(f"cluster {name!r}: {where} must be a positive number, not {value}; {WAY_OUT}")
    slow = where.rpartition("_per_s")[1] and value < _LEAST_PER_S
    if slow or value > _MOST:
        what = f"at least {_LEAST_PER_S:g}" if slow else f"at most {_MOST:g}"
        said = f"{Decimal(value):.3g}"
        raise ClusterError(f"cluster {name!r}: {where} is {said}; it may be {what}; {WAY_OUT}")


def check_not_negative(name: str, value: float, where: str) -> None:
    """Likewise one that may be zero.

    Args:
        name: of the quantity.
        value: of it.
        where: it was read, for the error.
    Raises:
        ClusterError: it is below, or no machine has it.
    """
    most = _MOST_S if where.endswith("_s") and not where.endswith("_per_s") else _MOST
    if not 0 <= value <= most:
        raise ClusterError(
            f"cluster {name!r}: {where} is negative, too large or no number ({value}); it is 0 to {most:g}; {WAY_OUT}"
        )
