"""Ring attention: queries stay, blocks of keys and values go round the ranks of an axis.

In step i of n, rank r works on the keys that rank (r - i) mod n began with, and meanwhile passes them on:

    forward    out, lse of the block are merged into what the rows have so far
    backward   dq gathers on the rank; dk, dv travel along with their keys and come home after n exchanges

An expansion is a graph of local ops over local shapes, "permute" being the exchange: every rank's tensor goes to
the next rank of the axis. Lowering emits it, the planner prices it, op by op. What is summed over steps is kept
in float32 at least.

All ranks take every step, so with a causal mask half the blocks are computed in vain: ranks of a class run one
program. `stripes` balances it.

Source: Liu, Zaharia, Abbeel 2023, Ring Attention with Blockwise Transformers (arXiv 2310.01889).
"""

from __future__ import annotations

import copy
from typing import Self

from paraplan.ir.machine.collectives import PERMUTE, Collective
from paraplan.ir.model.graph import Arg, Graph, Op, map_refs
from paraplan.ir.model.tensor import DTYPE_BYTES, TensorSpec
from paraplan.rules.dims import LocalContext
from paraplan.rules.localise import axis_key, op_arguments


def ring_inputs(op: Op) -> tuple[str, ...]:
    """Names an expansion gives the op's tensors, in their order."""
    return tuple(f"in{index}" for index in range(len(op.tensors)))


class Steps:
    """Collects the ops of an expansion."""

    def __init__(self, op: Op, context: LocalContext, axis: int) -> None:
        self.op, self.axis, self.mesh_shape = op, axis, context.mesh_shape
        self.inputs = ring_inputs(op)
        self.values = {
            name: TensorSpec(spec.dtype, shape)
            for name, spec, shape in zip(self.inputs, context.inputs, context.local_inputs, strict=True)
        }
        queue = iter(self.inputs)
        self.args = tuple(map_refs(arg, lambda _: next(queue)) for arg in op_arguments(op, context))
        self.ops: list[Op] = []

    @property
    def size(self) -> int:
        """Ranks of the axis."""
        return self.mesh_shape[self.axis]

    def along(self, axis: int) -> Self:
        """The same steps, to which exchanges along another axis are added."""
        other = copy.copy(self)
        other.axis = axis
        return other

    def add(self, target: str, args: tuple[Arg, ...], outs: dict[str, TensorSpec], **kwargs: Arg) -> str:
        """One op; returns its first result.

        Args:
            target, args, kwargs: the op.
            outs: its results, with local specs.
        """
        self.values |= outs
        self.ops.append(Op(target=target, args=args, kwargs=kwargs, outs=tuple(outs)))
        return next(iter(outs))

    def permute(self, name: str, to: str) -> str:
        """What the previous rank of the axis calls `name`."""
        return self.exchange(PERMUTE, name, to)

    def exchange(self, collective: Collective, name: str, to: str, more: tuple[Arg, ...] = (), rows: int = 0) -> str:
        """A collective of a value along the axis, which the step names as the mesh without microbatches numbers it.

        Args:
            collective: which.
            name: of the value.
            to: name of the result.
            more, rows: further arguments, and rows of the result, where `Collective.uneven`.
        """
        spec = self.values[name]
        made = TensorSpec(spec.dtype, collective.result_shape(spec.shape, self.size, rows))
        return self.add(collective.name, ("%" + name, *more), {to: made}, axis=self.axis - 1)

    def cast(self, name: str, dtype: str, to: str) -> str:
        """A value in another dtype; itself where it is.

        Args:
            name: of the value.
            dtype: to which.
            to: name of the result.
        """
        spec = self.values[name]
        if spec.dtype == dtype:
            return name
        return self.add("aten._to_copy.default", ("%" + name,), {to: TensorSpec(dtype, spec.shape)}, dtype=":" + dtype)

    def total(self, so_far: str, addend: str, to: str) -> str:
        """A sum kept in the dtype of sums; the first addend where there is none so far.

        Args:
            so_far: name of the sum; "" where there is none.
            addend: name of what is added.
            to: name of the result.
        """
        dtype = sum_dtype(self.values[addend].dtype)
        if not so_far:
            return self.cast(addend, dtype, to)
        return self.add(
            "aten.add.Tensor", ("%" + so_far, "%" + addend), {to: TensorSpec(dtype, self.values[addend].shape)}
        )

    def block(self, step: int, starts: int, **tensors: str) -> tuple[Arg, ...]:
        """Arguments of the op for one block of keys, whose offset turns with the step.

        Args:
            step: of the ring.
            starts: number of the argument that says where blocks begin.
            tensors: names in place of inputs.
        """
        replaced = tuple(map_refs(arg, lambda name: tensors.get(name, name)) for arg in self.args)
        places = replaced[starts]
        key = axis_key(self.axis)
        turned = f"{key}+{(self.size - step) % self.size}%{self.size}:" if step else f"{key}:"
        terms = [
            turned + term.split(":")[1] if term.split(":")[0] == key else term for term in places[3][1:].split(",")
        ]
        return (*replaced[:starts], (*places[:3], "#" + ",".join(terms)), *replaced[starts + 1 :])

    def graph(self, outputs: tuple[str | None, ...]) -> Graph:
        return Graph(inputs=self.inputs, outputs=outputs, values=self.values, ops=tuple(self.ops))


