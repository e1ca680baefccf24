"""Calls recorded by copying are recorded as tracing records them: the same graph, node for node, the same program."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.export import ExportedProgram
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.zoo import build as of_zoo
from paraplan.capture import capture
from paraplan.capture.exporting import export
from paraplan.capture.repeating.repeated_calls import Repeated
from paraplan.capture.torch_private import Recording
from paraplan.ir.errors import CaptureError
from paraplan.ir.struct import to_json
from paraplan.kernels.torch_private import tree_leaves
from tests.capture.models import batch_of, build

LAYERS = 5
WIDTH = 8


class _Never(Repeated):
    """All calls are traced."""

    def begin(self, root: object) -> None:
        """Nothing."""


class _Captured(NamedTuple):
    """What a capture came to: its exports before they are made functional, the program or error, and how many nodes
    were copied."""

    exports: list[list[str]]
    outcome: bytes | str
    copied: int


def _lines(module: fx.GraphModule) -> list[str]:
    """A graph with its regions, all that capture reads of it and more."""
    found = []
    for node in module.graph.nodes:
        values = [
            (x.dtype, tuple(x.shape), x.stride(), x.storage_offset(), x.device, x.requires_grad)
            if isinstance(x, Tensor)
            else x
            for x in tree_leaves(node.meta.get("val"))
        ]
        kept = (node.meta.get("stack_trace"), node.meta.get("nn_module_stack"))
        found.append(f"{node.name} {node.op} {node.target} {node.args} {node.kwargs} {values} {kept}")
    for name, child in module.named_children():
        if isinstance(child, fx.GraphModule):
            found += [name, *_lines(child)]
    return found


def _captured(monkeypatch: pytest.MonkeyPatch, mode: type[Repeated], make: Callable[[], Any]) -> _Captured:
    exports: list[list[str]] = []
    copied: list[object] = []
    made_functional, append = export.functional, Recording.append

    def functional(program: ExportedProgram) -> ExportedProgram | None:
        exports.append([*_lines(program.graph_module), str(program.graph_signature)])
        return made_functional(program)

    def counted(self: Recording, target: Any, *rest: Any) -> fx.Node:
        copied.append(target)
        return append(self, target, *rest)

    torch.manual_seed(0)
    model, given, how = make()
    with monkeypatch.context() as patch:
        patch.setattr(export, "Repeated", mode)
        patch.setattr(export, "functional", functional)
        patch.setattr(Recording, "append", counted)
        try:
            outcome: bytes | str = to_json(capture(model, given, **how))
        except CaptureError as fault:
            outcome = str(fault)
    return _Captured(exports, outcome, len(copied))


def _compared(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]) -> _Captured:
    """What is captured, which is what is captured where all calls are traced."""
    whole = _captured(monkeypatch, _Never, make)
    found = _captured(monkeypatch, Repeated, make)
    assert not whole.copied
    assert [len(lines) for lines in found.exports] == [len(lines) for lines in whole.exports]
    for lines, others in zip(found.exports, whole.exports, strict=True):
        assert next(((a, b) for a, b in zip(lines, others, strict=True) if a != b), None) is None
    assert found.outcome == whole.outcome
    return found


@pytest.mark.parametrize("kind", ["mlp", "gpt2", "llama", "bert", "t5"])
@pytest.mark.parametrize("drop", [0.0, 0.1])
def test_layers_of_language_models(monkeypatch: pytest.MonkeyPatch, kind: str, drop: float) -> None:
    found = _compared(monkeypatch, lambda: (build(kind, 4, drop), batch_of(kind), {"precision": "bf16"}))
    assert isinstance(found.outcome, bytes)
    assert found.copied > sum(map(len, found.exports)) / 5


@pytest.mark.parametrize(
    "name",
    ["vit", "swin", "convnext", "resnet", "unet", "mixtral", "qwen2_moe", "deepseek_v3", "gpt2_lora", "lstm", "clip"],
)
def test_models_of_the_zoo(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def make() -> tuple[nn.Module, dict[str, Tensor], dict[str, object]]:
        small = of_zoo(name, 0.1)
        return small.model, small.batch, {"loss_fn": small.loss_fn, "precision": "fp64", "batch_dims": small.batch_dims}

    assert isinstance(_compared(monkeypatch, make).outcome, bytes)


class Layer(nn.Module):
    """A residual block that knows its place."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.up, self.down, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.kept: Any = None

    def forward(self, x: Tensor) -> Any:
        """x: [batch, width]."""
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Stack(nn.Module):
    """Layers in order, and a loss."""

    def __init__(self, kind: Callable[[int], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(index) for index in range(LAYERS))
        self.notes: list[Any] = []

    def run(self, x: Tensor) -> Tensor:
        """All layers."""
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, width]."""
        return self.run(x).square().mean()


class _Alternating(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) if self.index % 2 else x * self.index + super().forward(x)


class _ByIndex(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (1.0 / (self.index + 1)) + (self.index == 3)


class _Rates(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.drop.p = index / 10


class _Buffers(Layer):
    def forward(self, x: Tensor) -> Any:
        self.seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x) + self.seen


class _Normed(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.norm(super().forward(x))


class _InPlace(Layer):
    def forward(self, x: Tensor) -> Any:
        y = self.up(x)
        first, second = y.chunk(2, -1)
        view = y.view(-1)
        y += x
        first = first.relu_()
        return F.relu(y, inplace=True) + torch.cat((second, first), -1) + view.view_as(y).mul_(2)


class _WritesItsArgument(Layer):
    def forward(self, x: Tensor) -> Any:
        x.mul_(2)
        return self.up(x)


class _ReturnsItsArgument(Layer):
    def forward(self, x: Tensor) -> Any:
        if self.index % 2:
            return x.to(x.dtype).contiguous()
        return super().forward(x).reshape(x.shape)


class _Tuples(Layer):
    def forward(self, x: Any) -> Any:
        x, rest = x if isinstance(x, tuple) else (x, None)
        return super().forward(x), x if rest is None else rest + x


class _Frozen(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.up.weight.requires_grad_(index != 2)


class _Adapted(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        if index in (1, 3):
            self.low, self.high = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + (self.high(self.low(x)) if hasattr(self, "low") else 0)


class _Mixed(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.dtype = torch.float64 if index % 2 else torch.float32

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + x.to(self.dtype).exp().float()


class _Constants(Layer):
    def forward(self, x: Tensor) -> Any:
        scale = torch.tensor([float(self.index), 1.0])
        return super().forward(x) * scale.sum() + torch.arange(WIDTH) * x.new_tensor(0.5)


class _NoGrad(Layer):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            scale = x.abs().amax()
        with torch.set_grad_enabled(self.index != 1):
            more = self.up(x).sigmoid()
        return super().forward(x) / (scale + 1) + more


class _Autocast(Layer):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.index > 1):
            return super().forward(x).float()


class _Flipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return -ctx.scale * grads[0], None


class _Functions(Layer):
    def forward(self, x: Tensor) -> Any:
        return _Flipped.apply(super().forward(x), 1.0 + self.index // 2)


class _Data(Layer):
    def forward(self, x: Tensor) -> Any:
        self.seen.data = x.detach().mean(0)
        return super().forward(x) + self.up.weight.data.sum(0)


class _Mapped(Layer):
    def forward(self, x: Tensor) -> Any:
        mapped: Tensor = torch.vmap(lambda row: row * row.sum())(x)
        return super().forward(x) + mapped


class _Counted(Layer):
    def forward(self, x: Tensor) -> Any:
        counts = torch.bincount(x.detach().argmax(1), minlength=WIDTH)
        chance = torch.rand([])
        return super().forward(x) + (counts if chance < 1.0 else 0)


_COUNT = [0]


class _Global(Layer):
    def forward(self, x: Tensor) -> Any:
        _COUNT[0] += 1
        return super().forward(x) * (2.0 if _COUNT[0] % 3 == 0 else 1.0)


class _Random(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * random.random()


class _Switched(Layer):
    def forward(self, x: Tensor) -> Any:
        self.up.weight.requires_grad_(False)
        y = super().forward(x)
        self.up.weight.requires_grad_(True)
        return y + self.up(x)


class _Loop(Layer):
    def forward(self, x: Tensor) -> Any:
        h = x[:, 0]
        for step in range(WIDTH):
            h = h * 0.5 + x[:, step]
        return super().forward(x) + h.unsqueeze(1)


class _History(Layer):
    """What autograd would run is looked at."""

    def forward(self, x: Tensor) -> Any:
        made = self.up(x).tanh()
        return super().forward(x) * (2.0 if "Tanh" in type(made.grad_fn).__name__ else 1.0)


class _ViewsOfWritten(Layer):
    """A view asks for itself anew once its base is written."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        flat = y.view(-1) if self.index % 2 else y.clone().view(-1)
        y.add_(flat.view_as(y))
        return y + flat.view_as(y)


