"""Loops that write a tensor's steps by index: one op where the tensor is theirs alone, else run step by step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paraplan.capture.capture import capture
from paraplan.capture.reference import run_program
from tests.capture.looped import STEPS, WIDTH, Net, held_against_eager, num_loops

torch.set_num_threads(1)
Body = Callable[[Net, Tensor], Tensor]


def with_its_dtype(net: Net, x: Tensor) -> Tensor:
    h = x[:, 0] * 0
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = h * x[:, t].sigmoid() + x[:, t]
        out[:, t] = (h / out.shape[1]).to(out.dtype)
    return out * x


def rounded_by_writing(net: Net, x: Tensor) -> Tensor:
    h = x[:, 0] * 0
    out = x.new_zeros(x.shape, dtype=torch.bfloat16)
    for t in range(x.shape[1]):
        h = h.sin() + x[:, t]
        out[:, t] = h
    return out.float()


def first_dim(net: Net, x: Tensor) -> Tensor:
    h, seen = x[:, 0] * 0, x.transpose(0, 1)
    out = torch.empty(seen.shape[0], 3, WIDTH, dtype=x.dtype)
    for t in range(seen.shape[0]):
        h = h.sin() + seen[t]
        out[t] = h
    return out.cumsum(0)


def last_dim(net: Net, x: Tensor) -> Tensor:
    h = x[:, 0] * 0
    out = torch.zeros(3, WIDTH, STEPS, dtype=x.dtype)
    for t in range(STEPS):
        h = h.sin() + x[:, t]
        out[..., t] = h
    return out * torch.arange(STEPS)


def broadcast(net: Net, x: Tensor) -> Tensor:
    h = x[:, 0].sum(0)
    out = torch.ones(3, STEPS, WIDTH, dtype=x.dtype)
    for t in range(x.shape[1]):
        h = h.sin() + x[:, t].mean(0)
        out[:, t, :] = h
    return out * x


def one_more(net: Net, x: Tensor) -> Tensor:
    h = x[:, 0]
    out = torch.full((3, STEPS + 3, WIDTH), 0.5, dtype=x.dtype)
    for t in range(x.shape[1]):
        h = h.sin() + x[:, t]
        out[:, t + 2] = h
    return out * torch.arange(STEPS + 3)[:, None]


def from_the_end(net: Net, x: Tensor) -> Tensor:
    h = x[:, 0] * 0
    out = torch.zeros_like(x)
    for t in range(x.shape[1] - 1, 1, -1):
        h = h.sin() + x[:, t]
        out[:, t - 1] = h
    return out * torch.arange(STEPS)[:, None]


def two(net: Net, x: Tensor) -> Tensor:
    h, before = x[:, 0] * 0, []
    out, other = torch.zeros_like(x), 2
    other = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = h.sin() + x[:, t]
        other[:, t] = h * h
        before.append(h)
        out_t = h.cos()
        other_t = out_t + h
        h = other_t
    return other + torch.stack(before, 1) + out


def promoted(net: Net, x: Tensor) -> Tensor:
    """The first step is another dtype's, and stands before the loop."""
    h = torch.zeros(3, WIDTH)
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        out[:, t] = h
        h = h.sin() + x[:, t]
    return out + h[:, None]


@pytest.mark.parametrize(
    "body",
    [with_its_dtype, first_dim, last_dim, broadcast, one_more, from_the_end, two, promoted],
)
def test_a_loop_that_writes_what_is_its_own_is_one_op(body: Body) -> None:
    program = held_against_eager(Net(body).double(), {"x": torch.randn(3, STEPS, WIDTH, dtype=torch.float64)})
    assert num_loops(program) == 2


def with_another_name(net: Net, x: Tensor) -> Tensor:
    h = x[:, 0] * 0
    out = torch.zeros_like(x)
    same = out
    for t in range(x.shape[1]):
        h = h.sin() + x[:, t] + same.sum()
        out[:, t] = h
    return out


def read_by_its_steps(net: Net, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        out[:, t] = out.sum(1).sin() + x[:, t]
    return out


def written_twice(net: Net, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        out[:, t] = x[:, t].sin()
        out[:, t] = x[:, t].cos()
    return out


def around_the_end(net: Net, x: Tensor) -> Tensor:
    h = x[:, 0] * 0
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = h.sin() + x[:, t]
        out[:, t - 1] = h
    return out * torch.arange(STEPS)[:, None]


def every_other(net: Net, x: Tensor) -> Tensor:
    seen, h = torch.cat([x, x], 1), x[:, 0] * 0
    out = torch.zeros_like(seen)
    for t in range(0, seen.shape[1], 2):
        h = h.sin() + seen[:, t]
        out[:, t] = h
    return out


def part_of_a_step(net: Net, x: Tensor) -> Tensor:
    h = x[:, 0] * 0
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = h.sin() + x[:, t]
        out[:, t, 1:] = h[:, 1:]
    return out


def a_running_sum(net: Net, x: Tensor) -> Tensor:
    """What is written is changed in place by the next step."""
    total = torch.zeros_like(x[:, 0])
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        total += x[:, t]
        out[:, t] = total
    return out.sin()


def of_an_argument(net: Net, x: Tensor) -> Tensor:
    def fill(out: Tensor) -> Tensor:
        h = x[:, 0] * 0
        for t in range(x.shape[1]):
            h = h.sin() + x[:, t]
            out[:, t] = h
        return h

    given = torch.zeros_like(x)
    return fill(given)[:, None] + given


def calling_its_own(net: Net, x: Tensor) -> Tensor:
    """Its text may be a loop's; when it runs, it is none."""
    calls: list[int] = []

    def own(h: Tensor) -> Tensor:
        calls.append(1)
        return h.sin() * len(calls)

    h = x[:, 0] * 0
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = own(h) + x[:, t]
        out[:, t] = h
    return out


@pytest.mark.parametrize(
    "body",
    [
        *(with_another_name, read_by_its_steps, written_twice, around_the_end, every_other, part_of_a_step),
        *(of_an_argument, calling_its_own, a_running_sum),
    ],
)
def test_others_are_run_step_by_step(body: Body) -> None:
    program = held_against_eager(Net(body).double(), {"x": torch.randn(3, STEPS, WIDTH, dtype=torch.float64)})
    assert num_loops(program) == 0


def test_what_is_written_takes_the_dtype_of_what_it_is_written_to() -> None:
    torch.manual_seed(0)
    model, batch = Net(rounded_by_writing), {"x": torch.randn(3, STEPS, WIDTH)}
    program = capture(model, batch, precision="fp32")
    assert num_loops(program) == 2
    loss, _ = run_program(program, {n: p.detach() for n, p in model.named_parameters()}, {}, batch, 0)
    torch.testing.assert_close(loss, model(**batch).detach(), rtol=1e-6, atol=0.0)


def test_few_steps_write_as_they_did() -> None:
    def short(net: Net, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for t in range(4):
            out[:, t] = x[:, t].sin()
        return out * x

    assert num_loops(held_against_eager(Net(short).double(), {"x": torch.randn(3, STEPS, WIDTH).double()})) == 0
