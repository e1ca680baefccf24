"""A step against the user's eager model: how it is compared, and what it may be off by.

| precision | eager runs in | a step may be off by |
|---|---|---|
| fp64 | float64 | 1e-9; where forward makes narrower floats, 1e-5, or 1e-9 from the model with those widened |
| fp32 | float32 and, every float widened, float64 | from float64: `ROUNDING` times what eager float32 is, and a base |
| halves, fp8 | the half and, of equally rounded parameters, float32 | from float32: likewise, a base per precision |

The second row is what makes a bound of noise: a gradient that cancels is as noisy in eager, so what it may be off by is
told tensor by tensor; a wrong one is off by its own size. A rounding that moves an element over a threshold (ReLU) is
not in every run: where a half's step is beyond the limit, eager under torch.autocast tells how large rounding is, too.
Random numbers are the program's (`replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from paraplan.ir.model.program import Program
from paraplan.jobs.checking.captured import StepOutcome
from paraplan.jobs.checking.differences import FLOOR, Difference, differences, floor_of, relative
from paraplan.jobs.checking.eager import Eager, ModelCall, Taken
from paraplan.jobs.checking.random_replay import SHARED_SEED, Replay, draws_of, shared_draws

Tensors = Mapping[str, Tensor]
ROUNDING = 8.0
"""A step's rounding errors against those of the eager model: both sum in orders of their own."""

CAPTURED = "the captured program on one device"
ISLANDS = 1e-5
"""What a float64 step may be off by from a model that computes partly in float32."""

UNBOUNDED = 1e-3
"""What a float32 step may be off by where the model does not run in float64."""

BASE = {"fp64": (1e-9, 1e-9), "fp32": (1e-5, 1e-4), "bf16": (2e-2, 5e-2), "fp16": (3e-3, 1e-2), "fp8": (5e-2, 3e-1)}
"""Per precision, what the loss and tensors may be off by whatever eager rounding is."""

_OWN = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
_NAMED = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Fault(NamedTuple):
    """A difference, what it is of ("gradient of"), and its limit."""

    what: str
    difference: Difference
    limit: float

    @property
    def ratio(self) -> float:
        """Above 1 where it is beyond its limit."""
        return self.difference.error / self.limit


@dataclass
class Verdict:
    """What a comparison gave.

    Attributes:
        worst: the difference nearest to or furthest beyond its limit; None where there is none at all.
        error: the largest error of the loss or any tensor.
        how: in words.
        against: which eager run it was held against.
        cannot: why there is no comparison at all; empty where there is one.
    """

    worst: Fault | None = None
    error: float = 0.0
    how: str = ""
    against: str = "the eager model"
    cannot: str = ""

    @property
    def holds(self) -> bool:
        """Whether everything is within its limit."""
        return not self.cannot and (self.worst is None or self.worst.ratio <= 1)


class _Way(Enum):
    """How the eager model computes: in its own precision, every float widened, or under autocast to its half."""

    OWN = "own"
    WIDE = "wide"
    CAST = "cast"


@dataclass
class _Runs:
    """The eager model's steps from one start; None where it fails there.

    Attributes:
        own: the step in its own precision.
        take: takes one in another way.
        unmatched: why random draws could not be matched.
        faults: how it failed.
    """

    own: Taken | None
    take: Callable[[_Way, _Runs], Taken | None]
    unmatched: str = ""
    faults: dict[_Way, str] = field(default_factory=dict)


