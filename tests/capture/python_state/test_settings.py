"""What forward reads of Python is a constant of a captured step: a change is refused by name, or declared dynamic."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import operator
import re
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import paraplan
from paraplan.api import Buckets
from paraplan.capture.capture import capture_with_reads
from paraplan.capture.python_state.reading import Reads
from paraplan.codegen import build_modules
from paraplan.ir.errors import CaptureError, PlanMismatchError
from paraplan.ir.plan import Plan
from paraplan.runtime.in_process import InProcessTrainer
from paraplan.runtime.state.captured_settings import Settings

FACTOR = 1.0
SHARED = {"tau": 1.0, "seen": 0}
NESTED = [[1.0]]


@dataclasses.dataclass
class Options:
    """A configuration object."""

    k: float = 1.0
    seen: int = 0


class Schedule:
    """An object whose method forward calls."""

    def __init__(self) -> None:
        self.value = 1.0

    def scale(self) -> float:
        """Reads an attribute of its own."""
        return self.value


OPTIONS = Options()


class Reader(nn.Module):
    """A linear layer times what a function reads of the module."""

    level: float = 1.0

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.read, self.act = nn.Linear(4, 4), read, nn.ReLU()
        self.tau, self._hidden, self.mode, self.unused = 1.0, 1.0, "a", 0
        self.options, self.schedule, self.nested = Options(), Schedule(), {"a": [Options()]}
        self.table, self.weights, self.tensor = {"tau": 1.0, "seen": 0}, [1.0, 2.0], torch.ones(4)
        self.function = torch.relu
        self.lists, self.tables, self.space = [[1.0]], {"a": {"b": 1.0}}, types.SimpleNamespace(k=1.0, log=[[]])
        self.cut, self.values = slice(0, 4), range(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        return (self.layer(x) * self.read(self)).mean()


def _closure() -> tuple[Callable[[Any], float], Callable[[Any], None]]:
    value = 1.0

    def read(model: Any) -> float:
        return value

    def change(model: Any) -> None:
        nonlocal value
        value = 0.5

    return read, change


def _set_global(model: Any) -> None:
    globals()["FACTOR"] = 0.5


CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "number": (lambda m: m.tau, lambda m: setattr(m, "tau", 0.5), r"tau of Reader was captured with tau=1.0 and has"),
    "private": (lambda m: m._hidden, lambda m: setattr(m, "_hidden", 0.5), r"_hidden of Reader"),
    "text": (lambda m: 1.0 if m.mode == "a" else 0.5, lambda m: setattr(m, "mode", "b"), r"mode='a' and has mode='b'"),
    "class": (lambda m: m.level, lambda m: setattr(m, "level", 0.5), r"level of Reader"),
    "config": (lambda m: m.options.k, lambda m: setattr(m.options, "k", 0.5), r"k of Options \(options.k\)"),
    "new config": (lambda m: m.options.k, lambda m: setattr(m, "options", Options(0.5)), r"options.k.* was 1.0"),
    "asdict": (lambda m: dataclasses.asdict(m.options)["k"], lambda m: setattr(m.options, "k", 0.5), "k of Options"),
    "method": (lambda m: m.schedule.scale(), lambda m: setattr(m.schedule, "value", 0.5), "value of Schedule"),
    "nested": (lambda m: m.nested["a"][0].k, lambda m: setattr(m.nested["a"][0], "k", 0.5), r"nested\['a'\]\[0\].k"),
    "dict": (lambda m: m.table["tau"], lambda m: m.table.update(tau=0.5), r"table\['tau'\] of Reader"),
    "list": (lambda m: sum(m.weights), lambda m: m.weights.append(1.0), r"weights=\[1.0, 2.0\] and has"),
    "list of lists": (lambda m: m.lists[0][0], lambda m: m.lists[0].append(0.5), r"lists\[0\]=\[1.0\] and has"),
    "dict of dicts": (lambda m: m.tables["a"]["b"], lambda m: m.tables["a"].update(b=0.5), r"tables\['a'\]"),
    "namespace": (lambda m: m.space.k, lambda m: setattr(m.space, "k", 0.5), r"space of Reader"),
    "within a namespace": (lambda m: len(m.space.log[0]) + 1, lambda m: m.space.log[0].append(1), r"space of Reader"),
    "slice": (lambda m: m.tensor[m.cut].sum(), lambda m: setattr(m, "cut", slice(1, 4)), r"cut of Reader"),
    "range": (lambda m: m.values[0], lambda m: setattr(m, "values", range(2, 3)), r"values of Reader"),
    "global list of lists": (lambda m: NESTED[0][0], lambda m: NESTED[0].__setitem__(0, 0.5), r"global NESTED"),
    "getattr": (lambda m: getattr(m, "t" + "au"), lambda m: setattr(m, "tau", 0.5), "tau of Reader"),
    "vars": (lambda m: vars(m)["tau"], lambda m: setattr(m, "tau", 0.5), "tau of Reader"),
    "hasattr": (lambda m: 0.5 if hasattr(m, "new") else 1.0, lambda m: setattr(m, "new", 1), "new of Reader"),
    "tensor in place": (lambda m: m.tensor, lambda m: m.tensor.mul_(0.5), "tensor of Reader"),
    "new tensor": (lambda m: m.tensor, lambda m: setattr(m, "tensor", m.tensor * 0.5), "tensor of Reader"),
    "function": (lambda m: m.function(m.tensor), lambda m: setattr(m, "function", torch.sigmoid), "function of Reader"),
    "module": (lambda m: m.act(m.tensor), lambda m: setattr(m, "act", nn.Sigmoid()), "another module 'act'"),
    "global": (lambda m: FACTOR, _set_global, r"global FACTOR of test_settings.py was 1.0 .* is 0.5 now"),
    "global dict": (lambda m: SHARED["tau"], lambda m: SHARED.update(tau=0.5), r"global SHARED\['tau'\]"),
    "global object": (lambda m: OPTIONS.k, lambda m: setattr(OPTIONS, "k", 0.5), "k of Options|global OPTIONS.k"),
    "closure": (*_closure(), "variable value around _closure"),
}
UNREAD: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attribute": (lambda m: m.tau, lambda m: setattr(m, "unused", 1)),
    "item": (lambda m: m.table["tau"], lambda m: m.table.update(seen=1)),
    "field": (lambda m: m.options.k, lambda m: setattr(m.options, "seen", 1)),
    "equal config": (lambda m: m.options.k, lambda m: setattr(m, "options", Options(1.0, 5))),
    "global item": (lambda m: SHARED["tau"], lambda m: SHARED.update(seen=1)),
    "a new one": (lambda m: m.tau, lambda m: setattr(m, "logged", [1])),
}


@pytest.fixture(autouse=True)
def _globals() -> Any:
    yield
    globals()["FACTOR"] = 1.0
    SHARED.update(tau=1.0, seen=0)
    OPTIONS.k = 1.0
    NESTED[:] = [[1.0]]


def _settings(read: Callable[[Any], Any]) -> tuple[Reader, Settings]:
    model = Reader(read)
    program, reads = capture_with_reads(model, {"x": torch.randn(8, 4)})
    return model, Settings(model, program, reads)


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_what_forward_reads_is_refused(what: str) -> None:
    read, change, words = CHANGES[what]
    model, settings = _settings(read)
    settings.check()
    change(model)
    with pytest.raises(PlanMismatchError, match=words):
        settings.check()


@pytest.mark.parametrize("what", UNREAD)
def test_a_change_of_what_forward_does_not_read_is_none(what: str) -> None:
    read, change = UNREAD[what]
    model, settings = _settings(read)
    change(model)
    settings.check()


def test_a_loaded_plan_knows_what_was_read() -> None:
    model = Reader(lambda m: m.options.k * m.table["tau"] * FACTOR)
    program, _ = capture_with_reads(model, {"x": torch.randn(8, 4)})
    for change in (lambda m: setattr(m.options, "k", 0.5), lambda m: m.table.update(tau=0.5), _set_global):
        twin = Reader(model.read)
        settings = Settings(twin, program, Reads())
        settings.check()
        change(twin)
        with pytest.raises(PlanMismatchError, match=r"1\.0 .*0\.5 now"):
            settings.check()


class Reach(nn.Module):
    """One of several equal layers; reads what it was told."""

    def __init__(self, reads: bool, tau: float) -> None:
        super().__init__()
        self.layer, self.reads, self.options = nn.Linear(4, 4), reads, types.SimpleNamespace(tau=tau)

    def forward(self, x: Tensor) -> Tensor:
        """Times tau, where it is read."""
        return self.layer(x) * self.options.tau if self.reads else self.layer(x)


def _square(out: Tensor, batch: Any) -> Tensor:
    return out.square().mean()


UNEQUAL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(4, 1, 4, 2, 1)),
        (4, 1, 4, 4),
    ),
    "one layer reads": (lambda: nn.Sequential(Reach(False, 3.0), Reach(True, 0.5)), (4, 4)),
    "nested numbers": (
        lambda: nn.Sequential(nn.Sequential(Reach(True, 2.0)), nn.Sequential(Reach(False, 3.0))),
        (4, 4),
    ),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_an_attribute_that_only_some_layers_read_is_theirs(name: str) -> None:
    make, shape = UNEQUAL[name]
    model, given = make(), {"input": torch.randn(*shape)}
    plan = paraplan.compile(model, "local:1", example_inputs=given, loss_fn=_square, precision="fp64")
    plan.check(model, [given], loss_fn=_square)


def test_what_only_one_layer_reads_is_compared_there_alone() -> None:
    model = nn.Sequential(Reach(False, 0.5), Reach(True, 0.5))
    program, reads = capture_with_reads(model, {"input": torch.randn(4, 4)}, loss_fn=_square)
    settings = Settings(model, program, reads)
    model[0].options.tau = 1.0
    settings.check()
    model[1].options.tau = 1.0
    with pytest.raises(PlanMismatchError, match=r"Reach '1'.*tau"):
        settings.check()


def test_a_loss_function_reads_too() -> None:
    model, beta, scale = nn.Linear(4, 4), [1.0], Schedule()
    program, reads = capture_with_reads(
        model, {"input": torch.randn(8, 4)}, loss_fn=lambda out, batch: out.mean() * beta[0] * scale.scale()
    )
    for change, words in (
        (lambda x: beta.__setitem__(0, x), r"beta\[0\]"),
        (lambda x: setattr(scale, "value", x), "value of Schedule"),
    ):
        settings = Settings(model, program, reads)
        settings.check()
        change(0.5)
        with pytest.raises(PlanMismatchError, match=words):
            settings.check()
        with pytest.raises(PlanMismatchError, match=words):  # changed between capture and the first step
            Settings(model, program, reads)
        change(1.0)


class Loss:
    """A loss function that is an object, and one of its methods."""

    def __init__(self) -> None:
        self.beta, self.calls, self.schedule, self.ema = 1.0, 0, Schedule(), torch.ones(())

    def __call__(self, out: Tensor, batch: Any) -> Tensor:
        """Reads two attributes."""
        return out.mean() * self.beta * self.schedule.scale()

    method = __call__


class LossModule(nn.Module):
    """A loss function that is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.loss, self.schedule, self.beta = nn.HuberLoss(), Schedule(), 1.0

    def forward(self, out: Tensor, batch: Any) -> Tensor:
        """Reads three."""
        return self.loss(out, out * 2) * self.beta * self.schedule.scale()


