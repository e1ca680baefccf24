"""Forms that other versions of transformers have than the one that is installed, written out here: balancing losses,
experts, dropped layers. Against eager in float64."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paraplan.capture import capture
from paraplan.capture.exporting.hf_experts import experts_forward
from paraplan.ir.errors import CaptureError
from paraplan.kernels.torch_private import is_fake
from tests.against_eager import assert_trains_as_eager

TOKENS, HIDDEN, INNER, EXPERTS, CHOICES = 8, 8, 6, 4, 2
BATCH = {"x": torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0))}

Counts = Callable[[Tensor], Tensor]
COUNTS: dict[str, Counts] = {
    "4.50": lambda chosen: F.one_hot(chosen, EXPERTS).sum((0, 1)),
    "5.17": lambda chosen: torch.bincount(chosen.reshape(-1), minlength=EXPERTS),
    "5.23": lambda chosen: torch.histc(chosen.reshape(-1).double(), bins=EXPERTS, min=0, max=EXPERTS),
}


class Balanced(nn.Module):
    """A router with the loss that balances it, as `load_balancing_loss_func` of Mixtral."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.gate, self.counts = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, EXPERTS, bias=False), counts

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        total = shares = 0
        for _ in range(2):  # a layer each
            x = torch.tanh(self.up(x))
            odds = torch.softmax(self.gate(x), -1)
            total = total + self.counts(torch.topk(odds, CHOICES, dim=-1).indices).to(odds.dtype)
            shares = shares + odds.sum(0)
        return x.pow(2).mean() + EXPERTS * (total / (2 * TOKENS) * (shares / (2 * TOKENS)).unsqueeze(0)).sum()


@pytest.mark.parametrize("version", COUNTS)
def test_tokens_of_experts_are_counted_as_in_eager(version: str) -> None:
    assert_trains_as_eager(Balanced(COUNTS[version]), BATCH)


ANGLES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "5.17": lambda rates, steps: (rates[None, :, None] @ steps[None, None, :]).transpose(1, 2),
    "5.23": lambda rates, steps: steps[None, :, None] * rates,
}


class Rotated(nn.Module):
    """Layers that all read the cosines of one table of angles."""

    def __init__(self, angles: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.angles = angles
        self.register_buffer("rates", torch.rand(HIDDEN))
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        turned = self.angles(self.rates, torch.arange(TOKENS).to(self.rates.dtype)).cos()[0]
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * turned
        return x.pow(2).mean()


@pytest.mark.parametrize("version", ANGLES)
def test_angles_are_made_in_every_layer(version: str) -> None:
    torch.manual_seed(0)
    program = assert_trains_as_eager(Rotated(ANGLES[version]), BATCH)
    assert (len(program.segments), len(program.kinds)) == (5, 3)


class Experts(nn.Module):
    """Experts with the attributes that transformers gives them, of which there were fewer before 5.10."""

    def __init__(self, biased: bool, **attributes: bool) -> None:
        super().__init__()
        self.num_experts, self.act_fn, self.has_bias = EXPERTS, nn.SiLU(), biased
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN) / 3)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) / 3)
        if biased:
            self.gate_up_proj_bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER))
            self.down_proj_bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        for name, value in attributes.items():
            setattr(self, name, value)

    def _default_apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self.act_fn(gate) * up  # type: ignore[no-any-return]

    _apply_gate = _default_apply_gate

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """While exporting as paraplan has it, else every expert on every token."""
        if is_fake(x):
            return experts_forward(self, x, chosen, weights)
        made = []
        for expert in range(EXPERTS):
            bias = (self.gate_up_proj_bias[expert], self.down_proj_bias[expert]) if self.has_bias else (None, None)
            inner = self._apply_gate(F.linear(x, self.gate_up_proj[expert], bias[0]))
            made.append(F.linear(inner, self.down_proj[expert], bias[1]))
        shares = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter_add(1, chosen, weights)
        return (torch.stack(made, 1) * shares.unsqueeze(-1)).sum(1)