class _Tangents(Layer):
    def forward(self, x: Tensor) -> Any:
        with forward_ad.dual_level():
            given = forward_ad.make_dual(x, torch.ones_like(x) * (self.index + 1))
            tangent = forward_ad.unpack_dual(torch.tanh(given)).tangent
        return super().forward(x) + tangent


class _Kernels(Layer):
    def forward(self, x: Tensor) -> Any:
        q = x.view(2, 2, 1, 8).transpose(1, 2)
        with sdpa_kernel(SDPBackend.MATH if self.index % 2 else SDPBackend.FLASH_ATTENTION):
            attended = F.scaled_dot_product_attention(q, q, q)
        return super().forward(attended.transpose(1, 2).reshape(x.shape))


class _Inference(Layer):
    def forward(self, x: Tensor) -> Any:
        with torch.inference_mode(self.index % 2 == 0):
            scale = torch.tanh(x)
        return super().forward(x) * scale.clone()


LAYER_KINDS = [
    Layer,
    *(_Alternating, _ByIndex, _Rates, _Buffers, _Normed, _InPlace, _WritesItsArgument, _ReturnsItsArgument, _Frozen),
    *(_Adapted, _Mixed, _Constants, _NoGrad, _Autocast, _Functions, _Data, _Mapped, _Counted, _Global, _Random),
    *(_Switched, _Loop, _History, _ViewsOfWritten, _Tangents, _Kernels, _Inference),
]


