"""What forward asks of dtypes and of how it is run has eager's answer while it is captured."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.compiler
from torch import Tensor, nn
from torch.nn import functional as F

import paraplan as pp
from paraplan.capture import capture
from paraplan.ir.errors import CaptureError


class Asking(nn.Module):
    """A loss that is twice as large where the question's answer is yes."""

    def __init__(self, question: Callable[[nn.Module, Tensor, Tensor], bool]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.question = nn.Linear(6, 4), question

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        return F.cross_entropy(h, y) * (2.0 if self.question(self, x, h) else 1.0)


QUESTIONS: dict[str, Callable[[nn.Module, Tensor, Tensor], bool]] = {
    "input": lambda model, x, h: x.dtype == torch.float64,
    "weight": lambda model, x, h: model.body.weight.dtype == torch.float64,  # type: ignore[union-attr]
    "result": lambda model, x, h: h.element_size() == 8,
    "finfo": lambda model, x, h: torch.finfo(h.dtype).bits == 64,
    "compiling": lambda model, x, h: torch.compiler.is_compiling(),
    "exporting": lambda model, x, h: torch.compiler.is_exporting(),
}


def _losses(question: str, dtype: torch.dtype, precision: str) -> tuple[float, float]:
    model = Asking(QUESTIONS[question]).to(dtype)
    batch = {"x": torch.randn(4, 6, dtype=dtype), "y": torch.tensor([0, 3, 1, 2])}
    plan = pp.compile(model, "local:1", example_inputs=batch, optimizer="sgd", precision=precision)
    return float(plan.executable(copy.deepcopy(model)).step(batch)), float(model(**batch))


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_float64_model_is_captured_as_one(question: str) -> None:
    assert len(set(map("{:.14f}".format, _losses(question, torch.float64, "fp64")))) == 1


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_float32_model_is_asked_in_float32(question: str) -> None:
    for precision in ("fp32", "fp64"):
        made, eager = _losses(question, torch.float32, precision)
        assert made == pytest.approx(eager, rel=1e-6), precision


def test_a_float64_mask_of_a_float64_model() -> None:
    """Attention takes a float mask of its queries' dtype alone."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=torch.float64)
            return self.body(x, mask).square().mean()  # type: ignore[no-any-return]

    model, batch = Masked().double(), {"x": torch.randn(4, 5, 8, dtype=torch.float64)}
    plan = pp.compile(model, "local:1", example_inputs=batch, optimizer="sgd", precision="fp64")
    made = float(plan.executable(copy.deepcopy(model)).step(batch))
    assert made == pytest.approx(float(model(**batch)), rel=1e-13)


class Rotary(nn.Module):
    """A table made in float32, whatever the input's dtype."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.linear, self.proj = linear, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        table = torch.arange(4, dtype=torch.float32)[:, None] / torch.arange(1, 9)
        turned = self.proj(x) * table.cos()
        return (self.proj(turned) if self.linear else turned @ self.proj(x).mT).square().mean()


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_dtype_that_precision_brought_is_told_so(precision: str, linear: bool) -> None:
    with pytest.raises(CaptureError, match=rf"precision='{precision}'.*to\(x\.dtype\).*precision='fp32'"):
        capture(Rotary(linear), {"x": torch.randn(2, 4, 8)}, precision=precision)
    capture(Rotary(linear), {"x": torch.randn(2, 4, 8)}, precision="fp32")


class Normed(nn.Module):
    """A norm whose eps torch chooses, of what is small beside it."""

    def __init__(self, eps: float | None) -> None:
        super().__init__()
        self.norm, self.proj = nn.RMSNorm(8, eps=eps), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.norm(x)).float().square().mean()


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16", "fp16"])
def test_the_eps_that_torch_chooses_is_that_of_what_it_computes_in(precision: str) -> None:
    torch.manual_seed(0)
    model, x = Normed(None), torch.randn(4, 8) * 1e-3
    dtype = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    wanted = copy.deepcopy(model).to(dtype)(x.to(dtype))
    plan = pp.compile(model, "local:1", example_inputs={"x": x}, precision=precision)
    loss = plan.executable(model).step({"x": x})
    assert float(loss) == pytest.approx(float(wanted), rel=1e-2 if dtype.itemsize == 2 else 1e-6)


@pytest.mark.parametrize("p", [-0.1, 1.5])
def test_a_probability_that_is_none_is_refused(p: float) -> None:
    class Attention(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return F.scaled_dot_product_attention(x, x, x, dropout_p=p).sum()

    with pytest.raises(CaptureError, match=rf"test_as_in_eager.py:\d+, .*dropout's probability is {p}"):
        capture(Attention(8, 8), {"x": torch.randn(2, 2, 4, 8)})


def test_a_half_beside_parameters_that_fp32_takes_wide_is_told_so() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(8, 8), nn.Linear(8, 4).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.narrow(self.wide(x).bfloat16()).float().square().mean()

    with pytest.raises(CaptureError, match=r"precision='fp32' parameters are float32.*precision='bf16'"):
        capture(Mixed(), {"x": torch.randn(4, 8)})
    capture(Mixed(), {"x": torch.randn(4, 8)}, precision="bf16")
