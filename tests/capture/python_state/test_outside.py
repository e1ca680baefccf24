"""What forward keeps outside of its model: caches of constants are computed in the step, what carries from step to step
is refused, and after a capture everything is what it was."""

from __future__ import annotations

import array
import functools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from paraplan.capture.capture import capture, capture_with_reads
from paraplan.capture.python_state.returned import returned_by
from paraplan.ir.errors import CaptureError
from paraplan.runtime.state.captured_settings import Settings
from tests.capture.looped import held_against_eager

WIDTH = 4
GRIDS: dict[Any, Any] = {}
NESTED: dict[str, dict[int, Tensor]] = {}
GRID: Tensor | None = None
CALLS = 0
LOCAL = threading.local()


def _grid(width: int) -> Tensor:
    return torch.linspace(-1, 1, width, dtype=torch.float64)


def _helper() -> None:
    """Carries attributes."""


@functools.lru_cache
def _cached(width: int) -> Tensor:
    return _grid(width)


class Holder:
    """An object with a counter of its class."""

    calls = 0

    @classmethod
    def count(cls) -> int:
        """One more."""
        cls.calls += 1
        return cls.calls

    def count_kind(self) -> int:
        """One more, of its class."""
        type(self).calls += 1
        return type(self).calls


class Net(nn.Module):
    """A linear layer, scaled by what a function reads and writes."""

    grids: dict[Any, Tensor] = {}
    grid: Tensor | None = None
    calls = 0

    def __init__(self, read: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.read, self.holder = nn.Linear(WIDTH, WIDTH).double(), read, Holder()
        self.count, self.bytes = 0, array.array("d", [0.0])
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        return (self.layer(x) * self.read(self, x)).square().mean()


def _in_a_global_dict(m: Any, x: Tensor) -> Tensor:
    key = str(x.shape)
    if key not in GRIDS:
        GRIDS[key] = _grid(x.shape[1])
    return GRIDS[key]  # type: ignore[no-any-return]


def _in_a_nested_dict(m: Any, x: Tensor) -> Tensor:
    return NESTED.setdefault("cpu", {}).setdefault(x.shape[1], _grid(x.shape[1]))


def _in_a_global(m: Any, x: Tensor) -> Tensor:
    global GRID
    if GRID is None:
        GRID = _grid(x.shape[1])
    return GRID


def _in_a_new_global(m: Any, x: Tensor) -> Tensor:
    global NEW
    if "NEW" not in globals():
        NEW = _grid(x.shape[1])  # type: ignore[name-defined]
    return NEW  # type: ignore[name-defined,no-any-return]


def _in_a_class_dict(m: Any, x: Tensor) -> Tensor:
    if WIDTH not in m.grids:
        m.grids[WIDTH] = _grid(WIDTH)
    return m.grids[WIDTH]  # type: ignore[no-any-return]


def _in_a_dict_of_its_class(m: Any, x: Tensor) -> Tensor:
    return type(m).grids.setdefault(WIDTH, _grid(WIDTH))  # type: ignore[no-any-return]


def _in_a_class(m: Any, x: Tensor) -> Tensor:
    if Net.grid is None:
        Net.grid = _grid(WIDTH)
    return Net.grid


def _in_its_class(m: Any, x: Tensor) -> Tensor:
    if m.grid is None:
        type(m).grid = _grid(WIDTH)
    return m.grid  # type: ignore[no-any-return]


def _in_a_function(m: Any, x: Tensor) -> Tensor:
    if not hasattr(_helper, "grid"):
        _helper.grid = _grid(WIDTH)  # type: ignore[attr-defined]
    return _helper.grid  # type: ignore[attr-defined,no-any-return]


def _in_a_closure() -> Callable[[Any, Tensor], Tensor]:
    grids: dict[int, Tensor] = {}
    return lambda m, x: grids.setdefault(WIDTH, _grid(WIDTH))


def _in_a_default(m: Any, x: Tensor, grids: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
    return grids.setdefault(WIDTH, _grid(WIDTH))


CACHES = (
    *(_in_a_global_dict, _in_a_nested_dict, _in_a_global, _in_a_new_global, _in_a_class_dict),
    *(_in_a_dict_of_its_class, _in_a_class, _in_its_class, _in_a_function, _in_a_default),
    lambda m, x: _cached(WIDTH),
)


def _state() -> tuple[object, ...]:
    """What the functions here write, as it is now."""
    kept = {name: value for name, value in globals().items() if name.isupper() and name != "CACHES"}
    numbers = Net.calls, Holder.calls, vars(_helper).copy(), vars(LOCAL).copy(), dict(Net.grids), Net.grid
    return kept, dict(GRIDS), {key: dict(item) for key, item in NESTED.items()}, _in_a_default.__defaults__, numbers


@pytest.fixture(autouse=True)
def _as_at_first() -> Any:
    yield
    GRIDS.clear()
    NESTED.clear()
    Net.grids.clear()
    _cached.cache_clear()
    for held in (vars(_helper), vars(LOCAL), (_in_a_default.__defaults__ or ({},))[0]):
        held.clear()
    globals().update(GRID=None, CALLS=0)
    globals().pop("NEW", None)
    Net.grid, Net.calls, Holder.calls = None, 0, 0


def _batch() -> dict[str, Tensor]:
    return {"x": torch.linspace(-2, 2, 3 * WIDTH, dtype=torch.float64).sin().view(3, WIDTH)}


@pytest.mark.parametrize("read", [*CACHES, _in_a_closure()])
def test_a_cache_of_constants_is_computed_in_the_step_and_left_empty(read: Callable[[Any, Tensor], Any]) -> None:
    model, batch, before = Net(read), _batch(), _state()
    program, reads = capture_with_reads(model, batch, precision="fp64")
    assert _state() == before
    settings = Settings(model, program, reads)
    held_against_eager(model, batch)
    settings.check()
    model.zero_grad()
    held_against_eager(model, batch)


def test_a_cache_takes_another_shape() -> None:
    model = Net(_in_a_global_dict)
    GRIDS["other"] = other = _grid(7)
    held_against_eager(model, _batch())
    assert GRIDS.pop("other") is other and len(GRIDS) == 1


def _in_place(m: Any, x: Tensor) -> Tensor:
    grid = GRIDS.setdefault(WIDTH, _grid(WIDTH))
    grid[:2] *= 0.5
    return grid  # type: ignore[no-any-return]


@pytest.mark.parametrize("read", [_in_place, lambda m, x: _cached(WIDTH).mul_(0.5)])
def test_a_cached_tensor_that_forward_writes_is_refused(read: Callable[[Any, Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=r"test_outside.py:\d+.*in place that a cache keeps .*register_buffer"):
        capture(Net(read), _batch())
    assert not GRIDS


def _count_global(m: Any, x: Tensor) -> int:
    global CALLS
    CALLS += 1
    return CALLS


def _count_kind(m: Any, x: Tensor) -> int:
    type(m).calls += 1
    return type(m).calls  # type: ignore[no-any-return]


def _count_class(m: Any, x: Tensor) -> int:
    m.__class__.calls += 1
    return m.__class__.calls  # type: ignore[no-any-return]


def _count_function(m: Any, x: Tensor) -> int:
    _helper.calls = getattr(_helper, "calls", 0) + 1  # type: ignore[attr-defined]
    return _helper.calls  # type: ignore[attr-defined,no-any-return]


def _count_thread(m: Any, x: Tensor) -> int:
    LOCAL.calls = getattr(LOCAL, "calls", 0) + 1
    return LOCAL.calls  # type: ignore[no-any-return]


def _count_items(m: Any, x: Tensor) -> int:
    GRIDS["calls"] = GRIDS.get("calls", 0) + 1
    return GRIDS["calls"]  # type: ignore[no-any-return]


def _count_past_setattr(m: Any, x: Tensor) -> int:
    object.__setattr__(m, "count", object.__getattribute__(m, "count") + 1)
    return m.__dict__["count"]  # type: ignore[no-any-return]


def _count_anew(m: Any, x: Tensor) -> int:
    m.__dict__["new"] = m.__dict__.get("new", 0) + 1
    return m.new  # type: ignore[no-any-return]


def _count_array(m: Any, x: Tensor) -> float:
    m.bytes[0] += 1
    return m.bytes[0]  # type: ignore[no-any-return]


def _toggle(m: Any, x: Tensor) -> float:
    m.training = not m.training
    return 1.0 if m.training else 2.0


def _first_batch(m: Any, x: Tensor) -> Tensor:
    return GRIDS.setdefault("mean", x.mean(0))  # type: ignore[no-any-return]


CARRIED: dict[Callable[[Any, Tensor], Any], str] = {
    _count_global: "global CALLS",
    _count_kind: r"calls of class Net \(0 to 1\)",
    _count_class: r"calls of class Net \(0 to 1\)",
    lambda m, x: Holder.count(): r"calls of class Holder \(0 to 1\)",
    lambda m, x: m.holder.count_kind(): r"calls of class Holder \(0 to 1\)",
    _count_function: r"calls of function _helper \(absent to 1\)",
    _count_thread: r"calls of _local \(absent to 1\)",
    _count_items: "global GRIDS",
    _count_past_setattr: r"count of Net \(0 to 1\)",
    _count_anew: r"new of Net \(absent to 1\)",
    _count_array: "bytes of Net",
    _toggle: r"training of Net \(True to False\).*put it back before forward ends",
    _first_batch: "global GRIDS .*run forward once on such a batch before",
}


@pytest.mark.parametrize(("read", "words"), CARRIED.items())
def test_what_goes_from_step_to_step_is_refused_and_undone(read: Callable[[Any, Tensor], Any], words: str) -> None:
    model, before = Net(read), _state()
    with pytest.raises(CaptureError, match=f"forward changes {words}"):
        capture(model, _batch())
    assert _state() == before and model.training and not model.count


class Ema:
    """A loss function that remembers a mean."""

    def __init__(self) -> None:
        self.mean = torch.ones((), dtype=torch.float64)

    def __call__(self, out: Tensor, batch: Any) -> Tensor:
        """Scaled by what it remembers."""
        GRIDS["out"] = out
        self.mean = self.mean * 0.5 + out.detach()
        return out * self.mean


class Stops(Ema):
    """Fails in the middle of a trace."""

    def __call__(self, out: Tensor, batch: Any) -> Tensor:
        """Needs a number."""
        return super().__call__(out, batch) * out.item()


@pytest.mark.parametrize("loss_fn", [Ema(), Stops()])
def test_a_loss_function_is_left_as_it_was_where_it_is_refused(loss_fn: Ema) -> None:
    model, mean = Net(lambda m, x: 1.0), loss_fn.mean
    with pytest.raises(CaptureError, match=r"forward changes|depends on tensor data"):
        capture(model, _batch(), loss_fn=loss_fn)
    assert loss_fn.mean is mean and not GRIDS


def _eval_of_a_part(m: Any, x: Tensor) -> Tensor:
    return m.dropout.eval()(_grid(WIDTH))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("read", "where"), [(_eval_of_a_part, "training of Dropout"), (_count_kind, "calls of class")])
def test_what_every_step_sets_alike_or_none_computes_with_passes(
    read: Callable[[Any, Tensor], Any], where: str
) -> None:
    model = Net(lambda m, x: read(m, x) if read is _eval_of_a_part else (read(m, x), 1.0)[1])
    with pytest.warns(UserWarning, match=f"forward changes {where}"):
        held_against_eager(model, _batch())


def test_a_run_for_what_is_returned_leaves_no_fake_tensors() -> None:
    before = _state()
    returned_by(Net(_in_a_global_dict), _batch(), "fp32")
    assert _state() == before


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_generators_are_left_as_they_were(draw: Callable[[], float]) -> None:
    model, before = Net(lambda m, x: draw()), (random.getstate(), str(numpy.random.get_state()))
    with pytest.raises(CaptureError, match="forward draws from"):
        capture(model, _batch())
    returned_by(model, _batch(), "fp32")
    assert (random.getstate(), str(numpy.random.get_state())) == before


def _through_the_tensor(m: Any, x: Tensor) -> float:
    values = numpy.ones(WIDTH)
    torch.from_numpy(values).mul_(2)
    return float(values.sum())


def _of_its_own(m: Any, x: Tensor) -> Tensor:
    shared = torch.as_tensor(m.values)
    shared += 1
    return shared


@pytest.mark.parametrize("read", [_through_the_tensor, _of_its_own])
def test_an_array_written_through_its_tensor_is_refused(read: Callable[[Any, Tensor], Any]) -> None:
    model = Net(read)
    model.values = numpy.ones(WIDTH)  # type: ignore[assignment]
    with pytest.raises(CaptureError, match=r"test_outside.py:\d+.*in the memory of an array of numpy"):
        capture(model, _batch())
    assert float(model.values.sum()) == WIDTH  # type: ignore[operator]


def test_a_tensor_of_an_array_that_nobody_else_holds_is_written() -> None:
    held_against_eager(Net(lambda m, x: torch.from_numpy(numpy.ones(WIDTH)).mul_(2)), _batch())


def _make_buffer(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "scale"):
        m.register_buffer("scale", torch.zeros(WIDTH, dtype=torch.float64))
    m.scale += 1
    return m.scale  # type: ignore[no-any-return]


def _make_parameter(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "scale"):
        m.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
    return m.scale  # type: ignore[no-any-return]


def _make_module(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "scale"):
        m.scale = nn.Tanh()
    return m.scale(x)  # type: ignore[no-any-return]


def _move_module(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "scale"):
        m.scale = nn.Linear(WIDTH, WIDTH).to(x)
    return m.scale(x)  # type: ignore[no-any-return]


def _grow(m: Any, x: Tensor) -> Tensor:
    if m.longest < x.shape[1]:
        m.longest, m.table = x.shape[1], _grid(x.shape[1])
    return m.table[: x.shape[1]]  # type: ignore[no-any-return]


def _grow_buffer(m: Any, x: Tensor) -> Tensor:
    if len(m.positions) < x.shape[1]:
        m.register_buffer("positions", _grid(x.shape[1]))
    return m.positions[: x.shape[1]]  # type: ignore[no-any-return]


FIRST_RUN: dict[Callable[[Any, Tensor], Any], str] = {
    _make_buffer: "makes the buffer 'scale' itself",
    _make_parameter: "makes the parameter 'scale' itself",
    _make_module: "makes the module 'scale' itself",
    _move_module: "makes a module and moves or casts it",
    _grow: "changes longest of Net",
    _grow_buffer: "makes buffer 'positions'",
}


@pytest.mark.parametrize(("read", "words"), FIRST_RUN.items())
def test_what_the_first_run_makes_is_there_after_one(read: Callable[[Any, Tensor], Any], words: str) -> None:
    model, batch = Net(read), _batch()
    model.longest = 0
    model.register_buffer("positions", _grid(1))
    with pytest.raises(CaptureError, match=f"forward {words}.*run forward once on such a batch"):
        capture(model, batch, precision="fp64")
    model(**batch).backward()
    model.zero_grad()
    held_against_eager(model, batch)
