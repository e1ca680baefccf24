"""Rotary embeddings and gated activations in Triton's interpreter, held against the reference kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paraplan.ir.execution.rank_program import LocalValue
from paraplan.kernels import reference_kernels

pytest.importorskip("triton")

from paraplan.ir.machine.kernel_choice import OpCall, chosen
from paraplan.kernels.gpu import elementwise
from paraplan.rules.device_kernels import cuda  # noqa: F401  (records its kernels)
from tests.kernels.gpu.compiling import compiled

CLOSE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def _same(made: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(made.double(), wanted, rtol=CLOSE[made.dtype], atol=CLOSE[made.dtype])


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("transposed", [False, True])
def test_rotary_embeddings(dtype: torch.dtype, transposed: bool) -> None:
    """Heads last in storage, cosines of every sample or of none, ranks of two to four; strides as the reference's."""
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    cases = [
        (drawn(2, 7, 3, 20).transpose(1, 2), drawn(1, 1, 7, 20), drawn(2, 1, 7, 20)),
        (drawn(2, 3, 70, 48)[..., 8:], drawn(70, 40).view(1, 1, 70, 40), drawn(1, 3, 1, 40)),
        (drawn(5, 6, 130), drawn(1, 6, 130), drawn(1, 6, 130)),
        (drawn(9, 2), drawn(9, 2), drawn(1, 2)),
    ]
    for x, cos, sin in cases:
        made, told = (each.rotary(x, cos, sin, transposed) for each in (elementwise, reference_kernels))
        assert made.stride() == told.stride() and made.dtype == told.dtype
        _same(made, reference_kernels.rotary(x.double(), cos.double(), sin.double(), transposed))


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gated_activations(dtype: torch.dtype, activation: str) -> None:
    """Contiguous, halves of one tensor, the other way round, and a gradient that is one number."""
    draw = torch.Generator().manual_seed(0)
    both, g = (torch.randn(shape, generator=draw).to(dtype) for shape in ((3, 4, 2200), (3, 4, 1100)))
    halves = both.chunk(2, -1)
    turned = [x.mT.contiguous().mT for x in halves]
    for gate, up in (halves, turned, [x.contiguous() for x in halves], (halves[0][0, 0, 0], halves[1][1, 1, 1])):
        grad = g[0, 0, 0] if not gate.dim() else g if gate is halves[0] else g[:1, :1, :1].expand_as(gate)
        made = (elementwise.gated(gate, up, activation), *elementwise.gated_grad(grad, gate, up, activation))
        wide = [x.double() for x in (grad, gate, up)]
        wanted = (reference_kernels.gated(*wide[1:], activation), *reference_kernels.gated_grad(*wide, activation))
        for mine, other in zip(made, wanted, strict=True):
            assert mine.is_contiguous() and mine.dtype == dtype
            _same(mine, other)


def test_halves_of_one_tensor_are_read_where_they_are() -> None:
    """And what cannot be seen as dense rows is copied, which is said."""

    def call(*given: Tensor) -> OpCall:
        values = [
            LocalValue(dtype="float32", shape=tuple(x.shape), strides=x.stride(), base="x", storage_bytes=0)
            for x in given
        ]
        return OpCall(values, values[:1], ("%a", "%b", ":silu"))

    halves = torch.zeros(3, 4, 16).chunk(2, -1)
    turned = torch.zeros(3, 8, 4).mT
    for given, copies in ((halves, 0), ((turned, halves[1]), 1), ((turned, turned), 2)):
        kernel = chosen("cuda", 8, "paraplan.gated", call(*given))
        assert kernel is not None
        assert (kernel.launches(call(*given)), kernel.workspace(call(*given))) == (1 + copies, copies * 384)
        assert sum(elementwise._as_rows(x).data_ptr() != x.data_ptr() for x in given) == copies


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from paraplan.kernels.gpu import elementwise
tensors = ("x", "cos", "sin", "out", "g", "gate", "up", "d_gate", "d_up")
four = ("i64",) * 4
types = dict.fromkeys(tensors, "*bf16") | dict.fromkeys(("xs", "cs", "ss", "os"), four) | {"sizes": ("i32",) * 3}
fixed = dict(transposed=False, width=64, kind=2)
for kernel, block in ((elementwise._rotary, 16), (elementwise._gated, 1024), (elementwise._gated_grad, 1024)):
    names = [each.name for each in kernel.params]
    constants = {each.name: {**fixed, "block": block}[each.name] for each in kernel.params if each.is_constexpr}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    print(kernel.__name__, len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]))
"""


def test_kernels_compile_for_a_device_that_is_not_there() -> None:
    assert len(compiled(_COMPILE)) == 3
