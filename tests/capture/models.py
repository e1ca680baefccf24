"""Tiny models and batches the capture tests share."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from paraplan.capture import capture, run_program
from paraplan.ir.model.program import Program

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


class MLP(nn.Module):
    """Residual blocks and a cross-entropy."""

    def __init__(self, layers: int = 2, drop: float = 0.0):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.drop = nn.Dropout(drop)
        self.head = nn.Linear(16, 7)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.drop(F.gelu(block(x)))
        return F.cross_entropy(self.head(x), y)


def build(kind: str, layers: int = 2, drop: float = 0.0) -> nn.Module:
    """A tiny model in train mode."""
    torch.manual_seed(0)
    small = {
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
    }
    if kind == "mlp":
        return MLP(layers, drop).train()
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=layers,
            n_embd=32,
            n_head=4,
            vocab_size=48,
            n_positions=32,
            resid_pdrop=drop,
            embd_pdrop=drop,
            attn_pdrop=drop,
            bos_token_id=1,
            eos_token_id=2,
        )
        return transformers.GPT2LMHeadModel(config).train()
    if kind == "llama":
        config = transformers.LlamaConfig(
            num_hidden_layers=layers, num_key_value_heads=2, attention_dropout=drop, **small
        )
        return transformers.LlamaForCausalLM(config).train()
    if kind == "bert":
        config = transformers.BertConfig(
            num_hidden_layers=layers, hidden_dropout_prob=drop, attention_probs_dropout_prob=drop, **small
        )
        return transformers.BertForMaskedLM(config).train()
    assert kind == "t5"
    config = transformers.T5Config(
        num_layers=layers,
        d_model=32,
        d_ff=64,
        num_heads=4,
        d_kv=8,
        vocab_size=48,
        dropout_rate=drop,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config).train()


@functools.cache
def captured(kind: str, layers: int = 2, drop: float = 0.0, precision: str = "fp32") -> Program:
    """The program of `build(...)` on `batch_of(kind)`, captured once."""
    return capture(build(kind, layers, drop), batch_of(kind), precision=precision)


def batch_of(kind: str) -> dict[str, Tensor]:
    """A batch with ignored labels."""
    g = torch.Generator().manual_seed(1)
    if kind == "mlp":
        return {"x": torch.randn(6, 16, generator=g), "y": torch.randint(0, 7, (6,), generator=g)}
    ids = torch.randint(3, 48, (4, 8), generator=g)
    labels = torch.randint(3, 48, (4, 8), generator=g)
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def state_of(program: Program, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model's parameters and buffers in the program's dtypes."""
    params = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    return (
        {name: params[name].detach().to(getattr(torch, spec.spec.dtype)) for name, spec in program.params.items()},
        {name: buffers[name].to(getattr(torch, spec.dtype)) for name, spec in program.buffers.items()},
    )


def run(
    program: Program, model: nn.Module, batch: Mapping[str, Tensor], seed: int = 0
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The program's loss and gradients with the model's weights."""
    given = {name: x.to(getattr(torch, program.batch[name].spec.dtype)) for name, x in batch.items()}
    return run_program(program, *state_of(program, model), given, seed)


def eager(
    model: nn.Module, batch: Mapping[str, Tensor], precision: str, loss_fn=None
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The user's own model: loss and gradients."""
    dtype = DTYPES[precision]
    own = copy.deepcopy(model).to(dtype)
    given = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
    out = own(**given)
    loss = loss_fn(out, given) if loss_fn else (out if isinstance(out, Tensor) else out.loss)
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in own.named_parameters()}


def worst_error(found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None]) -> float:
    """max over tensors of |a − b| / max(|b|, 1e-6 · the largest gradient)."""
    largest = max(float(b.abs().max()) for b in wanted.values() if b is not None)
    worst = 0.0
    for name, b in wanted.items():
        a = found[name]
        if b is None:
            assert a is None or not a.any(), name
            continue
        assert a is not None, f"{name} has no gradient"
        worst = max(worst, float((a - b).abs().max()) / max(float(b.abs().max()), 1e-6 * largest))
    return worst
