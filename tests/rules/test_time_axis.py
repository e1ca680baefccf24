"""Microbatches as an axis: where values stand along it, and programs that cannot be split."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from paraplan.capture import capture
from paraplan.ir.errors import ConstraintError
from paraplan.ir.machine.mesh import P, R, S
from paraplan.ir.model.program import Program
from paraplan.rules.time_axis import dual, program_micro
from tests.lowering.toy import toy_program


class Centred(nn.Module):
    """Subtracts the mean over the batch: every sample looks at all others."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        h = torch.tanh(h - h.mean(0))
        return (h * h).sum()


class Flipped(nn.Module):
    """Reverses the batch: no sample stays where it was."""

    def forward_of(self, h: Tensor) -> Tensor:
        return h.flip(0)

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        return (torch.tanh(h) * self.forward_of(h)).sum()


class Filled(nn.Module):
    """Multiplies by what is made from nothing, at the size of the batch, and from a parameter, spread over it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.gain = nn.Parameter(torch.randn(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        return (h * torch.full_like(h, 0.5).cos() * self.gain.expand(x.shape[0], 6)).square().sum()


def program(model: nn.Module) -> Program:
    return capture(model, {"x": torch.randn(4, 6)}, precision="fp64")


@pytest.mark.parametrize(("make", "line"), [(Centred, "h - h.mean|h.mean"), (Flipped, "forward_of")])
def test_ops_that_mix_samples_are_named(make: type[nn.Module], line: str) -> None:
    made = program(make())
    assert program_micro(made, 1).values["batch:x"] == R
    micro = program_micro(made, 2)
    assert re.fullmatch(rf"aten\.\S+ \(.*test_time_axis\.py.*({line}).*\)", micro.mixes)
    assert 0 < micro.tail == len(made.segments) - 1  # the linear layer runs in microbatches, the rest once


class Standard(nn.Module):
    """Layers with statistics of the batch between them: most of the model follows from the first."""

    def __init__(self) -> None:
        super().__init__()
        layers = [each for _ in range(3) for each in (nn.Linear(6, 6), nn.BatchNorm1d(6))]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_a_model_that_mixes_samples_in_its_middle_is_refused_by_name() -> None:
    message = r"bn_\w+ \(.*test_time_axis\.py.*\) mixes samples .* into 2 microbatches"
    with pytest.raises(ConstraintError, match=message):
        program_micro(program(Standard()), 2)


@pytest.mark.parametrize("m", [0, -1, 3, 16])
def test_the_batch_must_divide(m: int) -> None:
    with pytest.raises(ConstraintError, match=f"batch of 8 does not divide into {m} microbatches"):
        program_micro(toy_program(), m)


def test_placements_along_the_axis() -> None:
    micro = program_micro(toy_program(), 4)
    assert micro.values["batch:x"] == S(0)
    places = micro.segments[0].placements
    assert {name: places[name] for name in ("a", "x", "h", "y", "loss", "t", "dy", "g")} == {
        "a": R,
        "x": S(0),
        "h": S(0),
        "y": S(0),
        "loss": P,
        "t": R,
        "dy": R,
        "g": R,
    }
    assert [choice.key for choice in micro.segments[0].choices] == [
        "a",
        "a",
        "a",
        "-",
        "-",
    ]  # what reads nothing split stays whole
    assert all(place == R for place in program_micro(toy_program(), 1).segments[0].placements.values())


@pytest.mark.parametrize("in_space", [False, True])
def test_what_is_made_from_nothing_is_made_in_the_shards_it_is_read_in(in_space: bool) -> None:
    made = program(Filled())
    (segment,) = program_micro(made, 2, in_space).segments
    values = made.kinds[made.segments[0].kind].graph.values
    of_batch = {name: place for name, place in segment.placements.items() if values[name].shape == (4, 6)}
    assert len(of_batch) > 5 and set(of_batch.values()) == {S(0)}


def test_duals() -> None:
    assert [dual(p) for p in (S(2), R, P)] == [S(2), P, R]


def test_instances_with_equal_inputs_share_their_analysis(tiny_stacks) -> None:  # type: ignore[no-untyped-def]
    micro = program_micro(tiny_stacks[1].program, 2)
    kinds = [segment.kind for segment in tiny_stacks[1].program.segments]
    for i, first in enumerate(kinds):
        for j, second in enumerate(kinds):
            if first == second:
                assert micro.segments[i] is micro.segments[j]


def test_a_loss_function_that_mixes_samples_is_named_by_its_line() -> None:
    def far_from_the_next(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (torch.tanh(output - output.roll(1, 0)) * output).sum().exp()

    captured = capture(nn.Linear(6, 6), {"input": torch.randn(4, 6)}, loss_fn=far_from_the_next, precision="fp64")
    sources = [kind.graph.source_of(op) for kind in captured.kinds for op in kind.graph.ops if "roll" in op.target]
    assert sources and all("test_time_axis.py" in source and "far_from_the_next" in source for source in sources)


class Queried(nn.Module):
    """A learned query, made whole, of which every sample reads its slice in another segment."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.lin, self.out = nn.Parameter(torch.randn(1, 6)), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        q = self.lin(self.query.expand(x.shape[0], 6))
        return self.out(torch.tanh(q * x) @ self.lin.weight).square().sum()


def test_what_every_reader_slices_is_made_in_slices() -> None:
    made = program(Queried())
    found = program_micro(made, 2)
    assert found.tail == len(made.segments)
    first = made.segments[0]
    assert "query" in first.params and len(made.segments) > 1
    assert [found.values[name] for name in first.outputs] == [S(0)] * len(first.outputs)
    assert program_micro(made, 1).values[first.outputs[0]] == R
