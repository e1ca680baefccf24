"""What the check claims to see is planted, one fault at a time, and must fail it by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paraplan.ir.model.graph import Op, Phase
from paraplan.ir.model.program import Program
from paraplan.runtime.in_process import InProcessTrainer
from tests.jobs.checking.checked import Net, Run, captured, check, planned, with_ops

Edit = Callable[[Program], Program]


@cache
def program() -> Program:
    return captured(Net())


@pytest.mark.parametrize("pins", [{}, {"dp": 2}, {"pp": 2}], ids=str)
def test_nothing_wrong_passes(pins: dict[str, int]) -> None:
    pinned = {**pins, "microbatches": 1} if "pp" in pins else pins
    errors = Run(planned(program(), **pinned), Net()).steps(2)
    assert errors.failure == "" and errors.eager <= 1e-9
    assert "replayed by position" in errors.how


def _frozen(program: Program) -> Program:
    """The gradient of out.weight is never made."""
    kinds = list(program.kinds)
    for index, kind in enumerate(kinds):
        owner = next(segment for segment in program.segments if segment.kind == index)
        grads = tuple(
            None if name == "out.weight" else g for name, g in zip(owner.params, kind.param_grads, strict=True)
        )
        kinds[index] = msgspec.structs.replace(kind, param_grads=grads)
    return msgspec.structs.replace(program, kinds=tuple(kinds))


def _unwritten(name: str) -> Edit:
    def edit(program: Program) -> Program:
        kept = {key: value for key, value in program.buffer_updates.items() if key != name}
        return msgspec.structs.replace(program, buffer_updates=kept)

    return edit


def _number(old: float, new: float) -> Edit:
    """One number of the model is another, forward and backward."""

    def change(op: Op) -> Op:
        args = tuple(new if isinstance(arg, float) and abs(arg - old) < 1e-12 else arg for arg in op.args)
        return msgspec.structs.replace(op, args=args)

    return lambda program: with_ops(program, change)


def _steeper(op: Op) -> Op:
    """h² is twice as steep, in the backward alone."""
    wrong = op.phase is Phase.BACKWARD and op.target == "aten.mul.Tensor" and op.args[1] == 2.0
    return msgspec.structs.replace(op, args=(op.args[0], 4.0)) if wrong else op


def _term_dropped(program: Program) -> Program:
    return msgspec.structs.replace(program, loss=program.loss[:1])


def _other_function(program: Program) -> Program:
    """sigmoid for tanh, whose derivative stays tanh's."""

    def change(op: Op) -> Op:
        wrong = op.target == "aten.tanh.default"
        return msgspec.structs.replace(op, target="aten.sigmoid.default") if wrong else op

    return with_ops(program, change)


FAULTS: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "a frozen parameter": (_frozen, ("out.weight", "none")),
    "a float buffer not written": (_unwritten("norm.running_mean"), ("norm.running_mean",)),
    "a counter not written": (_unwritten("seen"), ("buffer 'seen' is 1000", "1001")),
    "a baked number": (_number(1 / 0.7, 1 / 0.8), ()),
    "a probability of dropout": (_number(0.3, 0.35), ()),
    "a momentum of a buffer": (_number(0.1, 0.2), ()),
    "a gradient twice as large": (lambda program: with_ops(program, _steeper), ("gradient of",)),
    "a loss term dropped": (_term_dropped, ()),
    "another function": (_other_function, ()),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_program_that_is_not_the_model_fails(name: str) -> None:
    edit, words = FAULTS[name]
    errors = Run(planned(edit(program())), Net()).steps(1)
    assert errors.failure, name
    for word in (*words, "step 0", "eager model"):
        assert word in errors.failure, errors.failure


def _times_two(trainer: InProcessTrainer) -> None:
    for rank in trainer.ranks:
        if "out.bias" in rank.program.grads:
            rank.executor.outer[rank.program.grads["out.bias"]].mul_(2)


def _stale(trainer: InProcessTrainer) -> None:
    """A stage computes on with the weights it began with."""
    fresh = Net()
    for rank in trainer.ranks:
        for name, param in rank.params.items():
            if name.startswith("out."):
                param.data.copy_(dict(fresh.named_parameters())[name].double())


def test_a_gradient_scaled_by_the_run_fails() -> None:
    failure = Run(planned(program(), dp=2), Net()).steps(1, before=_times_two).failure
    assert "gradient of 'out.bias'" in failure and "captured program on one device" in failure


def test_a_stale_weight_in_a_pipeline_fails() -> None:
    failure = Run(planned(program(), pp=2, microbatches=1), Net()).steps(1, after=_stale).failure
    assert "parameter 'out." in failure and "step 0" in failure


def test_another_mask_fails() -> None:
    failure = Run(planned(program()), Net(), seed=1).steps(1).failure
    assert "captured program on one device" in failure


@pytest.mark.parametrize(
    ("name", "spoil", "words"),
    [
        ("seen", lambda x: x + 1, "1002"),
        ("seen", lambda x: x.float(), "float32"),
        ("norm.running_var", lambda x: x.float(), "float32"),
        ("unused", lambda x: x + 1e-6, "parameter 'unused'"),
        ("hidden.weight", lambda x: x * float("nan"), "nan"),
    ],
)
def test_a_wrong_tensor_after_the_step_fails(name: str, spoil: Callable[[Tensor], Tensor], words: str) -> None:
    def found(grads: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
        tensors[name] = spoil(tensors.get(name, torch.ones(3, dtype=torch.float64)))

    failure = Run(planned(program()), Net()).steps(1, found=found).failure
    assert name in failure and words in failure, failure


class Twice(nn.Module):
    """Two dropouts of one shape in one segment."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.dropout(F.dropout(self.out(x), 0.2), 0.2), y)


def test_draws_that_share_their_numbers_fail() -> None:
    def change(op: Op) -> Op:
        draws = op.target == "paraplan.dropout"
        return msgspec.structs.replace(op, args=(*op.args[:3], 0, *op.args[4:])) if draws else op

    assert check(Twice()).failure == ""
    edited = with_ops(captured(Twice()), change)
    assert "numbers of another" in Run(planned(edited), Twice()).steps(1).failure


class Annealed(Net):
    """Reads a number that its forward changes; the first time it is Net."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y) * (1.0 + self.steps)
        self.steps += 1
        return loss


class Counting(Net):
    """Counts its calls and reads the count nowhere."""

    calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x, y)


def test_an_attribute_that_forward_changes_and_reads_fails_at_once() -> None:
    failure = Run(planned(program()), Annealed()).steps(1).failure
    assert "'steps' from 0 to 1" in failure and "register_buffer" in failure


@pytest.mark.filterwarnings("ignore:forward changes")
def test_an_attribute_that_forward_only_changes_passes() -> None:
    assert check(Counting()).failure == ""


def test_an_attribute_changed_since_capture_fails() -> None:
    model = Net()
    plan = planned(captured(model))
    model.temperature = 0.9
    assert "eager model" in Run(plan, model).steps(1).failure


def test_a_probability_changed_since_capture_fails() -> None:
    model: Any = Net()
    plan = planned(captured(model))
    model.drop.p = 0.5
    assert "eager model" in Run(plan, model).steps(1).failure
