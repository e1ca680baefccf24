"""Complex parameters, buffers, constants and operations."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paraplan as pp
from paraplan.capture import capture
from paraplan.ir.errors import CaptureError
from paraplan.runtime.transport.launch import spawn_local
from tests.against_eager import assert_trains_as_eager
from tests.whole.complex_models import Fourier, fields, rows


class Layers(nn.Module):
    """nn.Linear of complex numbers, and what is done to them elementwise."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 6, dtype=torch.cfloat), nn.Linear(6, 4, dtype=torch.cfloat)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.up(torch.complex(x, x.roll(1, -1)))
        z = self.down(z * torch.sigmoid(z.abs()) / (2 + 1j) - 0.5j * z.conj())
        z = z + torch.exp(1j * z.angle()) + z.sgn()
        return F.mse_loss(self.head(z.real) + z.imag, y)


class Rotary(nn.Module):
    """Attention with the original Llama's rotary embedding."""

    def __init__(self, as_buffer: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 8), nn.Linear(8, 4)
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))
        angles = torch.outer(torch.arange(16.0), 1.0 / 100.0 ** (torch.arange(0, 4, 2) / 4))
        table = torch.polar(torch.ones_like(angles), angles)
        if as_buffer:
            self.register_buffer("freqs", table, persistent=False)
        else:
            self.freqs = table

    def turned(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(z * self.freqs[: x.shape[1]].view(1, x.shape[1], 1, -1)).flatten(3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.table(x)
        q, k, v = (layer(h).view(*x.shape, 2, 4) for layer in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in (self.turned(q), self.turned(k), v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(found).flatten(0, 1), y.flatten())


class StateSpace(nn.Module):
    """A diagonal state space layer: a kernel made of parameters alone, applied as a long convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.turn = nn.Parameter(torch.rand(8, 3)), nn.Parameter(torch.rand(8, 3))
        self.out, self.head = nn.Parameter(torch.randn(8, 3, dtype=torch.cfloat)), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        steps = x.shape[1]
        rate = torch.complex(-self.decay.exp(), self.turn)
        kernel = 2 * (self.out.unsqueeze(-1) * torch.exp(rate.unsqueeze(-1) * torch.arange(steps))).sum(1).real
        spectrum = torch.fft.rfft(x.transpose(1, 2), n=2 * steps) * torch.fft.rfft(kernel, n=2 * steps)
        return F.mse_loss(self.head(torch.fft.irfft(spectrum, n=2 * steps)[..., :steps].transpose(1, 2)), y)


class Averaged(nn.Module):
    """A complex buffer that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(5, 4)
        self.register_buffer("mean", torch.zeros(5, dtype=torch.cfloat))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = torch.fft.rfft(self.inner(x))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * found.mean(0))
        return F.mse_loss(self.head(found.abs()), y)


CASES = {
    "fourier": (Fourier, fields()),
    "layers": (Layers, {"x": rows(4, 8), "y": rows(4, 4)}),
    "state space": (StateSpace, {"x": rows(4, 6, 8), "y": rows(4, 6, 4)}),
    "averaged": (Averaged, {"x": rows(4, 8), "y": rows(4, 4)}),
    **{
        f"rotary {kind}": (
            lambda kind=kind: Rotary(kind == "buffer"),
            {"x": (rows(4, 6) * 10).long() % 10, "y": (rows(4, 6) * 9).long() % 4},
        )
        for kind in ("buffer", "attribute")
    },
}


@pytest.mark.parametrize("name", CASES)
def test_complex_numbers_train_as_in_eager(name: str) -> None:
    torch.manual_seed(0)
    make, batch = CASES[name]
    assert_trains_as_eager(make(), batch)


@pytest.mark.parametrize("precision, wide", [("bf16", "complex64"), ("fp32", "complex64"), ("fp64", "complex128")])
def test_a_precision_leaves_complex_parameters_complex(precision: str, wide: str) -> None:
    program = capture(Spectrum(), {"x": rows(4, 8)}, precision=precision)
    assert program.params["weight"].spec.dtype == wide
    assert program.params["weight"].trainable


class Spectrum(nn.Module):
    """Float32 around a transform, as half precision needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(5, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.fft.rfft(self.inner(x).float()) * self.weight).abs().mean()


def test_fp16_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"'weight' is complex.*fp16.*bf16"):
        capture(Spectrum(), {"x": rows(4, 8)}, precision="fp16")


def test_fit_trains_complex_parameters() -> None:
    torch.manual_seed(0)
    model, twin = Fourier(), Fourier()
    twin.load_state_dict(model.state_dict())
    fitted, batch = pp.fit(copy.deepcopy(model), fields(), "64MiB", optimizer="adam"), fields()
    pairs = [(fitted, torch.optim.Adam(fitted.parameters())), (twin, torch.optim.Adam(twin.parameters()))]
    for _ in range(3):
        for each, optimizer in pairs:
            optimizer.zero_grad()
            each(**batch).backward()
            nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            optimizer.step()
    for (name, mine), wanted in zip(fitted.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine, wanted, atol=1e-5), name


def test_two_processes_train_complex_parameters(tmp_path: Path) -> None:
    worker = str(Path(__file__).with_name("complex_worker.py"))
    assert spawn_local(2, worker, [str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("done*")} == {"done0", "done1"}


class Written(nn.Module):
    """Modes of a Fourier transform written into zeros, as Fourier neural operators are mostly spelt."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.weight = nn.Linear(8, 8), nn.Parameter(0.3 * torch.randn(4, 4, 3, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        f = torch.fft.rfft(self.lin(x))
        g = torch.zeros_like(f)
        g[..., :3] = torch.einsum("bix,iox->box", f[..., :3], self.weight)
        g[:, 1] = f[:, 0] * 2
        return torch.fft.irfft(g, n=8).square().mean()


def test_complex_slices_are_written() -> None:
    torch.manual_seed(0)
    assert_trains_as_eager(Written(), {"x": torch.randn(4, 4, 8)})
