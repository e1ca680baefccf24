"""A recorded fx graph -> `Graph`: normal forms, plain names, no torch types, dead ops gone.

`normal_forms` says how each recorded op is written; what it does not mention is written as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from paraplan.capture.joint_graph import LABEL
from paraplan.ir.errors import CaptureError
from paraplan.ir.model.graph import Arg, Graph, Op, Phase, encode_number
from paraplan.ir.model.tensor import DTYPE_BYTES, TensorSpec
from paraplan.kernels.dtypes import dtype_name
from paraplan.kernels.torch_private import OpOverload

Names = str | tuple[str | None, ...] | None
_DROPPED_KWARGS = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})
MAX_CONSTANT_ELEMENTS = 4096
_ONCE = frozenset({"paraplan.float8_scale", "paraplan.float8_cast", "paraplan.float8_cast_both"})
"""Ops written once a phase for equal arguments: products that read one tensor cast it once."""


def spec_of(value: Tensor) -> TensorSpec:
    """Shape and dtype of a tensor."""
    return TensorSpec(dtype=dtype_name(value.dtype), shape=tuple(int(size) for size in value.shape))


class OpCollector:
    """Collects ops while an fx graph is walked."""

    def __init__(self, forms: dict[str, Callable[[OpCollector, fx.Node], Names]]):
        self._forms = forms
        self.env: dict[fx.Node, Names] = {}
        self.values: dict[str, TensorSpec] = {}
        self.ops: list[Op] = []
        self.sources: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._made_by: dict[str, Op] = {}
        self._label: tuple[Phase, str] = (Phase.FORWARD, "")
        self._once: dict[object, Names] = {}

    def fresh(self, base: str) -> str:
        """A new value name."""
        base = base.strip("_")
        self._counts[base] += 1
        return f"{base}_{self._counts[base] - 1}"

    def add_input(self, node: fx.Node, name: str) -> str:
        """Names a placeholder."""
        self.env[node] = name
        self.values[name] = spec_of(node.meta["val"])
        return name

    def maker(self, name: str) -> Op | None:
        """The op a value was made by; None for inputs."""
        return self._made_by.get(name)

    def emit(
        self, target: str, args: Sequence[Arg], specs: Sequence[TensorSpec | None], kwargs: dict[str, Arg] | None = None
    ) -> tuple[str | None, ...]:
        """Appends an op; one name per output, None for absent ones.

        Args:
            target: of the op.
            args, kwargs: of it, as in `ir.model.graph`.
            specs: of its outputs; None for absent ones.
        """
        phase, source = self._label
        base = target.split(".")[1]
        for spec in specs:
            if spec is not None and spec.dtype not in DTYPE_BYTES:
                raise CaptureError(
                    f"{source or 'unknown line'}: {target} makes a tensor of dtype {spec.dtype}, which a program "
                    f"cannot hold; use one of {', '.join(DTYPE_BYTES)}"
                )
        outs = tuple(None if spec is None else self.fresh(base) for spec in specs)
        index = self.sources.setdefault(source, len(self.sources)) if source else -1
        op = Op(target=target, args=tuple(args), kwargs=kwargs or {}, outs=outs, phase=phase, source=index)
        self.ops.append(op)
        for name, spec in zip(outs, specs, strict=True):
            if name is not None and spec is not None:
                self.values[name] = spec
                self._made_by[name] = op
        return outs

    def one(self, target: str, args: Sequence[Arg], spec: TensorSpec, kwargs: dict[str, Arg] | None = None) -> str:
        """Appends an op with one output.

        Args:
            target, args, kwargs: as of `emit`.
            spec: of its output.
        """
        (name,) = self.emit(target, args, (spec,), kwargs)
        assert name is not None
        return name

    def ref(self, node: object) -> Arg:
        """An argument for a node's value."""
        assert isinstance(node, fx.Node)
        name = self.env[node]
        assert isinstance(name, str), f"{node} is no single value"
        return "%" + name

    def arg(self, value: object) -> Arg:
        """Any fx argument as a program argument."""
        if isinstance(value, fx.Node):
            return self.ref(value)
        if isinstance(value, (tuple, list)):
            return tuple(self.arg(item) for item in value)
        if isinstance(value, torch.dtype):
            return ":" + dtype_name(value)
        if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
            return None
        if value is None or isinstance(value, (bool, int)):
            return value
        if isinstance(value, (float, complex)):
            return encode_number(value)
        if isinstance(value, str):
            return ":" + value
        raise CaptureError(f"argument {value!r} of type {type(value).__name__} cannot be written in a program")

    def visit(self, node: fx.Node) -> None:
        """Writes one call."""
        self._label = node.meta.get(LABEL, self._label)
        target = node.target
        if getattr(target, "__name__", "") == "getitem":
            names = self.env[node.args[0]]  # type: ignore[index]
            assert isinstance(names, tuple)
            self.env[node] = names[node.args[1]]  # type: ignore[index]
            return
        if not isinstance(target, OpOverload):
            raise CaptureError(
                f"{self._label[1] or 'unknown line'}: {target} is no op a program can hold (an op that writes its "
                "arguments, or control flow); return new tensors instead"
            )
        if not target._schema.returns:
            return  # an assertion about data
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise CaptureError(
                f"{self._label[1] or 'unknown line'}: {target} draws random numbers inside of an autograd.Function, "
                "where they cannot be reproduced over devices; draw them outside and pass them in"
            )
        name = target._schema.name.replace("::", ".")
        form = self._forms.get(name.removeprefix("aten."))
        made = form(self, node) if form and name.startswith("aten.") else None
        self.env[node] = made if made is not None else self.write(node)

    def write(self, node: fx.Node) -> Names:
        """The op as it was recorded."""
        target = node.target
        assert isinstance(target, OpOverload)
        name = target._schema.name.replace("::", ".")
        full = name if name.startswith("paraplan.") else f"{name}.{target._overloadname}"
        kwargs = {key: self.arg(value) for key, value in sorted(node.kwargs.items()) if key not in _DROPPED_KWARGS}
        value = node.meta["val"]
        many = isinstance(value, (tuple, list))
        specs = [spec_of(v) if isinstance(v, Tensor) else None for v in (value if many else (value,))]
        args = tuple(self.arg(a) for a in node.args)
        key = (full, args, self._label[0])
        if key in self._once:
            return self._once[key]
        outs = self.emit(full, args, specs, kwargs)
        found: Names = outs if many else outs[0]
        if full in _ONCE:
            self._once[key] = found
        return found


