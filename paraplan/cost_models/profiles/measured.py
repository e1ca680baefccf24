"""Times from a profile: what was measured, and between measurements a monotone curve of the analytic model's time.

An op that was measured takes its median. One that was not is put on the curve of its target and dtype: the analytic
time of every measured op against its measured time (`curves`), so that shapes enter through the model and rates through
the measurements; of its class and dtype where its target has fewer than three points. Where neither exists there is no
time, and the analytic model alone speaks.

A planner knows shapes only and gets the least of the times measured under them, a lowered instruction its own: no bound
is above what is simulated.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import msgspec

from paraplan.cost_models.ops.roofline import OpWork, op_time_s, rate_of, work_of
from paraplan.cost_models.profiles.curves import Curve, fit_curve
from paraplan.ir.errors import CostModelError
from paraplan.ir.machine.device import Device
from paraplan.ir.machine.kernel_choice import has_choice
from paraplan.ir.process.memo import SESSION, Lately, Same
from paraplan.ir.profile import VIEW, CollectiveTime, OpTime, Profile

MEASURED, INTERPOLATED, MODELLED = "measured", "interpolated", "modelled"
LEAST_POINTS = 3
FOLDS = 5

Family = str


@dataclass(frozen=True)
class InterpolationErrors:
    """How far interpolation is off, by cross-validation.

    Attributes:
        points: measurements that were foretold from the others.
        median, ninth_decile: of |foretold / measured - 1|.
    """

    points: int
    median: float
    ninth_decile: float


@dataclass(frozen=True)
class MeasuredTimes:
    """A profile, ready to be asked about a device."""

    profile: Profile
    device: Device

    @cached_property
    def by_full_key(self) -> dict[str, OpTime]:
        """Every op."""
        return {op.full_key: op for op in self.profile.ops}

    @cached_property
    def by_shape_key(self) -> dict[str, OpTime]:
        """The quickest of each shape key."""
        found: dict[str, OpTime] = {}
        for op in self.profile.ops:
            if op.shape_key not in found or op.seconds < found[op.shape_key].seconds:
                found[op.shape_key] = op
        return found

    @cached_property
    def curves(self) -> dict[Family, Curve]:
        """By "target dtype" and "class dtype"."""
        return _fit(self._points)

    @cached_property
    def _points(self) -> tuple[tuple[str, str, str, float, float], ...]:
        """(shape key, target, class, analytic seconds, measured seconds), with the dtype in target and class.

        Of several kernels that an op may run as the quickest counts, which plans take.
        """
        found = []
        for op in self.profile.ops:
            if has_choice(op.target) and op is not self.by_shape_key[op.shape_key]:
                continue
            work = _work(op)
            if work is not None and op.samples and self.has_rate(work):
                expected = op_time_s(work, self.device)
                found.append(
                    (op.shape_key, f"{op.target} {work.dtype}", f"{work.kind} {work.dtype}", expected, op.seconds)
                )
        return tuple(found)

    def has_rate(self, work: OpWork) -> bool:
        """Whether the analytic model can price some work here."""
        if not work.flops:
            return True
        try:
            return rate_of(self.device, work.dtype) > 0
        except CostModelError:
            return False

    def op(self, shape: str, full: str | None, work: OpWork, target: str) -> tuple[float, str] | None:
        """Seconds of an op, and whether they were measured or interpolated.

        Args:
            shape, full: its keys (`ir.profile`); no full one before it is lowered.
            work: what it does.
            target: what it is called.
        """
        exact = self.by_full_key.get(full) if full is not None else None
        found = exact or self.by_shape_key.get(shape)
        if found is not None:
            return found.seconds, MEASURED if found.samples else INTERPOLATED
        if not self.has_rate(work):
            return None
        expected = op_time_s(work, self.device)
        for name in (f"{target} {work.dtype}", f"{work.kind} {work.dtype}"):
            if name in self.curves:
                return self.curves[name].at(expected), INTERPOLATED
        return None

    @cached_property
    def view_s(self) -> float:
        """Host time of an op that only reinterprets; 0.0 where none was measured."""
        return median([op.seconds for op in self.profile.ops if op.target == VIEW] or [0.0])

    @cached_property
    def updates(self) -> dict[str, Curve]:
        """Per optimizer, seconds over the bytes of one parameter."""
        points: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for op in self.profile.ops:
            if op.updated_by and op.inputs:
                points[op.updated_by].append((sum(x.nbytes for x in op.inputs), op.seconds))
        fitted = {name: fit_curve(found) for name, found in points.items()}
        return {name: curve for name, curve in fitted.items() if curve is not None and curve.sizes[-1] > 0}

    @cached_property
    def collectives(self) -> dict[tuple[str, int, int], Curve]:
        """Per collective, ranks and ranks within a node, seconds over bytes put in."""
        return _curves(self.profile.collectives, lambda each: each.seconds)

    @cached_property
    def calls(self) -> dict[tuple[str, int, int], Curve]:
        """Likewise, seconds of the calling thread's own work."""
        return _curves(self.profile.collectives, lambda each: each.called_s)

    def cross_validate(self) -> dict[str, InterpolationErrors]:
        """Per class, and over "all", how far curves are off shapes they were not fitted to.

        Shapes are dealt into folds in their order; each fold is foretold from the others.
        """
        shapes = sorted({point[0] for point in self._points})
        fold = {shape: index % FOLDS for index, shape in enumerate(shapes)}
        errors: dict[str, list[float]] = defaultdict(list)
        for number in range(FOLDS):
            curves = _fit(point for point in self._points if fold[point[0]] != number)
            for shape, target, kind, expected, seconds in self._points:
                curve = curves.get(target) or curves.get(kind)
                if fold[shape] == number and curve is not None and seconds > 0:
                    error = abs(curve.at(expected) / seconds - 1)
                    errors[kind].append(error)
                    errors["all"].append(error)
        return {
            kind: InterpolationErrors(len(found), median(found), sorted(found)[math.ceil(0.9 * len(found)) - 1])
            for kind, found in sorted(errors.items())
        }