class AgainstEager:
    """Steps against the eager model.

    Args:
        call: how the user calls the model.
        program: what was captured of it.
        summed_in: the precision in which gradients are summed over ranks, where that is the plan's to say.
    """

    def __init__(self, call: ModelCall, program: Program, summed_in: str = "") -> None:
        self.call, self.program = call, program
        self.precision = program.precision if call.casts is None else _NAMED[call.casts]
        loss, tensors = BASE[self.precision]
        self._base = loss, max(tensors, BASE[summed_in][1] if summed_in else 0.0)
        self.own = Eager(call, program, _OWN[program.precision])
        self._eagers = {_Way.OWN: self.own}
        self._floor, self._by_size = floor_of(self.precision), False
        self.num_draws = len(draws_of(program))
        self.noise: dict[str, float] = {}
        self.last: Taken | None = None

    def compare(
        self,
        batch: Tensors,
        params: Tensors,
        buffers: Tensors,
        seeds: Sequence[int],
        found: StepOutcome,
        captured: Callable[[Program, Sequence[int]], StepOutcome],
    ) -> Verdict:
        """A step against the eager model's from the same start.

        Args:
            batch, params, buffers: what the step started from.
            seeds: of the program's segments.
            found: what it gave.
            captured: the captured program's step from the same start, of another program and other seeds.
        """
        runs = self._take(batch, params, buffers, seeds)
        if runs.unmatched and not self._by_size:
            self._by_size = True
            again = self._take(batch, params, buffers, seeds)
            self._by_size = not again.unmatched
            runs = again if self._by_size else runs
        self.last = runs.own
        drawn = f"{self.num_draws} random draws replayed by position" if self.num_draws else ""
        verdict = self._judge(found, runs, drawn)
        if self.num_draws and (runs.unmatched or not verdict.holds):
            shared = shared_draws(self.program)
            same = [SHARED_SEED] * self.program.num_seeds
            again = self._take(batch, params, buffers, None)
            why = runs.unmatched or "replayed by position they differ"
            words = f"the captured program on one device, all random draws of a shape alike ({why})"
            other = self._judge(captured(shared, same), again, words)
            other.against += ", all random draws of a shape alike,"
            own = _compared(found, captured(self.program, seeds), self._least(), self.noise, self._floor)
            own.against = CAPTURED
            if not own.holds:  # what the captured program does says nothing of the step
                return own
            if runs.unmatched or other.holds:
                return other
        return verdict

    def _least(self) -> tuple[float, float]:
        loss, tensors = self._base
        return (loss, tensors) if self.precision == "fp64" else (max(loss, UNBOUNDED), max(tensors, UNBOUNDED))

    def rereads(self, batch: Tensors, params: Tensors, buffers: Tensors, seeds: Sequence[int]) -> str:
        """What forward changed of its modules' attributes and reads again, so that its next step differs; or "".

        Args:
            batch, params, buffers: of the step that was compared, as it began.
            seeds: of its random ops.
        """
        if self.last is None or not self.last.changed:
            return ""
        numbers = [Replay(self.program, seeds, self._by_size) if self.num_draws else None for _ in range(2)]
        try:
            again = self.own.loss_again(batch, params, buffers, numbers[0])
        except Exception:  # noqa: BLE001  (whatever it is, the step itself was compared)
            return ""
        if relative(again, self.last.loss) <= BASE[self.precision][0]:
            return ""
        name, (before, after) = next(iter(self.last.changed.items()))
        return (
            f"forward changes attribute {name!r} from {_short(before)} to {_short(after)} and depends on it: a second "
            f"forward of the same batch gives the loss {again:.9g}, not {self.last.loss:.9g}; a captured step has the "
            "attribute as it was; make it a buffer (register_buffer)"
        )

    def _take(self, batch: Tensors, params: Tensors, buffers: Tensors, seeds: Sequence[int] | None) -> _Runs:
        def one(way: _Way, runs: _Runs) -> Taken | None:
            numbers = Replay(self.program, seeds, self._by_size) if self.num_draws else None
            try:
                taken = self._eager(way).step(batch, params, buffers, numbers)
            except Exception as fault:  # noqa: BLE001  (the model's own code, in a precision it may not be made for)
                runs.faults[way] = f"{type(fault).__name__}: {(str(fault).splitlines() or [''])[0]}"
                return None
            runs.unmatched = runs.unmatched or (numbers.unmatched if numbers is not None else "")
            return taken

        runs = _Runs(None, one)
        runs.own = one(_Way.OWN, runs)
        return runs

    def _eager(self, way: _Way) -> Eager:
        if way not in self._eagers:
            wide, own = torch.float32 if self._is_half else torch.float64, _OWN[self.precision]
            told = {"widened": True} if way is _Way.WIDE else {"casts": own}
            self._eagers[way] = Eager(self.call, self.program, wide, **told)
        return self._eagers[way]

    @property
    def _is_half(self) -> bool:
        return self.program.precision not in ("fp64", "fp32")

    def _judge(self, found: StepOutcome, runs: _Runs, drawn: str) -> Verdict:
        if self.precision == "fp64":
            return self._exactly(found, runs, drawn)
        own, wide = runs.own, runs.take(_Way.WIDE, runs)
        if own is None and wide is None:
            return Verdict(cannot=f"the eager model fails: {runs.faults[_Way.OWN]}")
        loss, tensors = self._base
        mine, theirs = self.precision, "float32" if self._is_half else "float64"
        if wide is None:
            assert own is not None
            verdict = _compared(found, own, self._least(), floor=self._floor)
            verdict.how = _words(drawn, f"in {mine} alone: it fails in {theirs} ({runs.faults[_Way.WIDE]})")
            return verdict
        noise = self.noise = {} if own is None else _noise(own, wide, self._floor)
        verdict = _compared(found, wide, (loss, tensors), noise, self._floor, kinds=own)
        if self._is_half and not verdict.holds and (cast := runs.take(_Way.CAST, runs)) is not None:
            under = _noise(cast, wide, self._floor)
            noise = self.noise = {name: max(noise.get(name, 0.0), under.get(name, 0.0)) for name in noise | under}
            verdict = _compared(found, wide, (loss, tensors), noise, self._floor, kinds=own)
            mine += " and autocast"
        verdict.against = f"the eager model in {theirs}"
        said = f"within {ROUNDING:g} times the rounding of eager {mine} ({max(noise.values(), default=0.0):.0e})"
        missing = f"eager {mine} itself fails ({runs.faults.get(_Way.OWN)}): within {tensors:.0e} of {theirs}"
        verdict.how = _words(drawn, said if own is not None else missing)
        return verdict

    def _exactly(self, found: StepOutcome, runs: _Runs, drawn: str) -> Verdict:
        """In float64: the model as it is, or with every float of its forward float64, as the program has them."""
        own = None if runs.own is None else _compared(found, runs.own, BASE["fp64"])
        if own is not None and own.holds:
            own.how = _words(drawn, "in float64")
            return own
        wide = runs.take(_Way.WIDE, runs)
        if wide is None:
            return own or Verdict(cannot=f"the eager model fails: {runs.faults[_Way.OWN]}")
        widened = _compared(found, wide, BASE["fp64"])
        widened.against = "the eager model, every float of it float64"
        widened.how = _words(drawn, "in float64, narrower floats of its forward widened")
        if runs.own is None:
            return widened
        islands = _compared(found, runs.own, (ISLANDS, ISLANDS))
        islands.how = _words(drawn, f"its forward computes partly in narrower floats: within {ISLANDS:.0e}")
        alike = max(_noise(runs.own, wide, FLOOR).values()) <= BASE["fp64"][1]
        return islands if islands.holds and not alike else widened