def _replace_schedule(loss: Any) -> None:
    loss.schedule = Schedule()
    loss.schedule.value = 0.5


@pytest.mark.parametrize(
    ("made", "change", "words"),
    [
        (lambda loss: loss, lambda loss: setattr(loss, "beta", 0.5), "beta of Loss"),
        (lambda loss: loss.method, lambda loss: setattr(loss, "beta", 0.5), "beta of Loss"),
        (lambda loss: loss, _replace_schedule, "value of Schedule was 1.0"),
        (lambda loss: LossModule(), lambda loss: setattr(loss, "beta", 0.5), "beta of LossModule"),
        (lambda loss: LossModule(), lambda loss: setattr(loss.loss, "delta", 0.5), "delta of HuberLoss"),
        (lambda loss: LossModule(), _replace_schedule, "value of Schedule was 1.0"),
    ],
)
def test_attributes_of_a_loss_function_are_compared(
    made: Callable[[Loss], Any], change: Callable[[Any], None], words: str
) -> None:
    loss_fn, model = made(Loss()), nn.Linear(4, 4)
    program, reads = capture_with_reads(model, {"input": torch.randn(8, 4)}, loss_fn=loss_fn)
    settings = Settings(model, program, reads)
    settings.check()
    change(getattr(loss_fn, "__self__", loss_fn))
    with pytest.raises(PlanMismatchError, match=words):
        settings.check()


