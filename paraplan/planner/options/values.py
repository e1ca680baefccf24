"""Values of single options of the planner: the names they may have, how texts are read as them, what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from paraplan.ir.errors import ConstraintError
from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.option_words import OptionValue
from paraplan.ir.plan import REDUCE_DTYPES
from paraplan.planner.options.param_pins import parse_param_pin

PRESETS = ("none", "selective", "cheap", "alternate", "full", "full-early-stop")
"""Of a layer (an element of a list of modules): `none`: every activation is kept. `full`: its input alone is kept, and
it runs again to its end (Chen et al. 2016; Megatron-LM). `full-early-stop`: as far as the backward needs it (torch's
checkpoint). `selective`: attention alone is made again, from queries, keys and values on (Korthikanti et al. 2022).
`cheap`: all but results of matrix products, convolutions and attention is. `alternate`: and of those every second
product with a weight (torchtitan's selective policy by op)."""
WARM_UP_STEPS = 40
"""Steps before updates are late where it is only said that they may be: some dozens, as Ren et al. 2021 (section 5.2)
advise, for parameters move most at first."""
AUTO: Literal["auto"] = "auto"
"""A degree for the planner to choose, as None is."""
OFFLOAD: dict[str, tuple[str, ...]] = {"none": (), **{name: kind.way for name, kind in TIERS.items()}}
"""The tiers activations may wait on."""
WAYS = ", ".join(f"{name} (and {' and '.join(way[:-1])})" if way[1:] else name for name, way in OFFLOAD.items())
"""Those as a sentence has them, with what is on the way there."""
CP_MODES = ("gather", "alltoall", "ring", "stripes")
"""How attention deals with a sharded sequence: see `planner.sharding.sequence`."""
MOST_AXES = 3
"""Of a mesh."""


def warm_up_steps(delayed_update: bool | int) -> int | None:
    """How many steps come before late updates: a number as it is, True for the literature's; None: all are timely."""
    if isinstance(delayed_update, bool):
        return WARM_UP_STEPS if delayed_update else None
    return delayed_update


def parse_mesh(text: str) -> tuple[int, ...] | str:
    """`2,4`, or `2x4` as plans say it; the text where it is no such thing."""
    try:
        return tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        return text


def parse_degree(text: str) -> int | str:
    """A number, or the text where it is none."""
    try:
        return int(text)
    except ValueError:
        return text


def parse_stages(text: str) -> tuple[tuple[int, int], ...] | str:
    """`0:3,3:6`, or the text where it is no such thing."""
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return tuple((int(first), int(stop)) for first, stop in pairs)
    except ValueError:
        return text


def as_degree(pp: int | Literal["auto"]) -> int | None:
    """A degree; None for the planner to choose."""
    return None if pp == AUTO else pp


def as_shape(mesh: Sequence[int]) -> tuple[int, ...]:
    """Sizes of axes."""
    return tuple(mesh)


def as_bounds(stages: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Segments [first, stop) of stages."""
    return tuple((first, stop) for first, stop in stages)


def as_layouts(params: Mapping[str, str]) -> dict[str, str]:
    """Layouts by the names of parameters."""
    if not isinstance(params, Mapping):
        raise TypeError
    return dict(params)


def check_mesh(keyword: str, mesh: tuple[int, ...]) -> None:
    """Sizes of one to three axes."""
    if not 1 <= len(mesh) <= MOST_AXES:
        raise ConstraintError(
            "{}: a mesh has 1 to {} axes, not {}; give e.g. {}",
            *(OptionValue(keyword, mesh), MOST_AXES, len(mesh), OptionValue(keyword, (2, 4))),
        )
    if any(size < 1 for size in mesh):
        raise ConstraintError("{}: every axis must be at least 1", OptionValue(keyword, mesh))


def check_zero(keyword: str, zero: int) -> None:
    """A level of ZeRO."""
    if zero not in (0, 1, 2, 3):
        raise ConstraintError("{}: must be 0, 1, 2 or 3", OptionValue(keyword, zero))


def check_memory(keyword: str, memory_bytes: int) -> None:
    """Some bytes."""
    if memory_bytes <= 0:
        raise ConstraintError("{}: must be more than 0 bytes", OptionValue(keyword, memory_bytes))


def check_reduce_dtype(keyword: str, dtype: str) -> None:
    """A dtype of sums."""
    if dtype not in REDUCE_DTYPES:
        raise ConstraintError("{}: one of {}", OptionValue(keyword, dtype), ", ".join(filter(None, REDUCE_DTYPES)))


def check_late(keyword: str, steps: int) -> None:
    """Steps before the first late one."""
    if steps < 0:
        raise ConstraintError("{}: at least 0 steps come before the first late one", OptionValue(keyword, steps))


def check_params(keyword: str, params: dict[str, Any]) -> None:
    """Texts of layouts."""
    for name, text in params.items():
        parse_param_pin(name, text)
