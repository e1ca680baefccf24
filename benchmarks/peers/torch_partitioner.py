"""torch's own min-cut rematerialisation against ours, on the same joint graphs.

    python -m benchmarks.peers.torch_partitioner [--only PATTERN] [--json FILE]

A model is traced by AOTAutograd, its ops whole: Inductor would part them and fuse the parts again, which would count
here as tensors. `min_cut_rematerialization_partition` parts the joint graph at an `activation_memory_budget` between 0
and 1; what its forward and then its backward execute, in its order, is replayed here, every result freed after its last
reader. Ours plans the joint graph in the order it was traced, at the peak torch's reached, with the same costs: an op's
floating point operations (torch's own estimate of them), and a millionth of a GF for any op, so that nothing runs again
for fun.

Columns: `knob` the `activation_memory_budget`; `peak_mb` what torch's parts need beside inputs and parameters;
`torch_gf`, `ours_gf`, `bound_gf` the operations of what runs again, and what is proved of any schedule in the traced
order; `keep_mb` the peak of the traced order with nothing run again.
Source: He and Yu 2023, "Transcending runtime-memory tradeoffs in checkpointing by being fusion aware"; torch 2.13.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch import config
from torch._functorch.aot_autograd import aot_module, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.table import Row, main
from examples.models.unet import UNet
from paraplan.ir.errors import SolverLimitError
from paraplan.planner.memory.memory_schedule import evaluate, freeing
from paraplan.planner.memory.plan_memory import MemoryLimits, plan_memory
from paraplan.planner.memory.problem import GIVEN, MemOp, MemoryProblem, MemTensor

KNOBS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
TIME_S = 60.0
COLUMNS = ("case", "ops", "knob", "keep_mb", "peak_mb", "torch_gf", "ours_gf", "bound_gf", "ours_mb")
_LEAST_GF = 1e-6


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and added to what it read."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, width] to the same."""
        parts = self.mix(self.norm1(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A small language model that returns its loss."""

    def __init__(self, layers: int = 4, width: int = 256, heads: int = 4, vocabulary: int = 1024) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(256, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean cross-entropy of the next of [batch, sequence] tokens."""
        x = self.blocks(self.tokens(tokens) + self.places[: tokens.shape[1]])
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Four layers, 256 wide."""
    return GPT(), (torch.zeros(8, 256, dtype=torch.long),)


def unet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A small U-Net."""
    return UNet(width=16, depth=3), (torch.randn(4, 3, 64, 64), torch.zeros(4, 64, 64, dtype=torch.long))


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {"GPT-4L": gpt, "U-Net": unet}


@cache
def traced(name: str) -> tuple[fx.GraphModule, dict[float, tuple[str, ...]]]:
    """The joint graph, and per knob the names of what torch's forward and backward execute, in order."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    joint: list[fx.GraphModule] = []
    runs: dict[float, tuple[str, ...]] = {}

    def part(module: fx.GraphModule, given: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        for knob in KNOBS:
            ours = copy.deepcopy(module)
            with config.patch(activation_memory_budget=knob):
                parts = min_cut_rematerialization_partition(ours, given, **options)
            runs[knob] = tuple(node.name for each in parts for node in each.graph.nodes if node.op == "call_function")
            if not joint:
                joint.append(ours)  # with common subexpressions shared, as the parts are
        return parts

    def leave(module: fx.GraphModule, _given: Any) -> Any:
        return make_boxed_func(module.forward)

    compiled = aot_module(model, fw_compiler=leave, bw_compiler=leave, partition_fn=part)
    compiled(*inputs)
    return joint[0], runs


def _floating_point_operations(node: fx.Node) -> int:
    def value(argument: Any) -> Any:
        return argument.meta["val"] if isinstance(argument, fx.Node) else argument

    args, kwargs = tree_map(value, (node.args, node.kwargs), is_leaf=lambda it: isinstance(it, fx.Node))
    with FlopCounterMode(display=False) as counter:
        node.target(*args, **kwargs)  # type: ignore[operator]
    return counter.get_total_flops()


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(made.alias_info is not None for made in schema.returns)


def problem_of(module: fx.GraphModule) -> tuple[MemoryProblem, dict[str, int]]:
    """The joint graph as ops over storages, and each op's index by its node's name; inputs take nothing."""
    storages: dict[fx.Node, Any] = {}  # a storage, or one per result
    ops: list[MemOp] = []
    tensors: list[MemTensor] = []
    index: dict[str, int] = {}
    kept: set[int] = set()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            storages[node] = len(tensors)
            tensors.append(MemTensor(0, GIVEN))
        elif node.target is operator.getitem:
            held = storages[node.args[0]]
            storages[node] = held[node.args[1]] if isinstance(held, list) else held  # parts of a view are it
        elif node.op == "call_function" and _is_view(node):
            storages[node] = storages[node.args[0]]
        elif node.op == "call_function":
            value, maker = node.meta["val"], len(ops)
            sizes = [
                each.numel() * each.element_size() if isinstance(each, Tensor) else 0 for each in tree_leaves(value)
            ]
            first = len(tensors)
            tensors += [MemTensor(nbytes, maker) for nbytes in sizes]
            storages[node] = list(range(first, len(tensors))) if isinstance(value, list | tuple) else first
            reads = sorted({item for read in node.all_input_nodes for item in tree_leaves(storages[read])})
            seconds = _floating_point_operations(node) / 1e9 + _LEAST_GF
            ops.append(MemOp(str(node.target), seconds, tuple(reads), tuple(range(first, len(tensors)))))
            index[node.name] = maker
        elif node.op == "output":
            kept = {item for read in node.all_input_nodes for item in tree_leaves(storages[read])}
    marked = tuple(MemTensor(each.nbytes, each.maker, kept=number in kept) for number, each in enumerate(tensors))
    return MemoryProblem(tuple(ops), marked), index


def row(name: str, knob: float) -> Row:
    """One model at one knob."""
    joint, runs = traced(name)
    problem, index = problem_of(joint)
    views = {node.name for node in joint.graph.nodes if node.name not in index}
    order = tuple(index[run] for run in runs[knob] if run not in views)
    theirs = evaluate(problem, freeing(problem, order))
    keep = evaluate(problem, freeing(problem, tuple(range(len(problem.ops))))).peak_bytes
    found: Row = {
        "ops": len(problem.ops),
        "knob": knob,
        "keep_mb": keep / 1e6,
        "peak_mb": theirs.peak_bytes / 1e6,
        "torch_gf": theirs.recomputed_s,
    }
    try:
        ours = plan_memory(problem, theirs.peak_bytes, MemoryLimits(time_s=TIME_S))
    except SolverLimitError:
        return found
    assert ours.bound_s is not None
    return found | {
        "ours_gf": ours.evaluation.recomputed_s,
        "bound_gf": ours.bound_s - problem.compute_s,
        "ours_mb": ours.evaluation.peak_bytes / 1e6,
    }


CASES = {f"{name} {knob:g}": partial(row, name, knob) for name in MODELS for knob in KNOBS}

if __name__ == "__main__":
    raise SystemExit(main("torch_partitioner", CASES, COLUMNS))