class Counting(Loss):
    """Computes with how often it was called."""

    def __call__(self, out: Tensor, batch: Any) -> Tensor:
        """Reads and writes."""
        self.calls += 1
        return out.mean() * self.calls


class Averaging(Loss):
    """Computes with the mean of its losses."""

    def __call__(self, out: Tensor, batch: Any) -> Tensor:
        """Reads and writes a tensor."""
        self.ema = 0.9 * self.ema + 0.1 * out.mean().detach()
        return out.mean() / self.ema


class Logging(Loss):
    """Counts, for nobody."""

    def __call__(self, out: Tensor, batch: Any) -> Tensor:
        """Reads and writes."""
        self.calls += 1
        return out.mean()


def test_a_loss_object_that_changes_itself() -> None:
    given = {"input": torch.randn(8, 4)}
    for loss_fn, name in ((Counting(), "calls"), (Averaging(), "ema")):
        with pytest.raises(CaptureError, match=f"forward changes {name} of {type(loss_fn).__name__}"):
            capture_with_reads(nn.Linear(4, 4), given, loss_fn=loss_fn)
        assert loss_fn.calls == 0 and float(loss_fn.ema) == 1.0
    loss_fn = Logging()
    with pytest.warns(UserWarning, match="calls of Logging .* nothing in a step depends on that"):
        capture_with_reads(nn.Linear(4, 4), given, loss_fn=loss_fn)
    assert loss_fn.calls == 0