def sum_dtype(dtype: str) -> str:
    """The dtype sums over steps are kept in."""
    return dtype if DTYPE_BYTES[dtype] >= 4 else "float32"


def ring_attention(op: Op, context: LocalContext, axis: int) -> Graph:
    """The steps of `paraplan.attention` on a ring; see `OpDef.expand`."""
    steps = Steps(op, context, axis)
    last = steps.size - 1
    key, value, out, lse = "in1", "in2", "", ""
    shape, rows = context.local_outputs[0], steps.values["in0"].shape[:3]
    dtype, wide = steps.values["in0"].dtype, sum_dtype(steps.values["in0"].dtype)
    for step in range(steps.size):
        if step:
            key, value = steps.permute(key, f"key{step}"), steps.permute(value, f"value{step}")
        made = {f"out{step}": TensorSpec(dtype, shape), f"lse{step}": TensorSpec(wide, rows)}
        part = steps.add(op.target, steps.block(step, 10, in1=key, in2=value), made)
        if not step:
            out, lse = part, f"lse{step}"
            continue
        kept = dtype if step == last else wide
        joined = {f"joined{step}": TensorSpec(kept, shape), f"total{step}": TensorSpec(wide, rows)}
        args = ("%" + out, "%" + lse, "%" + part, f"%lse{step}", ":" + kept)
        out, lse = steps.add("paraplan.attention_merge", args, joined), f"total{step}"
    return steps.graph(tuple(None if name is None else found for name, found in zip(op.outs, (out, lse), strict=True)))


def ring_attention_grad(op: Op, context: LocalContext, axis: int) -> Graph:
    """The steps of `paraplan.attention_grad` on a ring; see `OpDef.expand`."""
    steps = Steps(op, context, axis)
    key, value = "in2", "in3"
    names = ("dq", "dk", "dv", "dmask")
    totals = dict.fromkeys(name for name, out in zip(names, op.outs, strict=True) if out is not None)
    sums: dict[str, str] = dict.fromkeys(totals, "")
    made = {name: spec for name, spec in zip(names, _grad_specs(context), strict=True) if spec is not None}
    for step in range(steps.size):
        if step:
            key, value = steps.permute(key, f"key{step}"), steps.permute(value, f"value{step}")
        fresh = {name: f"{name}{step}" if name in sums else None for name in names}
        args = steps.block(step, 13, in2=key, in3=value)
        steps.values |= {fresh[name]: made[name] for name in sums}  # type: ignore[misc]
        steps.ops.append(Op(target=op.target, args=args, outs=tuple(fresh.values())))
        for name in sums:
            sums[name] = steps.total(sums[name], f"{name}{step}", f"{name}^{step}")
            if name in ("dk", "dv") and steps.size > 1:
                sums[name] = steps.permute(sums[name], f"{name}>{step}")
    finals = {name: steps.cast(found, made[name].dtype, f"{name}^") for name, found in sums.items()}
    return steps.graph(tuple(finals.get(name) for name in names))


def _grad_specs(context: LocalContext) -> tuple[TensorSpec | None, ...]:
    pairs = zip(context.outputs, context.local_outputs, strict=True)
    return tuple(None if spec is None else TensorSpec(spec.dtype, shape) for spec, shape in pairs)
