"""Has Hugging Face's experts compute, while exporting, with the canonical op, or on all tokens where it cannot.

transformers dispatches every mixture's experts through one interface (`integrations.moe`); its own implementations
loop over data or call kernels of one dtype. Experts whose inner function the canonical op does not know (biases,
other gates) are computed densely, every expert on every token: more work, but experts are still a dim of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paraplan.capture.canonical import experts  # noqa: F401  (defines torch.ops.paraplan.experts)

_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELU": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLU": "relu",
}


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of an experts module.

    Args:
        self: the module.
        hidden_states: [tokens, hidden].
        top_k_index, top_k_weights: [tokens, choices].
    """
    known = _known_activation(self)
    if known is None:
        return _dense(self, hidden_states, top_k_index, top_k_weights)
    w_in = self.gate_up_proj if _is(self, "has_gate") else self.up_proj
    parts = 2 if _is(self, "has_gate") else 1
    inner = w_in.view(w_in.shape[0], parts, w_in.shape[1] // parts, w_in.shape[2])
    made = torch.ops.paraplan.experts(
        hidden_states, top_k_index, top_k_weights, inner, self.down_proj, known, self.num_experts, 0
    )
    return made.to(hidden_states.dtype)  # type: ignore[no-any-return]


def _known_activation(module: Any) -> str | None:
    """The activation's name for the canonical op, or None where the module is not of its form."""
    plain = module._apply_gate.__func__ if hasattr(module._apply_gate, "__func__") else module._apply_gate
    own_gate = _is(module, "has_gate") and plain.__name__ != "_default_apply_gate"
    unlike = ("is_transposed", "has_bias", "has_post_expert_norm")
    other = any(_is(module, name) for name in unlike) or not _is(module, "is_concatenated")
    act = getattr(module, "act_fn", None)
    return None if own_gate or other or not isinstance(act, nn.Module) else _ACTIVATIONS.get(type(act).__name__)


_UNSAID = {"has_gate": True, "is_concatenated": True}
"""What a form is where a version of transformers has no such attribute, for it knows of no other; of others, not so."""


def _is(module: Any, form: str) -> bool:
    """Whether experts are of a form: transposed, with biases, gates, gates before the other half, a norm behind."""
    return bool(getattr(module, form, _UNSAID.get(form, False)))


def _dense(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Every expert on every token, weighted with zero where it was not chosen."""
    count, tokens = self.num_experts, hidden_states.shape[0]

    def product(x: Tensor, name: str) -> Tensor:
        weight = getattr(self, name)
        made = torch.bmm(x, weight if _is(self, "is_transposed") else weight.transpose(1, 2))
        return made + getattr(self, f"{name}_bias").unsqueeze(1) if _is(self, "has_bias") else made

    gated = _is(self, "has_gate")
    wide = product(hidden_states.unsqueeze(0).expand(count, -1, -1), "gate_up_proj" if gated else "up_proj")
    inner = self._apply_gate(wide) if gated else self.act_fn(wide)
    out = product(inner, "down_proj")
    if _is(self, "has_post_expert_norm"):
        out = self.post_expert_norm(out)
    shares = top_k_weights.new_zeros(tokens, count).scatter_add(1, top_k_index, top_k_weights)
    return (out * shares.t().unsqueeze(-1).to(out.dtype)).sum(0).to(hidden_states.dtype)