@pytest.mark.parametrize("made", [lambda: iter([1.0, 2.0, 3.0]), lambda: itertools.count(1), lambda: iter({1.0: 2})])
def test_iterators_are_refused(made: Callable[[], Any]) -> None:
    model = Reader(lambda m: next(m.taken))
    model.taken = made()
    with pytest.raises(CaptureError, match="forward changes taken of Reader"):
        capture_with_reads(model, {"x": torch.randn(8, 4)})


def test_fit_and_a_trainer_compare_before_every_step() -> None:
    given = {"x": torch.randn(8, 4)}
    for make in (lambda m: paraplan.fit(m, given, "1GiB"), lambda m: _trainer(m, given)):
        model = Reader(lambda m: m.tau)
        made = make(model)
        step = made if isinstance(made, nn.Module) else made.step
        assert float(step(**given) if step is made else step(given)) == pytest.approx(float(model(**given)), rel=1e-5)
        model.tau = 0.5
        with pytest.raises(PlanMismatchError, match=r"dynamic=\['tau'\]"):
            step(**given) if step is made else step(given)


def _trainer(model: nn.Module, given: dict[str, Tensor], cluster: str = "local:1", **pins: Any) -> InProcessTrainer:
    plan = paraplan.compile(model, cluster, example_inputs=given, **pins)
    return InProcessTrainer(plan.data, plan.programs, [build_modules(p) for p in plan.programs], model)


class Carries(nn.Module):
    """Leaves something in itself."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.how, self.steps, self.cache, self.log = nn.Linear(4, 4), how, 0, None, []
        self.state: Any = torch.ones(4)
        self.table: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        return self.how(self, self.layer(x)).mean()


def _count(self: Any, h: Tensor) -> Tensor:
    self.steps += 1
    return h


def _use(self: Any, h: Tensor) -> Tensor:
    self.steps += 1
    return h * self.steps


def _branch(self: Any, h: Tensor) -> Tensor:
    self.steps += 1
    return h if self.steps > 5 else h * 2


def _double(self: Any, h: Tensor) -> Tensor:
    self.state = self.state * 2
    return h * self.state


def _remember(self: Any, h: Tensor) -> Tensor:
    before = self.cache
    self.cache = h.detach()
    return h if before is None else h + before


def _collect(self: Any, h: Tensor) -> Tensor:
    self.log.append(h.mean())
    return h


def _recall(self: Any, h: Tensor) -> Tensor:
    self.log.append(h.mean())
    return h * len(self.log)


def _mask(self: Any, h: Tensor) -> Tensor:
    if self.cache is None:
        self.cache = torch.arange(4.0)
    return h * self.cache


def _masks(self: Any, h: Tensor) -> Tensor:
    if "m" not in self.table:
        self.table["m"] = torch.arange(4.0)
    return h * self.table["m"]


def _leave(self: Any, h: Tensor) -> Tensor:
    self.last = h
    return h


def _first(self: Any, h: Tensor) -> Tensor:
    if self.cache is None:
        self.cache = 1
        return h * 2
    return h


def _number(self: Any, h: Tensor) -> Tensor:
    factor = torch.tensor(1.0 if self.cache is None else 2.0)
    self.cache = 1
    return h * factor


class Straight(torch.autograd.Function):
    """The identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _own(self: Any, h: Tensor) -> Tensor:
    self.steps += 1
    return Straight.apply(h)


def _keep(self: Any, h: Tensor) -> Tensor:
    if self.cache is None:
        self.cache = h.detach() * 2
    return h