def _given() -> dict[str, Tensor]:
    return {"x": torch.randn(4, WIDTH)}


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_layers_that_differ_or_have_effects(monkeypatch: pytest.MonkeyPatch, kind: type[Layer]) -> None:
    def make() -> tuple[nn.Module, dict[str, Tensor], dict[str, object]]:
        _COUNT[0] = 0
        return Stack(kind), _given(), {}

    _compared(monkeypatch, make)


class _Leaking(Stack):
    """What layers leave in lists, attributes and hooks is read after them."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.get_submodule("up").register_forward_hook(lambda module, given, made: self.notes.append(made))
        self.layers[2].register_forward_hook(lambda module, given, made: made * 2)

    def forward(self, x: Tensor) -> Tensor:
        self.notes = []
        held = []
        for layer in self.layers:
            x = layer(x)
            layer.kept = x
            held.append(x.sum())
        kept = [layer.kept for layer in self.layers]
        return torch.stack([*held, *(note.sum() for note in self.notes), *(each.mean() for each in kept)]).sum()


class _Shared(Stack):
    """A parameter that two layers share, and a layer that is there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].get_submodule("up").weight = self.layers[1].get_submodule("up").weight
        self.layers[4] = self.layers[2]


class _Twice(Stack):
    def run(self, x: Tensor) -> Tensor:
        for layer in [*self.layers, *reversed(self.layers)]:
            x = layer(x)
        return x


class _Counting(Stack):
    """A number that every layer sees another value of."""

    def run(self, x: Tensor) -> Tensor:
        for calls, layer in enumerate(self.layers):
            x = layer(x) if calls != 3 else layer(x) + calls * x
        return x


class _Outer(Stack):
    """Layers read a tensor from around them, and skip to one another."""

    def run(self, x: Tensor) -> Tensor:
        first, skips = x * 2, [x]
        for layer in self.layers:
            x = layer(x) + first + (skips.pop(0) if len(skips) > 2 else x)
            skips.append(x)
        return x


class _Nested(Stack):
    def __init__(self) -> None:
        super().__init__(lambda index: nn.Sequential(Layer(index), nn.ModuleList([Layer(index)])[0], nn.ReLU()))


class _Dataclass(Stack):
    def run(self, x: Tensor) -> Tensor:
        state = _State(x, None)
        for layer in self.layers:
            state = dataclasses.replace(state, x=layer(state.x), last=state.x)
        return state.x if state.last is None else state.x + state.last


@dataclasses.dataclass
class _State:
    x: Tensor
    last: Tensor | None


class _Tupled(Stack):
    def __init__(self) -> None:
        super().__init__(_Tuples)

    def run(self, x: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.add(*x)


class _Half(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].half()
        self.layers[3].half()

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(next(layer.parameters()).dtype)).float()
        return x


class _Modes(Stack):
    def run(self, x: Tensor) -> Tensor:
        for layer, training in zip(self.layers, (True, False, True, True, False), strict=True):
            layer.train(training)
            x = layer(x)
        return x


STACKS = [_Leaking, _Shared, _Twice, _Counting, _Outer, _Nested, _Dataclass, _Tupled, _Half, _Modes]


@pytest.mark.parametrize("kind", STACKS)
def test_stacks_that_do_more_than_call_layers(monkeypatch: pytest.MonkeyPatch, kind: Callable[[], nn.Module]) -> None:
    _compared(monkeypatch, lambda: (kind(), _given(), {}))


class _Plain(torch.overrides.TorchFunctionMode):
    """A mode of the user's: nothing is known of what it does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_under_a_mode_of_the_users_all_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    with _Plain():
        found = _captured(monkeypatch, Repeated, lambda: (Stack(), _given(), {}))
    assert isinstance(found.outcome, bytes) and not found.copied


def test_only_the_first_of_equal_layers_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _compared(monkeypatch, lambda: (Stack(), _given(), {}))
    assert found.copied == 3 + (LAYERS - 2) * 5  # the second layer's first and last op are given what has a gradient