def _curves(
    times: Iterable[CollectiveTime], seconds: Callable[[CollectiveTime], float]
) -> dict[tuple[str, int, int], Curve]:
    points: dict[tuple[str, int, int], list[tuple[float, float]]] = defaultdict(list)
    for each in times:
        points[each.target, each.size, each.local_size].append((each.input_bytes, seconds(each)))
    fitted = {key: fit_curve(found) for key, found in points.items()}
    return {key: curve for key, curve in fitted.items() if curve is not None and curve.sizes[-1] > 0}


def _fit(points: Iterable[tuple[str, str, str, float, float]]) -> dict[Family, Curve]:
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _, target, kind, expected, seconds in points:
        pairs[target].append((expected, seconds))
        pairs[kind].append((expected, seconds))
    fitted = {name: fit_curve(found, powers=True) for name, found in pairs.items()}
    return {name: curve for name, curve in fitted.items() if curve is not None and len(curve.sizes) >= LEAST_POINTS}


def _work(op: OpTime) -> OpWork | None:
    """What a measured op does; None for what the analytic model has no price of (views, updates)."""
    if op.target == VIEW or op.updated_by:
        return None
    try:
        work = work_of(op.target, op.flag, op.inputs, op.outputs)
    except (IndexError, ValueError, CostModelError):  # a file may name an op with tensors it cannot take
        return None
    return None if work.kind == "view" else work


_KEPT: Lately[MeasuredTimes] = SESSION.lately("measured.kept", 4)


def times_of(profile: Profile, device: Device) -> MeasuredTimes:
    """A profile ready to be asked; made once for the last few."""
    return _KEPT.get((Same(profile), msgspec.json.encode(device)), lambda: MeasuredTimes(profile, device))
