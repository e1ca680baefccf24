"""Loops over time in the code around them: nested, one after another, with what forward catches, changes and asks."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paraplan
from paraplan.capture.capture import capture
from paraplan.ir.errors import CaptureError
from tests.capture.looped import STEPS, WIDTH, Net, held_against_eager, num_loops

torch.set_num_threads(1)
Body = Callable[[Net, Tensor], Tensor]


def both_ways(net: Net, x: Tensor) -> Tensor:
    there = back = x[:, 0]
    firsts, lasts = [], []
    for t in range(x.shape[1]):
        there = there.sin() + x[:, t]
        firsts.append(there)
    for t in range(x.shape[1] - 1, -1, -1):
        back = back.cos() + x[:, t]
        lasts.append(back)
    return torch.stack(firsts, 1) + torch.stack(lasts[::-1], 1)


def layer_by_layer(net: Net, x: Tensor) -> Tensor:
    every: list[Tensor] = []
    for layer in (net.linear, net.inner):
        h, out = x[:, 0], []
        for t in range(x.shape[1]):
            h = layer(h).tanh() + x[:, t]
            out.append(h)
            every.append(h * 2)
        x = torch.stack(out, 1)
    return x + torch.stack(every).sum(0)[:, None]


def kept_between_layers(net: Net, x: Tensor) -> Tensor:
    h, last = x[:, 0], x[:, 1]
    for _ in range(2):
        before = last
        for t in range(x.shape[1]):
            h = h.sin() + x[:, t] * before
            last = h * 2
    return h + last


def side_by_side(net: Net, x: Tensor) -> Tensor:
    h, out = x[:, 0], []
    for a, b in zip(x.unbind(dim=1), x[:, :-1].unbind(-2), strict=False):
        h = h.sin() + a * b
        out.append(h)
    return torch.stack(out, 1)


def from_the_end(net: Net, x: Tensor) -> Tensor:
    h = x[:, 0]
    for part in reversed(x.unbind(1)):
        h = h.cos() + part
    return h


def usual_forms(net: Net, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(len(x[0])):
        most = h.max(-1, keepdim=True)[0] + h.topk(2, -1)[0].sum(-1, keepdim=True)
        h = (h - most - h.mean(-1, True)).tanh() / math.sqrt(4) + x[:, t].masked_fill(x[:, t] < -9, float("-inf"))
    return h


def seen_as_rows(net: Net, x: Tensor) -> Tensor:
    h, out = x[:, 0], []
    for t in range(x.shape[1]):
        h = h.sin() + x[:, t]
        out.append(h)
    made = torch.stack(out, 1)
    made.reshape(-1)[:5] = 0
    return made.view(-1, WIDTH) * (2 if made.is_contiguous() else 3)


ROLLED = {
    both_ways: 4,
    layer_by_layer: 4,
    kept_between_layers: 4,
    side_by_side: 2,
    from_the_end: 2,
    usual_forms: 2,
    seen_as_rows: 2,
}


@pytest.mark.parametrize("body", ROLLED)
def test_what_is_around_a_loop_leaves_it_one(body: Body) -> None:
    program = held_against_eager(Net(body).double(), {"x": torch.randn(3, STEPS, WIDTH, dtype=torch.float64)})
    assert num_loops(program) == ROLLED[body]


def index_read_between(net: Net, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(x.shape[1]):
        h = h.sin() + x[:, t]
    first = t
    for t in range(first, first - 2, -1):
        h = h * t
    return h


def caught(net: Net, x: Tensor) -> Tensor:
    h = x[:, 0]
    try:
        for t in range(x.shape[1]):
            h = h.sin() + x[:, t] * t
    except Exception:  # noqa: BLE001 - as users do
        h = x[:, 0] * 2
    return h


def suppressed(net: Net, x: Tensor) -> Tensor:
    found = h = x[:, 0]
    with contextlib.suppress(Exception):
        for t in range(x.shape[1]):
            h = h.sin() + x[:, t].select(-1, t % WIDTH)[:, None]
        found = h
    return found


def left_by_finally(net: Net, x: Tensor) -> Tensor:
    h = x[:, 0]
    try:
        for t in range(x.shape[1]):
            h = h.sin() + x[:, t] * (t + 1)
    finally:
        return h  # noqa: B012


def known_within(net: Net, x: Tensor) -> Tensor:
    def run(x: Tensor) -> Tensor:
        h = last = x[:, 0]

        def found() -> Tensor:
            return last

        for t in range(x.shape[1]):
            h = h.sin() + x[:, t]
            last = h * 2
        return found()

    return run(x)


def run(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    h, out = x[:, 0], []
    for t in range(x.shape[1]):
        h = h.cos() + x[:, t]
        out.append(h)
    return h, out


def changed_by_a_layer(net: Net, x: Tensor) -> Tensor:
    h, out = run(x)
    h = net.in_place(h)
    return torch.stack(out, 1) + h[:, None]


def changed_by_a_flag(net: Net, x: Tensor) -> Tensor:
    h, out = run(x)
    F.leaky_relu(h, 0.3, True)
    return torch.stack(out, 1)


def changed_by_name(net: Net, x: Tensor) -> Tensor:
    h, out = run(x)
    torch.relu_(input=h)
    return torch.stack(out, 1)


def given_elsewhere(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        h, out = run(x)
        torch.add(h, 1, out=h)
    return torch.stack(out, 1) + x


def asks_for_strides(net: Net, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(x.shape[1]):
        h = h.sin() * (1 + h.is_contiguous()) + x[:, t] * x[:, t].stride(1)
    return h


def asks_for_gradients(net: Net, x: Tensor) -> Tensor:
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = h.cos() * (1 + h.requires_grad) + x[:, t]
    return h


def asks_how_many(net: Net, x: Tensor) -> Tensor:
    out: list[Tensor] = []
    filled, h = out, x[:, 0]
    for t in range(x.shape[1]):
        many = len(filled) > 5
        h = h.sin() * (many + 1) + x[:, t]
        out.append(h)
    return torch.stack(out)


def asks_which_it_is(net: Net, x: Tensor) -> Tensor:
    first = h = x[:, 0]
    for t in range(x.shape[1]):
        h = h.sin() * (1 + (h is first)) + x[:, t]
    return h


def adds_up_means(net: Net, x: Tensor) -> Tensor:
    h, total = x[:, 0], torch.zeros((), dtype=x.dtype)
    for t in range(x.shape[1]):
        h = h.sin() + x[:, t]
        total = total + h.pow(2).mean()
    return total


class _Holder:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def unbind(self, dim: int) -> tuple[Tensor, ...]:
        return self.x.unbind(dim)


def taken_apart_otherwise(net: Net, x: Tensor) -> Tensor:
    h = x[:, 0]
    for part in _Holder(x).unbind(1):
        h = h.sin() + part
    return h


APART = [
    *(index_read_between, caught, suppressed, left_by_finally, known_within, taken_apart_otherwise, adds_up_means),
    *(changed_by_a_layer, changed_by_a_flag, changed_by_name, given_elsewhere),
    *(asks_for_strides, asks_for_gradients, asks_how_many, asks_which_it_is),
]


@pytest.mark.parametrize("body", APART)
def test_what_is_around_a_loop_may_leave_it_none(body: Body) -> None:
    program = held_against_eager(Net(body).double(), {"x": torch.randn(3, STEPS, WIDTH, dtype=torch.float64)})
    assert num_loops(program) == 0


def test_one_that_is_none_leaves_others_alone() -> None:
    def two(net: Net, x: Tensor) -> Tensor:
        return taken_apart_otherwise(net, x) + from_the_end(net, x) + caught(net, x)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        program = capture(Net(two), {"x": torch.randn(3, 64, WIDTH)})
    assert num_loops(program) == 2
    assert sum("this loop over time is captured step by step" in str(each.message) for each in told) == 2


def test_means_over_time_are_of_microbatches_too() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h, loss = x[:, 0], 0.0
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], h)
                loss = loss + (h - x[:, t]).pow(2).mean()
            return loss  # type: ignore[return-value]

    model, batch = Model().double(), {"x": torch.randn(8, STEPS, WIDTH, dtype=torch.float64)}
    plan = paraplan.compile(model, "local:2", example_inputs=batch, precision="fp64", microbatches=2)
    assert "steps are the eager model's" in plan.check(model, [batch])


def written_without_gradient(net: Net, x: Tensor) -> Tensor:
    h, bank = x[:, 0].sin(), x.new_zeros(3, WIDTH)
    with torch.no_grad():
        bank[0] = h[0]
        bank[1:] += h[1:] * 2
        bank.diagonal().copy_(h[0, :3])
    return h + bank


def read_by_strides(net: Net, x: Tensor) -> Tensor:
    windows = x.contiguous().as_strided((3, STEPS - 1, 2, WIDTH), (STEPS * WIDTH, WIDTH, WIDTH, 1))
    repeated = (x[:, 0] * 1).as_strided((3, 5, WIDTH), (WIDTH, 0, 1))
    return windows.sum() + repeated.sin()


def arrays_changed_later(net: Net, x: Tensor) -> Tensor:
    array = numpy.ones(WIDTH)
    first = torch.tensor(array)
    array += 1
    return x * first + x.sin() * torch.from_numpy(array)


@pytest.mark.parametrize("body", [written_without_gradient, read_by_strides, arrays_changed_later])
def test_forward_is_followed_as_eager_runs_it(body: Body) -> None:
    held_against_eager(Net(body).double(), {"x": torch.randn(3, STEPS, WIDTH, dtype=torch.float64)})


def test_an_array_is_not_changed_under_a_tensor() -> None:
    def changed(net: Net, x: Tensor) -> Tensor:
        array = numpy.ones(WIDTH)
        shared = torch.from_numpy(array)
        array += 1
        return x * shared

    with pytest.raises(CaptureError, match="changes an array of numpy after it has made a tensor of its memory"):
        capture(Net(changed), {"x": torch.randn(3, STEPS, WIDTH)})


def test_what_only_a_trace_refuses_is_said_though_forward_catches_it() -> None:
    def guarded(net: Net, x: Tensor) -> Tensor:
        try:
            scale = 1 + torch.allclose(x, x)
        except RuntimeError:
            scale = 5
        return x * scale

    with pytest.raises(CaptureError, match=r"test_loops_around.py:\d+, in guarded.*depends on tensor data"):
        capture(Net(guarded), {"x": torch.randn(3, STEPS, WIDTH)})


def test_data_that_a_gradient_flows_through_is_not_assigned() -> None:
    def assigned(net: Net, x: Tensor) -> Tensor:
        h = x[:, 0].cos()
        h.data = h.data * 2
        return h

    with pytest.raises(CaptureError, match="assigns to the data of a value that a gradient flows through"):
        capture(Net(assigned), {"x": torch.randn(3, STEPS, WIDTH)})