def _words(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _short(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.item():.9g}" if value.numel() == 1 else f"a tensor of {tuple(value.shape)}"
    return repr(value)[:60]


def _noise(own: Taken, wide: Taken, floor: float) -> dict[str, float]:
    """By "loss", "gradient of w" and "buffer m": the rounding of eager's own precision."""
    found = {"loss": relative(own.loss, wide.loss)}
    for what, ours, theirs in (("gradient of", own.grads, wide.grads), ("buffer", own.buffers, wide.buffers)):
        found |= {f"{what} {name}": each.error for name, each in differences(ours, theirs, floor).items()}
    return {name: error for name, error in found.items() if error != float("inf")}


def _compared(
    found: StepOutcome,
    wanted: Taken | StepOutcome,
    base: tuple[float, float],
    noise: Mapping[str, float] | None = None,
    floor: float = FLOOR,
    kinds: Taken | None = None,
) -> Verdict:
    """Everything a step gave against what it should have.

    Args:
        base: of the loss and of tensors.
        noise: see `_noise`.
        kinds: whose buffers have the dtypes that are right; `wanted` where left out.
    """
    noise = noise or {}
    off = Difference("", relative(found.loss, wanted.loss), f"{found.loss:.9g}", f"{wanted.loss:.9g}")
    faults = [Fault("loss", off, base[0] + ROUNDING * noise.get("loss", 0.0))]
    parts = []
    if found.grads is not None and wanted.grads is not None:
        parts.append(("gradient of", differences(found.grads, wanted.grads, floor)))
    if found.buffers is not None and wanted.buffers is not None:
        parts.append(("buffer", differences(found.buffers, wanted.buffers, floor)))
        parts.append(("buffer", _kinds(found.buffers, (kinds or wanted).buffers or {})))
    for what, each in parts:
        limits = {name: base[1] + ROUNDING * noise.get(f"{what} {name}", 0.0) for name in each}
        faults += [Fault(what, difference, limits[name]) for name, difference in each.items()]
    worst = max(faults, key=lambda fault: fault.ratio)
    return Verdict(worst if worst.ratio else None, max(fault.difference.error for fault in faults))


def _kinds(found: Tensors, wanted: Tensors) -> dict[str, Difference]:
    """Buffers of another dtype."""
    return {
        name: Difference(name, float("inf"), str(found[name].dtype), str(x.dtype))
        for name, x in wanted.items()
        if name in found and found[name].dtype != x.dtype
    }