def _settle(self: Any, h: Tensor) -> Tensor:
    self.steps = max(self.steps, h.shape[0])
    return h


@pytest.mark.parametrize(
    ("how", "name"),
    [
        (_use, "steps"),
        (_branch, "steps"),
        (_double, "state"),
        (_remember, "cache"),
        (_recall, "log"),
        (_first, "cache"),
        (_number, "cache"),
    ],
)
def test_what_is_carried_from_step_to_step_is_refused(how: Callable[[Any, Tensor], Tensor], name: str) -> None:
    with pytest.raises(CaptureError, match=rf"test_settings.py:.*forward changes {name} of Carries.*register_buffer"):
        capture_with_reads(Carries(how), {"x": torch.randn(8, 4)})


@pytest.mark.parametrize("how", [_count, _collect, _settle, _keep, _own])
def test_what_is_only_counted_or_steady_is_warned_of(how: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.warns(UserWarning, match="nothing in a step depends on that"):
        capture_with_reads(Carries(how), {"x": torch.randn(8, 4)})


class Checked:
    """A configuration that takes values of a field's type alone, as those of Hugging Face do."""

    def __init__(self) -> None:
        self.task: str | None = None
        self.steps = 0

    def __setattr__(self, name: str, value: object) -> None:
        known = {"task": ("regression", "classification", None), "steps": range(100)}[name]
        if value not in known:
            raise ValueError(f"{name} is none of {known}: {value}")
        super().__setattr__(name, value)


class Whole(Checked):
    """Makes a number of what it is given."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value if name == "task" or isinstance(value, int) else 0)


def _task(self: Any, h: Tensor) -> Tensor:
    if self.config.task is None:
        self.config.task = "regression" if h.shape[-1] == 1 else "classification"
    return h * 2 if self.config.task == "regression" else h


def _tasks(self: Any, h: Tensor) -> Tensor:
    self.config.task = "regression" if self.config.task is None else "classification"
    return h * 2 if self.config.task == "regression" else h


def _checked(self: Any, h: Tensor) -> Tensor:
    self.config.steps += 1
    return h * self.config.steps


def _configured(how: Callable[[Any, Tensor], Tensor], config: Checked) -> Carries:
    model = Carries(how)
    model.config = config
    return model


def test_an_attribute_of_a_class_that_checks_its_values_may_settle() -> None:
    with pytest.warns(UserWarning, match="forward changes task of .*None to 'classification'.*nothing in a step"):
        capture_with_reads(_configured(_task, Checked()), {"x": torch.randn(8, 4)})


@pytest.mark.parametrize(("how", "name"), [(_tasks, "task"), (_checked, "steps")])
def test_what_a_class_that_checks_its_values_carries_is_refused(
    how: Callable[[Any, Tensor], Tensor], name: str
) -> None:
    with pytest.raises(CaptureError, match=rf"test_settings.py:.*forward changes {name} of Checked"):
        capture_with_reads(_configured(how, Checked()), {"x": torch.randn(8, 4)})


def test_a_value_that_a_class_makes_another_is_no_proof() -> None:
    with pytest.raises(CaptureError, match=r"^test_settings.py:\d+: forward changes steps of Whole"):
        capture_with_reads(_configured(_checked, Whole()), {"x": torch.randn(8, 4)})


@pytest.mark.parametrize("how", [_mask, _masks, _leave])
def test_caches_of_constants_and_what_is_only_left_pass(how: Callable[[Any, Tensor], Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "forward changes")
        capture_with_reads(Carries(how), {"x": torch.randn(8, 4)})


class Annealed(nn.Module):
    """Numbers and a tensor that a training loop changes, in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(4))
        self.head, self.tau, self.power, self.mask = nn.Linear(4, 4), 0.5, 2, torch.ones(4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """A loss."""
        for layer in self.layers:
            x = layer(x)
        out = self.head(x) * self.mask
        return (out - y).pow(2).mean() * self.tau + (out.abs() ** self.power).mean() * (1 - self.tau)


class Scaled(nn.Module):
    """A layer with a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.temperature = nn.Linear(4, 4), 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        return torch.tanh(self.layer(x) / self.temperature)


DYNAMIC = ("tau", "layers.1.temperature", "power", "mask")


def _anneal(model: Any, step: int) -> None:
    model.tau, model.power = 0.5 * 0.7**step, 2 + step
    model.layers[1].temperature = 1 + step / 3
    model.mask = torch.tensor([1.0, step, 2.0, 3.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "pins", [{"dp": 2}, {"tp": 2, "microbatches": 2}, {"pp": 2, "microbatches": 4}, {"dp": 2, "zero": 3}]
)
def test_dynamic_attributes_are_read_before_every_step(pins: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, twin = Annealed().double(), Annealed().double()
    twin.load_state_dict(model.state_dict())
    given = {"x": torch.randn(8, 4).double(), "y": torch.randn(8, 4).double()}
    trainer = _trainer(model, given, "local:2", precision="fp64", dynamic=DYNAMIC, **pins)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(3):
        for each in (model, twin):
            _anneal(each, step)
        found, wanted = trainer.step(given), twin(**given)
        trainer.apply_optimizer(torch.optim.SGD, lr=0.1)
        wanted.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert float(found) == pytest.approx(float(wanted), rel=1e-9)
    for name, param in twin.named_parameters():
        torch.testing.assert_close(trainer.params()[name], param.detach(), rtol=1e-9, atol=1e-12)


def test_dynamic_attributes_of_a_fitted_model() -> None:
    torch.manual_seed(0)
    model, twin = Annealed().double(), Annealed().double()
    twin.load_state_dict(model.state_dict())
    given = {"x": torch.randn(8, 4).double(), "y": torch.randn(8, 4).double()}
    trained = paraplan.fit(model, given, "1GiB", dynamic=DYNAMIC)
    for step in range(3):
        for each in (model, twin):
            _anneal(each, step)
            each.zero_grad()
        trained(**given).backward()
        twin(**given).backward()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)
    model.layers[0].temperature = 2.0
    with pytest.raises(
        PlanMismatchError, match=r"temperature of Scaled 'layers.0'.*dynamic=\['layers.0.temperature'\]"
    ):
        trained(**given)
    model.layers[0].temperature, model.tau = 1.0, "warm"
    with pytest.raises(PlanMismatchError, match=r"self.tau is an input of the step .* is str 'warm' now"):
        trained(**given)


class Branching(nn.Module):
    """Needs a number's value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.k, self.tau, self.name = nn.Linear(4, 4), 2, 0.5, "a"

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        return self.layer(x)[:, : self.k].mean() * self.tau


def test_dynamic_says_what_it_cannot_take() -> None:
    given = {"x": torch.randn(8, 4)}
    for name, words in (
        ("nothing", "dynamic names 'nothing', and Branching has no such attribute"),
        ("name", "dynamic names 'name', which is a str"),
        ("layer.weight", "dynamic names 'layer.weight', a parameter or buffer"),
        (
            "k",
            r"self.k is declared dynamic, .* its number is needed: test_settings.py:.*self.layer\(x\)\[:, : self.k\]",
        ),
    ):
        with pytest.raises(CaptureError, match=words):
            capture_with_reads(Branching(), given, dynamic=["tau", name])


def test_the_plan_keeps_what_was_read(tmp_path: Any) -> None:
    model = Annealed()
    given = {"x": torch.randn(8, 4), "y": torch.randn(8, 4)}
    plan = paraplan.compile(model, "local:1", example_inputs=given, dynamic=["tau"])
    plan.save(tmp_path / "plan.json")
    loaded: Plan = paraplan.Plan.load(tmp_path / "plan.json").data
    assert loaded == plan.data
    assert loaded.program.settings["layers.*:temperature"] == "1.0" and ":tau" not in loaded.program.settings
    assert loaded.program.batch["self.tau"].attribute == "tau"


def test_buckets_of_one_shape_for_several_values() -> None:
    torch.manual_seed(0)
    model, twin = Branching().double(), Branching().double()
    twin.load_state_dict(model.state_dict())
    given = {"x": torch.randn(8, 4).double()}
    buckets = Buckets.compile(
        model,
        "local:1",
        [{"attributes": {"k": 2}}, {"attributes": {"k": 3}}],
        example_inputs=given,
        precision="fp64",
        dynamic=["tau"],
    )
    trainer = buckets.executable(model)
    optimizer, others = trainer.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)
    for step, k in enumerate((2, 3, 2, 3)):
        for each in (model, twin):
            each.k, each.tau = k, 0.5 * 0.5**step
        found, wanted = trainer.step(given), twin(**given)
        wanted.backward()
        for each in (optimizer, others):
            each.step()
            each.zero_grad()
        assert float(found) == pytest.approx(float(wanted), rel=1e-9)
    model.k = 4
    with pytest.raises(PlanMismatchError, match="k of Branching was captured with k=2 and has k=4 now"):
        trainer.step(given)


