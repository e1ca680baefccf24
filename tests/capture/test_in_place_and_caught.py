"""Writes under no_grad and of functions of autograd, tensors detached in place, and refusals that forward catches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paraplan.capture.capture import capture
from paraplan.ir.errors import CaptureError
from tests.capture.looped import STEPS, WIDTH, Net, held_against_eager

Body = Callable[[Net, Tensor], Tensor]


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(3, STEPS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}


def _copied(net: Net, h: Tensor) -> Tensor:
    z = torch.zeros_like(h)
    with torch.no_grad():
        z.copy_(h)
    z[:, 0] = h[:, 0]
    return z


def _scattered(net: Net, h: Tensor) -> Tensor:
    mask = torch.zeros_like(h)
    with torch.no_grad():
        mask.scatter_(-1, h.topk(2, -1)[1], 1.0)
    mask[:, 0] = h[:, 0].sigmoid()
    return h * mask


def _made_there(net: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        z = h * 2
        z += h
    z.mul_(net.inner(h))
    return z


def _normalised(net: Net, h: Tensor) -> Tensor:
    z = net.rates.detach().clone()
    with torch.no_grad():
        z.div_(z.norm())
    z.mul_(h[0, :, 0])
    return z + h.mean((0, 2))


WRITES: dict[str, Body] = {
    "copy_": _copied,
    "scatter_": _scattered,
    "made there": _made_there,
    "div_": _normalised,
}


@pytest.mark.parametrize("how", WRITES)
def test_what_is_written_after_a_write_under_no_grad_has_its_gradient(how: str) -> None:
    torch.manual_seed(0)
    held_against_eager(Net(WRITES[how]).double(), batch())


def _detached(net: Net, h: Tensor) -> Tensor:
    h = net.inner(h).tanh()
    h.detach_()
    return h * net.rates[:, None]


def _truncated(net: Net, h: Tensor) -> Tensor:
    state = h[:, 0]
    for step in range(4):
        state = torch.tanh(net.inner(state) + h[:, step])
        if step == 1:
            torch.detach_(state)
    return state


@pytest.mark.parametrize("body", [_detached, _truncated])
def test_a_tensor_detached_in_place(body: Body) -> None:
    torch.manual_seed(0)
    held_against_eager(Net(body).double(), batch())


def test_numbers_that_are_equal_in_another_dtype_are_not_taken_for_each_other() -> None:
    def body(net: Net, h: Tensor) -> Tensor:
        half = torch.tensor(0.5, dtype=torch.float16)
        whole = h * torch.tensor(2) + h * torch.tensor(2.5) + h * half + h * torch.tensor(0.5 + 2**-20)
        kept = torch.where(torch.tensor([True] * WIDTH), h, 0.0)
        return whole + kept * torch.tensor([0.4375, 0.75, 0.5, 0.25]) + torch.tensor([0, 0, 0, 0])

    torch.manual_seed(0)
    held_against_eager(Net(body).double(), batch())


def _numbers(h: Tensor) -> Tensor:
    for _ in range(int((h > 0).sum().item())):
        h = h * 1.1
    return h


CAUGHT: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "grad": (lambda h: torch.autograd.grad(h.sum(), h), "torch.autograd.grad is called in forward"),
    "hook": (lambda h: h.register_hook(lambda g: g.clamp(-1e-3, 1e-3)), "register_hook is called"),
    "func": (lambda h: torch.func.grad(lambda a: (a**3).sum())(h), "a transform of torch.func"),
    "numpy": (lambda h: h.detach().numpy(), "numpy"),
    "pointer": (lambda h: h.data_ptr() % 8, "data pointer"),
    "branch": (lambda h: 1 if h.max().item() > 0.3 else 2, "depends on tensor data"),
    "range": (_numbers, "depends on tensor data"),
    "seed": (lambda h: torch.manual_seed(3), "seeds the generator"),
}


@pytest.mark.parametrize("what", CAUGHT)
def test_what_a_trace_refuses_is_not_caught(what: str) -> None:
    ask, said = CAUGHT[what]

    def body(net: Net, h: Tensor) -> Tensor:
        with contextlib.suppress(Exception):
            ask(h)
            h = h * 2
        return h

    with pytest.raises(CaptureError, match=said) as caught:
        capture(Net(body).double(), batch(), precision="fp64")
    assert "test_in_place_and_caught.py:" in str(caught.value)


class Doubled(torch.autograd.Function):
    """Writes what it is given, and says so; its gradient is five times that."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * 5


class Counting(torch.autograd.Function):
    """Counts in a buffer, in its forward or its backward."""

    @staticmethod
    def forward(ctx, x: Tensor, count: Tensor, later: bool) -> Tensor:
        ctx.count, ctx.later = count, later
        if not later:
            count.add_(1)
        return x * 1

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.later:
            ctx.count.add_(1)
        return grad * 2, None, None


class CountingIn(torch.autograd.Function):
    """Counts in a buffer of a module it is given."""

    @staticmethod
    def forward(ctx, x: Tensor, module: nn.Module) -> Tensor:
        module.count.add_(1)
        return x * module.count

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2, None


def test_a_function_that_writes_what_it_is_given() -> None:
    def body(net: Net, h: Tensor) -> Tensor:
        h = h * 1
        Doubled.apply(h)  # whose result is h
        return h

    torch.manual_seed(0)
    held_against_eager(Net(body).double(), batch())


def _viewed(net: Net, h: Tensor) -> Tensor:
    h = h * 1
    Doubled.apply(h[:, :2])
    return h


def _viewed_before(net: Net, h: Tensor) -> Tensor:
    h = h * 1
    before = h[:, :2]
    h = Doubled.apply(h)
    return net.inner(h).mean() + before


@pytest.mark.parametrize(
    "body",
    [
        _viewed,
        _viewed_before,
        lambda net, h: Counting.apply(h, net.count, False),
        lambda net, h: Counting.apply(h, net.count, True),
        lambda net, h: CountingIn.apply(h, net),
    ],
)
def test_functions_that_write_what_goes_by_another_name_are_refused(body: Body) -> None:
    with pytest.raises(CaptureError, match="in place"):
        capture(Net(body).double(), batch(), precision="fp64")


def test_a_module_left_by_an_exception() -> None:
    class Stops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError

    def body(net: Net, h: Tensor) -> Tensor:
        with contextlib.suppress(ValueError):
            h = net.stops(h) * 2
        return net.inner(h)

    torch.manual_seed(0)
    net = Net(body)
    net.stops = nn.Sequential(nn.Identity(), Stops())
    held_against_eager(net.double(), batch())


def test_an_input_that_is_written_is_named() -> None:
    class Masked(Net):
        def forward(self, x: Tensor) -> Tensor:
            x[:, 0] = 1
            return self.linear(x).mean()

    with pytest.raises(CaptureError, match="writes the input 'x' in place"):
        capture(Masked(_copied).double(), batch(), precision="fp64")