def write_constant(writer: OpCollector, node: fx.Node, value: Tensor, source: str) -> None:
    """A tensor the model wrote out, as an op.

    Args:
        writer: of the graph.
        node: that stands for the tensor.
        value: of it.
        source: the user's line; "" where unknown.
    Raises:
        CaptureError: it has too many elements for a program.
    """
    if value.numel() > MAX_CONSTANT_ELEMENTS:
        raise CaptureError(
            f"{source or 'unknown line'}: a tensor constant of {value.numel()} elements (limit "
            f"{MAX_CONSTANT_ELEMENTS}) is made in forward; register_buffer it in __init__"
        )
    plain = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    flat = tuple(writer.arg(item) for item in plain.flatten().tolist())
    spec = spec_of(plain)
    made = writer.one("paraplan.constant", (flat, ":" + spec.dtype, spec.shape), spec)
    if value.is_complex():
        made = writer.one("aten.view_as_complex.default", ("%" + made,), spec_of(value))
    writer.env[node] = made


def finish(writer: OpCollector, inputs: Sequence[str], outputs: Sequence[str | None]) -> Graph:
    """The graph without dead ops, absent outputs as None, sources renumbered.

    A result that nobody reads stays beside one that is read: its kernel makes it all the same.

    Args:
        writer: of the graph.
        inputs: names of its inputs.
        outputs: names of its results; None for absent ones.
    """
    needed = {name for name in outputs if name is not None}
    kept: list[Op] = []
    for op in reversed(writer.ops):
        if any(name in needed for name in op.outs if name is not None):
            needed.update(op.tensors)
            kept.append(op)
    kept.reverse()
    texts = list(writer.sources)
    renumbered: dict[int, int] = {}
    ops = []
    for op in kept:
        outs = tuple(x if x is not None and (x in needed or writer.values[x].numel) else None for x in op.outs)
        source = renumbered.setdefault(op.source, len(renumbered)) if op.source >= 0 else -1
        ops.append(Op(target=op.target, args=op.args, kwargs=op.kwargs, outs=outs, phase=op.phase, source=source))
    made = [name for op in ops for name in op.outs if name is not None]
    return Graph(
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        ops=tuple(ops),
        sources=tuple(texts[index] for index in renumbered),
        values={name: writer.values[name] for name in [*inputs, *made]},
    )