def _trained() -> tuple[Annealed, Any, dict[str, Tensor]]:
    model, given = Annealed(), {"x": torch.randn(8, 4), "y": torch.randn(8, 4)}
    plan = paraplan.compile(model, "local:1", example_inputs=given)
    return model, plan.executable(model), given


def test_a_method_replaced_after_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, trainer, given = _trained()
    module = next(each for each in model.modules() if isinstance(each, nn.Linear))
    trainer.step(given)
    module.forward = lambda x: nn.functional.linear(x, module.weight * 3, module.bias)
    for _ in range(2):
        with pytest.raises(PlanMismatchError, match=r"Linear .* has another 'forward' than when"):
            trainer.step(given)
    del module.forward
    module.note = "unread"
    trainer.step(given)
    monkeypatch.setattr(Annealed, "forward", lambda self, x, y: x.sum())
    with pytest.raises(PlanMismatchError, match=r"Annealed has another 'forward'"):
        trainer.step(given)


_NAME = re.compile("a")


class Stretched(nn.Module):
    """Calls a method of its base, with a default argument that can change."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def scale(self, x: Tensor, by: list[float] = [2.0], *, more: float = 1.0, name: Any = _NAME) -> Tensor:  # noqa: B006
        return x * by[0] * more * len(name.findall("ab"))

    def unread(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.lin(x)).square().mean()


class Derived(Stretched):
    """Has its base's."""