class Mixture(nn.Module):
    """Experts that a router chooses."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.up, self.gate, self.experts = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, EXPERTS), experts

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        x = torch.tanh(self.up(x))
        weights, chosen = torch.topk(torch.softmax(self.gate(x), -1), CHOICES, dim=-1)
        return (x + self.experts(x, chosen, weights)).pow(2).mean()


ATTRIBUTES: dict[str, dict[str, bool]] = {
    "5.1": {"is_transposed": False},
    "5.5": {"is_transposed": False, "has_gate": True},
    "5.10": {"is_transposed": False, "has_gate": True, "is_concatenated": True},
    "5.23": {"is_transposed": False, "has_gate": True, "is_concatenated": True, "has_post_expert_norm": False},
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("version", ATTRIBUTES)
def test_experts_of_every_version_are_those_of_eager(version: str, biased: bool) -> None:
    torch.manual_seed(0)
    program = assert_trains_as_eager(Mixture(Experts(biased, **ATTRIBUTES[version])), BATCH)
    own = [op for kind in program.kinds for op in kind.graph.ops if op.target == "paraplan.experts"]
    assert len(own) == (0 if biased else 1)


LOOPS = """
def moe(experts, x, chosen):
    for expert, layer in enumerate(experts):
        rows, _ = torch.where(chosen == expert)
        x = x.index_add(0, rows, layer(x[rows]))
        for row in rows: x = x + row
    return x
"""


@pytest.mark.parametrize(("interface", "said"), [(None, True), ("get_interface", False)])
def test_a_mixture_of_earlier_transformers_is_refused_by_version(
    monkeypatch: pytest.MonkeyPatch, interface: str | None, said: bool
) -> None:
    names: dict[str, Any] = {"torch": torch}
    exec(compile(LOOPS, "/site-packages/transformers/models/old/modeling_old.py", "exec"), names)
    held = type("ExpertsInterface", (), {} if interface is None else {interface: None})
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", types.SimpleNamespace(ExpertsInterface=held))
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(__version__="4.57.6"))

    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return names["moe"](self.layers, x, (x > 0).any(1).long()[:, None]).mean()  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match=r"in forward: .*depends on tensor data") as fault:
        capture(Looped(), BATCH)
    assert ("transformers 5.1 and later, and this is 4.57.6" in str(fault.value)) is said


MASKS = """
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

def _vmap_for_bhqkv(mask_function, bh_indices=True):
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        mask_function = torch.vmap(mask_function, in_dims=dims, out_dims=0)
    return mask_function

def and_masks(*masks):
    def both(b, h, q, kv):
        result = q.new_ones((), dtype=torch.bool)
        for mask in masks:
            result = result & mask(b, h, q, kv)
        return result
    return both

def causal(b, h, q, kv):
    return kv <= q

def padded(mask):
    return lambda b, h, q, kv: mask[b, kv]

def made(size, length, mask):
    with TransformGetItemToIndex():
        return _vmap_for_bhqkv(mask)(torch.arange(size), torch.arange(1), torch.arange(length), torch.arange(length))
"""


class Masked(nn.Module):
    """Attention under a mask of one's own, or of none, beside those of transformers 4.57."""

    def __init__(self, own: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self.up, self.own = nn.Linear(HIDDEN, HIDDEN), own

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """A loss."""
        masking, q = sys.modules["transformers.masking_utils"], self.up(x)[:, None]
        own = () if self.own is None else (self.own,)
        both = masking.made(*mask.shape, masking.and_masks(masking.causal, masking.padded(mask > 0), *own))
        return F.scaled_dot_product_attention(q, q, q, both).pow(2).mean()


def test_masks_that_are_mapped_over_indices_are_those_of_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    masking = types.ModuleType("transformers.masking_utils")
    exec(MASKS, vars(masking))
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", masking)
    mask = torch.ones(4, TOKENS, dtype=torch.int64)
    mask[1, 5:] = 0
    batch = {"x": torch.randn(4, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0)), "mask": mask}
    torch.manual_seed(0)
    assert_trains_as_eager(Masked(None), batch)
    with pytest.raises(CaptureError, match=r"a transform of torch\.func"):
        capture(Masked(lambda b, h, q, kv: (kv > q - 3).any()), batch)
