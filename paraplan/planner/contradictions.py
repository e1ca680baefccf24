"""What is refused before a search: constraints that contradict each other, the cluster or the model."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

import msgspec

from paraplan.ir.errors import ConstraintError
from paraplan.ir.machine.tier_placement import HOST
from paraplan.ir.machine.tiers import NEAREST
from paraplan.ir.model.program import HALVES, Program
from paraplan.ir.option_words import OptionName, OptionValue, Phrase
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import FLOOR

FIRST_PLAN_S = 1.0
"""Seconds in which a search comes to a plan, though what has to be done for one may take longer."""


def planning_time_s(seconds: float) -> float:
    """The time limit of a search: as given, and for 0 as little as a first plan that fits may take.

    Raises:
        ConstraintError: it is not a number of at least 0.
    """
    if not seconds >= 0:
        raise ConstraintError(
            "a time limit of {} s: give a number of seconds, or 0 for the first plan that fits", seconds
        )
    return seconds or FIRST_PLAN_S


def left_of(seconds: float, passed_s: float) -> float:
    """What is left of a time limit once a model is captured: a tenth, and what a first plan has, at least."""
    return max(seconds - passed_s, FLOOR * seconds, min(seconds, FIRST_PLAN_S))


def check_time_limit(seconds: float) -> None:
    """Refuse a time in which nothing can be solved.

    Raises:
        ConstraintError: it is not a number above 0.
    """
    if not seconds > 0:
        raise ConstraintError(f"a time limit of {seconds} s: give a number of seconds above 0")


def check_constraints(constraints: Constraints, num_devices: int) -> Constraints:
    """The constraints themselves, when they make sense together.

    Raises:
        ConstraintError: pp that does not divide the devices, a schedule or stages without pp, degrees that do not
            multiply to the devices, zero where they leave no data-parallel axis, sp without tp, a cp_mode without cp,
            an ep that does not divide dp, states where they cannot be.
    """
    c = constraints
    _check_states(c)
    if c.pp is None:
        _check_free_pp(c, num_devices)
        return c
    whole, num_devices = num_devices, _stage_devices(c, num_devices)
    left = Phrase(" that {} leaves a stage of {}", OptionValue("pp", c.pp), whole) if c.pp > 1 else ""
    degrees = {name: size for name, size in (("dp", c.dp), ("tp", c.tp), ("cp", c.cp)) if size is not None}
    _check_axes(c, num_devices)
    if c.mesh is not None:
        _check_mesh(c, degrees, num_devices, left)
    product = math.prod(degrees.values())
    if len(degrees) > 1 and (num_devices % product or (c.dp is not None and product != num_devices)):
        has = "there are {} devices{}" if left else "the cluster has {} devices{}"
        fault = (
            f"{' times '.join('{}' for _ in degrees)} is {{}}, {has}; give such as multiply to {{}}, or fewer of them"
        )
        raise ConstraintError(fault, *_given(degrees), product, num_devices, left, num_devices)
    for name, size in degrees.items():
        if num_devices % size:
            whose = "the" if left else "the cluster's"
            given = OptionValue(name, size)
            way_out = f"; give one of {_divisors(num_devices)}" if num_devices > 1 else ""
            raise ConstraintError("{} does not divide {} {} devices{}{}", given, whose, num_devices, left, way_out)
    dp = c.dp if c.dp is not None else num_devices // math.prod(degrees.values())
    if c.ep is not None and dp % c.ep:
        raise ConstraintError(
            "{} does not divide the {} data-parallel ranks, which share the experts", OptionValue("ep", c.ep), dp
        )
    return c


def _divisors(count: int) -> str:
    return ", ".join(str(each) for each in range(1, count + 1) if count % each == 0)


def _given(degrees: dict[str, int]) -> tuple[OptionValue, ...]:
    return tuple(OptionValue(*each) for each in degrees.items())


def _check_axes(c: Constraints, num_devices: int) -> None:
    """What is said of an axis, that axis is pinned for."""
    if c.sp and (c.tp is None or c.tp < 2):
        raise ConstraintError(
            "{} needs a tensor-parallel axis to share: give {} of at least 2 as well",
            OptionValue("sp", True),
            OptionName("tp"),
        )
    if c.cp_mode is not None and c.cp is None:
        given = OptionValue("cp_mode", c.cp_mode)
        raise ConstraintError("{} without a context-parallel axis: give {} as well", given, OptionName("cp"))
    others = {name: size for name, size in (("tp", c.tp), ("cp", c.cp)) if size is not None}
    if c.zero and c.dp is None and num_devices > 1 and math.prod(others.values()) == num_devices:
        raise ConstraintError(
            "{} shards over a data-parallel axis, and {} leaves none of {} devices; leave {} out, or shard less",
            *(OptionValue("zero", c.zero), _given(others), num_devices, OptionName("zero")),
        )


def _check_mesh(c: Constraints, degrees: dict[str, int], num_devices: int, left: Phrase | str) -> None:
    """A mesh has a place for every device of a stage, and no degrees beside it."""
    mesh = c.mesh or ()
    if degrees or c.ep is not None:
        degrees = degrees if c.ep is None else degrees | {"ep": c.ep}
        raise ConstraintError(
            "{} together with {}: give the mesh or the degrees, not both",
            OptionValue("mesh", mesh),
            _given(degrees),
        )
    product = math.prod(mesh)
    if product != num_devices:
        raise ConstraintError(
            "{} has {} places for {} devices{}; give sizes that multiply to {}",
            *(OptionValue("mesh", mesh), product, num_devices, left, num_devices),
        )


def _check_free_pp(c: Constraints, num_devices: int) -> None:
    """Whether the constraints make sense together with any degree of a pipeline; where not, why not with the first."""
    if c.stages is not None:
        raise ConstraintError(
            "{} without {}: on how many groups of devices they lie is left open; give {} of at least 2 as well",
            *(OptionValue("stages", c.stages), OptionName("pp"), OptionName("pp")),
        )
    refused: ConstraintError | None = None
    for pp in range(1 if c.schedule is None else 2, num_devices + 1):
        if num_devices % pp == 0:
            try:
                check_constraints(msgspec.structs.replace(c, pp=pp), num_devices)
                return
            except ConstraintError as fault:
                refused = refused or fault
    given = OptionValue("schedule", c.schedule)
    raise refused or ConstraintError("{} is of a pipeline, which one device has no room for", given)


def check_param_names(constraints: Constraints, names: Iterable[str]) -> None:
    """What is pinned by name is there.

    Args:
        constraints: whose `params`.
        names: of the model's parameters.
    Raises:
        ConstraintError: there is no parameter of a name.
    """
    known = list(names)
    for name in constraints.params:
        if name not in known:
            near = difflib.get_close_matches(name, known, 3) or known[:5]
            raise ConstraintError(
                f"params pins {name!r}, which the model does not have; its parameters have names such as "
                f"{', '.join(near)}"
            )


def check_microbatches(constraints: Constraints, program: Program) -> None:
    """Refuse a number of microbatches that the batch does not divide into.

    Raises:
        ConstraintError: so it is.
    """
    count, size = constraints.microbatches, program.batch_size
    if count is None or program.apart > 1 or size % count == 0:
        return
    divisors = [each for each in range(1, size + 1) if size % each == 0]
    near = [*[each for each in divisors if each < count][-1:], *[each for each in divisors if each > count][:1]]
    raise ConstraintError(
        "{} does not divide a batch of {}; give {}",
        *(OptionValue("microbatches", count), size, " or ".join(map(str, near))),
    )


def check_reduce_dtype(constraints: Constraints, precision: str) -> None:
    """Refuse a dtype of sums over ranks beside a precision that knows one alone.

    Raises:
        ConstraintError: so it is.
    """
    given = constraints.reduce_dtype
    if given and precision not in HALVES:
        raise ConstraintError(
            "{} says how gradients of half precisions are summed over ranks, and {} sums them as they are; leave it "
            "out, or plan with {}",
            *(
                OptionValue("reduce_dtype", given),
                OptionValue("precision", precision),
                OptionValue("precision", "bf16"),
            ),
        )


def _check_states(c: Constraints) -> None:
    """Where states are said to be agrees with what else is said of them."""
    by_word = c.offload_states or not any(c.placing)
    said = OptionValue("offload_states", c.offload_states or "none") if by_word else c.placing.given
    c.placing.check(c.tiers)
    if c.delayed_update is not None and not any(place.can_be_late for place in c.every_place):
        raise ConstraintError(
            "{}: only what the host updates where its states stay can be late, and with {} there is nothing; give {} "
            "and {}, or {}",
            *(OptionValue("delayed_update", c.delayed_update), said),
            *(OptionValue("place_states", HOST), OptionValue("update_on", HOST), OptionValue("offload", NEAREST)),
        )
    if c.zero in (1, 2) and all(place.params for place in c.places):
        raise ConstraintError(
            "{} with {}: parameters off the device lie as their states do; give {} or 0",
            *(said, OptionValue("zero", c.zero), OptionValue("zero", 3)),
        )


def _stage_devices(c: Constraints, num_devices: int) -> int:
    """How many devices share a stage, among which the other degrees are."""
    if c.pp is not None and c.pp > 1:
        if num_devices % c.pp:
            raise ConstraintError(
                "{} does not divide the cluster's {} devices; give one of {}",
                *(OptionValue("pp", c.pp), num_devices, _divisors(num_devices)),
            )
        return num_devices // c.pp
    if c.schedule is not None or c.stages is not None:
        pinned = OptionValue("schedule", c.schedule) if c.schedule is not None else OptionValue("stages", c.stages)
        raise ConstraintError("{} without a pipeline: give {} of at least 2 as well", pinned, OptionName("pp"))
    return num_devices