@pytest.mark.parametrize("cls", [Stretched, Derived])
def test_a_method_replaced_on_a_class_is_refused(cls: type[Stretched], monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"x": torch.randn(8, 4)}
    fitted = paraplan.fit(Derived(), given, memory=2**30)
    for name in ("unread", "quiet"):
        monkeypatch.setattr(cls, name, lambda self: 2.0, raising=False)
    fitted(**given)
    with monkeypatch.context() as patch:
        patch.setattr(cls, "scale", lambda self, x: x)
        for _ in range(2):
            with pytest.raises(PlanMismatchError, match=f"^{cls.__name__} has another 'scale' than .* call fit again"):
                fitted(**given)
    fitted(**given)


def test_a_changed_default_argument_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given, by = {"x": torch.randn(8, 4)}, [2.0]
    monkeypatch.setattr(Stretched.scale, "__defaults__", (by,))
    fitted = paraplan.fit(Stretched(), given, memory=2**30)
    fitted(**given)
    for name, value, said in (
        ("__defaults__", ([3.0],), r"'by' of Stretched.scale was \[2.0\] .* is \[3.0\] now"),
        ("__kwdefaults__", {"more": 2.0, "name": _NAME}, "'more' of Stretched.scale was 1.0 .* is 2.0 now"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Stretched.scale, name, value)
            with pytest.raises(PlanMismatchError, match=f"default {said}"):
                fitted(**given)
    fitted(**given)
    by[0] = 4.0
    with pytest.raises(PlanMismatchError, match="default 'by'"):
        fitted(**given)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_hooks_of_all_modules_are_refused_and_torchs_own_pass(kind: str) -> None:
    register, given = getattr(nn.modules.module, f"register_module_{kind}"), {"x": torch.randn(8, 4)}
    model = Reader(lambda m: 1.0)
    fitted = paraplan.fit(model, given, memory=2**30)
    trainer = _trainer(model, given)
    with FlopCounterMode(display=False):
        fitted(**given).backward()
    handle = register(lambda module, *_: None)
    try:
        for step in (lambda: fitted(**given), lambda: trainer.step(given)):
            with pytest.raises(PlanMismatchError, match=f"all modules is registered .*register_module_{kind}"):
                step()
        with pytest.raises(CaptureError, match=f"all modules is registered .*register_module_{kind}"):
            paraplan.fit(model, given, memory=2**30)
    finally:
        handle.remove()
    fitted(**given).backward()


def test_a_forward_bound_to_its_own_model_is_captured() -> None:
    model, given = Annealed().double(), {k: torch.randn(8, 4).double() for k in "xy"}
    plain = paraplan.compile(model, "local:1", example_inputs=given, precision="fp64")
    model.forward = types.MethodType(lambda self, x, y: Annealed.forward(self, x, y) * 3, model)
    with pytest.raises(PlanMismatchError, match=r"other code of .*lambda"):
        plain.executable(model)
    plan = paraplan.compile(model, "local:1", example_inputs=given, precision="fp64")
    assert float(plan.executable(model).step(given)) == pytest.approx(float(model(**given)), rel=1e-9)


class Registering(nn.Module):
    """A weight used twice under two names, and what a step is planned without."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.tied, self.other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("mask", None)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.other(self.tied(self.second(self.first(x)))) * self.scale * len(list(self.parameters()))
        return (x if self.mask is None else x * self.mask).square().mean()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: setattr(m.first, "bias", nn.Parameter(torch.ones(4))), "'first.bias' was None .* is parameter now"),
        (lambda m: setattr(m.tied, "weight", nn.Parameter(torch.ones(4, 4))), "'tied.weight' was the same .* its own"),
        (lambda m: setattr(m.other, "weight", m.first.weight), "'other.weight' was .* is the same as 'first.weight'"),
        (lambda m: setattr(m, "mask", torch.ones(4)), "buffer 'mask' was None .* is buffer now"),
        (lambda m: m.register_parameter("more", nn.Parameter(torch.ones(4))), "has a parameter 'more' now"),
        (lambda m: setattr(m.second, "bias", None), "'second.bias' was parameter .* is None now"),
        (lambda m: delattr(m, "scale"), "no buffer 'scale' any more"),
    ],
)
def test_what_is_registered_after_capture_is_refused(change: Callable[[Any], Any], said: str) -> None:
    given = {"x": torch.randn(8, 4)}
    model, alone = Registering(), Registering()
    trainer, fitted = _trainer(model, given), paraplan.fit(alone, given, memory=2**30)
    for each in (model, alone):
        each.scale = each.scale * 2
        each.second.weight = nn.Parameter(torch.ones(4, 4))
    trainer.step(given)
    fitted(**given).backward()
    assert alone.second.weight.grad is not None
    for each, step, again in (
        (model, lambda: trainer.step(given), "plan"),
        (alone, lambda: fitted(**given), "call fit"),
    ):
        change(each)
        with pytest.raises(PlanMismatchError, match=f"{said}.*; put it back, or {again} again"):
            step()


def test_a_model_moved_to_meta_is_as_it_was() -> None:
    given = {"x": torch.randn(8, 4)}
    model = Registering()
    trainer = _trainer(model, given)
    model.to("meta")
    assert model.tied.weight is not model.first.weight
    trainer.step(given)


@functools.lru_cache
def _mask(size: int) -> Tensor:
    return torch.tril(torch.ones(size, size))


PATTERN, FIRST, LOCK, LOG = re.compile("a+"), operator.itemgetter(0), threading.RLock(), logging.getLogger(__name__)


def _logged(h: Tensor) -> Tensor:
    LOG.info("forward runs")
    return h


def _locked(h: Tensor) -> Tensor:
    with LOCK:
        return h * 2


class Calls(nn.Module):
    """A linear layer and a function of its result."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.call, self.pattern, self.first = nn.Linear(4, 4), call, re.compile("b"), operator.itemgetter(0)

    def forward(self, x: Tensor) -> Tensor:
        number = 2.0 if self.pattern.match("b") else 1.0
        return self.call(self.first((self.layer(x) * number,))).square().mean()


@pytest.mark.parametrize(
    "call",
    [
        lambda h: h @ _mask(4),
        lambda h: h * (2 if PATTERN.match("aa") else 1),
        lambda h: FIRST((h,)),
        _locked,
        _logged,
    ],
    ids=["cached", "pattern", "getter", "lock", "logger"],
)
def test_what_is_of_classes_written_in_c_or_of_logging_is_read_as_any_value(call: Callable[[Tensor], Tensor]) -> None:
    _mask.cache_clear()
    model, free, x = Calls(call), Calls(call), torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    fitted = paraplan.fit(model, {"x": x}, memory="1GiB", time_limit_s=1.0)
    for level in (logging.INFO, logging.DEBUG):
        LOG.isEnabledFor(level)  # which it remembers
        for each in (fitted, free):
            each(x=x).backward()
    torch.testing.assert_close(model.layer.weight.grad, free.layer.weight.grad)


@pytest.mark.parametrize(("name", "value"), [("pattern", re.compile("c")), ("first", operator.itemgetter(-1))])
def test_another_pattern_or_getter_is_refused(name: str, value: Any) -> None:
    model, x = Calls(lambda h: h), torch.randn(8, 4)
    fitted = paraplan.fit(model, {"x": x}, memory="1GiB", time_limit_s=1.0)
    setattr(model, name, value)
    with pytest.raises(PlanMismatchError, match=name):
        fitted(x=x)
