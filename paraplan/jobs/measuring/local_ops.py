"""Every local op a planner may ask the price of: each op of a program under each legal strategy, as lowering emits it.

Strategies are those of meshes of one to three axes; what matters of them is the local shapes, so each is emitted once,
by lowering's own `BlockEmitter`: copies and fills that a strategy needs come with it. Inputs lie as they do on one
device, in the same order of dims and with the same gaps. What surrounds segments (counts, loss, updates) comes from
the one-device plan, lowered. Limits: changes of layout are measured apart, by size (`moves`); microbatches and
uneven shards are left to interpolation.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from paraplan.cost_models.ops.roofline import is_free, variant
from paraplan.ir.execution.rank_program import Block, BlockRole, Instr, InstrKind, LocalValue
from paraplan.ir.execution.schedule import accumulate
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.kernel_choice import OpCall, chosen, fitting, has_choice
from paraplan.ir.machine.mesh import Layout, R, layout_text, local_shape, make_mesh
from paraplan.ir.model.graph import Arg, Graph, Op, Phase, map_refs, refs
from paraplan.ir.model.program import Program
from paraplan.ir.model.strides import contiguous_strides
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.optimizer import Optimizer
from paraplan.ir.param_layouts import ParamLayouts
from paraplan.ir.plan import KindChoice, ModelRef, Plan, Stage
from paraplan.ir.profile import Measured, detail_of, full_key, odd_strides, shape_key
from paraplan.lowering import lower
from paraplan.lowering.blocks.emit import BlockEmitter
from paraplan.lowering.transfers.held_casts import cast_graph, held_casts
from paraplan.rules.device_kernels import cuda  # noqa: F401  (records its kernels)
from paraplan.rules.graph_strategies import op_signature
from paraplan.rules.strategies import Strategy, op_strategies

Dims = tuple[int, ...]


@dataclass(frozen=True)
class LocalOp:
    """One op on local shapes: an instruction with its tensors numbered.

    Attributes:
        target, args, kwargs: of the instruction, tensors as "%0", "%1", ... in order of appearance.
        inputs, outputs: its tensors; inputs one per appearance.
        run_as: as which kernel; "" for the one that a plan without a profile chooses.
    """

    target: str
    args: tuple[Arg, ...]
    kwargs: dict[str, Arg]
    inputs: tuple[Measured, ...]
    outputs: tuple[Measured | None, ...]
    run_as: str = ""

    @property
    def name(self) -> str:
        """What is said to have failed where it did."""
        return f"{self.target} as {self.run_as}" if self.run_as else self.target

    @property
    def flag(self) -> int:
        """What changes its work beyond shapes."""
        return int(variant(self.target, self.args, self.kwargs))

    @property
    def detail(self) -> str:
        """What of its arguments may change its kernel."""
        return detail_of(self.target, self.args, self.kwargs, self.run_as)

    def kernel(self, backend: str, capability: int) -> str:
        """As which kernel it runs on a kind of device; "" for the reference kernel."""
        if self.run_as:
            return self.run_as
        found = chosen(backend, capability, self.target, self._call)
        return "" if found is None else found.name

    @property
    def _call(self) -> OpCall:
        inputs, outputs = (
            [None if each is None else _local(each) for each in of] for of in (self.inputs, self.outputs)
        )
        return OpCall(inputs, outputs, self.args)

    def ways(self, backend: str, capability: int) -> tuple[LocalOp, ...]:
        """The op as each kernel of a device that takes it, where there is a choice; else itself.

        Args:
            backend: the device's.
            capability: its compute capability, the larger number.
        """
        if not has_choice(self.target):
            return (self,)
        found = [each for each in fitting(backend, self.target, self._call) if each.capability <= capability]
        return tuple(replace(self, run_as=each.name) for each in found) or (self,)

    @property
    def full_key(self) -> str:
        """See `ir.profile`."""
        shape = shape_key(self.target, self.flag, self.inputs, self.outputs)
        return full_key(shape, [spec.strides for spec in self.inputs], self.detail)


def _local(spec: Measured) -> LocalValue:
    strides = spec.strides or contiguous_strides(spec.shape)
    return LocalValue(dtype=spec.dtype, shape=spec.shape, strides=strides, base="x", storage_bytes=spec.nbytes)


def whole_plan(program: Program, cluster: ClusterSpec, optimizer: Optimizer) -> Plan:
    """The plan of one device that keeps everything: nothing is decided.

    Args:
        program, cluster, optimizer: as in the plan; the cluster's first device runs it.
    """
    mesh = make_mesh((1,), ("dp",))
    whole = layout_text((R,))
    choices = tuple(
        KindChoice(
            kind=index,
            ops=("-",) * len(kind.graph.ops),
            input_grads=tuple(None if grad is None else whole for grad in kind.input_grads),
        )
        for index, kind in enumerate(program.kinds)
    )
    stage = Stage(
        first=0,
        stop=len(program.segments),
        mesh=mesh,
        choices=choices,
        batch=dict.fromkeys(program.batch, whole),
        segment_choice=tuple(segment.kind for segment in program.segments),
        params=dict.fromkeys(program.params, ParamLayouts(stored=whole, grad=whole, state=whole)),
    )
    return Plan(
        made_with={},
        model=ModelRef(display=""),
        program=program,
        cluster=cluster,
        num_microbatches=1,
        optimizer=optimizer,
        stages=(stage,),
        schedule=accumulate(1, 1),
    )


@dataclass(frozen=True)
class Family:
    """The local ops of one op under all its strategies.

    Attributes:
        name: equal for ops that have equal local ops.
        make: lists them.
    """

    name: str
    make: Callable[[], Iterable[LocalOp]]


def families(program: Program, cluster: ClusterSpec, optimizer: Optimizer, ways: int) -> tuple[Family, ...]:
    """All local ops of a program on meshes of up to `ways` devices: first those of one device, then op by op.

    Args:
        program, cluster, optimizer: as of `whole_plan`.
        ways: devices of the largest mesh.
    """
    alone: dict[str, LocalOp] = {}
    found = {"": Family("", lambda: alone.values())}
    for plan in _plans(whole_plan(program, cluster, optimizer)):
        blocks, casts = lower(plan)[0].blocks, held_casts(plan)
        alone |= {op.full_key: op for block in blocks.values() for op in block_ops(block)}
        graphs = [(kind.graph, kind.name) for kind in casts.plan.program.kinds]
        params, held = casts.plan.program.params, dict.fromkeys((of.weight, of.dtype) for of in casts.of.values())
        graphs += [(cast_graph(params[param].spec, dtype), "held") for param, dtype in held]
        for graph, stem in graphs if ways > 1 else ():
            strides, moved = _strides_of(graph, blocks, stem), _strides_moved(graph)
            for op in (op for op in graph.ops if op.phase is not Phase.STEP):
                lies = (strides, moved) if is_free(op.target) else (strides,)
                orders = tuple(tuple(lie[name] for name in op.tensors) for lie in lies)
                signature = (op_signature(op, graph.values), orders, ways)
                name = hashlib.sha256(repr(signature).encode()).hexdigest()
                found.setdefault(name, Family(name, partial(_op_locals, op, graph, lies, ways)))
    return tuple(found.values())


def _plans(plan: Plan) -> Iterator[Plan]:
    """A plan, and the one that holds casts of its weights, where it casts any."""
    yield plan
    if plan.program.precision == "fp8":
        yield msgspec.structs.replace(plan, hold_casts=True)


def _strides_of(graph: Graph, blocks: Mapping[str, Block], kind: str) -> dict[str, Dims]:
    """How every value of a kind lies on one device; nothing for row-major."""
    own = [block for block in blocks.values() if block.kind == kind]
    found: dict[str, Dims] = dict.fromkeys(graph.values, ())
    for block in own:
        for name, value in block.values.items():
            if name in found and value.shape == graph.values[name].shape:
                found[name] = odd_strides(value.shape, value.strides)
    return found


def _strides_moved(graph: Graph) -> dict[str, Dims]:
    """How every value lies where what it views came row-major out of a collective; a view of it may have to copy."""
    found: dict[str, Dims] = dict.fromkeys(graph.values, ())
    for op in graph.ops:
        if op.target == "aten.permute.default" and op.outs[0] is not None:
            shape = graph.values[op.tensors[0]].shape
            turned = [(shape[dim], contiguous_strides(shape)[dim]) for dim in op.args[1]]
            found[op.outs[0]] = odd_strides(tuple(size for size, _ in turned), tuple(stride for _, stride in turned))
    return found


def block_ops(block: Block) -> Iterator[LocalOp]:
    """A block's ops that run a kernel."""
    for instr in block.instrs:
        if instr.kind is InstrKind.OP and not _is_view(block, instr):
            yield _local_op(block, instr)


def _is_view(block: Block, instr: Instr) -> bool:
    made = [block.values[name] for name in instr.outs if name is not None]
    if not made:
        return False
    return is_free(instr.target) or all(value.storage_bytes == 0 for value in made)


def _local_op(block: Block, instr: Instr) -> LocalOp:
    numbers: dict[str, str] = {}

    def number(name: str) -> str:
        return numbers.setdefault(name, str(len(numbers)))

    def measured(name: str) -> Measured:
        value = block.values[name]
        return Measured(value.dtype, value.shape, odd_strides(value.shape, value.strides))

    names = tuple(refs((instr.args, tuple(instr.kwargs.values()))))
    args = tuple(map_refs(arg, number) for arg in instr.args)
    return LocalOp(
        instr.target,
        args,
        {key: map_refs(arg, number) for key, arg in instr.kwargs.items()},
        tuple(measured(name) for name in names),
        tuple(
            None if name is None else Measured(block.values[name].dtype, block.values[name].shape)
            for name in instr.outs
        ),
    )


def meshes(ways: int) -> tuple[Dims, ...]:
    """Shapes of one to three axes whose strategies have every local shape of up to so many devices."""
    found: dict[Dims, None] = {}
    for total in range(ways, 1, -1):
        for first in range(total, 0, -1):
            for second in range(min(first, total // first), 0, -1):
                third = total // (first * second)
                shape = tuple(size for size in (first, second, third) if size > 1)
                if first * second * third == total and third <= second and not _within(shape, tuple(found)):
                    found[shape] = None
    return tuple(found)


def _within(shape: Dims, others: Sequence[Dims]) -> bool:
    """Whether an axis left alone on one of the other meshes makes it this one."""
    return any(
        tuple(size for index, size in enumerate(other) if index != gone) == shape
        for other in others
        for gone in range(len(other))
    )


def _op_locals(op: Op, graph: Graph, lies: Sequence[Mapping[str, Dims]], ways: int) -> Iterator[LocalOp]:
    names = {name: f"in{index}" for index, name in enumerate(dict.fromkeys(op.tensors))}
    seen: set[object] = set()
    for shape in meshes(ways):
        for strategy in op_strategies(op, graph.values, shape, reduced=False):
            ins = tuple(
                local_shape(graph.values[n].shape, lay, shape)
                for n, lay in zip(op.tensors, strategy.inputs, strict=True)
            )
            outs = tuple(
                None if n is None or lay is None else local_shape(graph.values[n].shape, lay, shape)
                for n, lay in zip(op.outs, strategy.computed, strict=True)
            )
            key = (ins, outs, "" if strategy.ring_axis < 0 else (strategy.key, shape))
            if key not in seen:
                seen.add(key)
                for strides in lies:
                    yield from block_ops(_emit(op, graph, strategy, shape, strides, names))


def _emit(
    op: Op, graph: Graph, strategy: Strategy, mesh_shape: Dims, strides: Mapping[str, Dims], names: dict[str, str]
) -> Block:
    """The block of one op under a strategy, its results as computed."""

    def extended(layouts: tuple[Layout | None, ...]) -> tuple[Layout | None, ...]:
        return tuple(None if layout is None else (R, *layout) for layout in layouts)

    values: dict[str, TensorSpec] = {}
    emitter = BlockEmitter("op", (1, *mesh_shape), BlockRole.FORWARD)
    places = iter(range(len(op.tensors)))
    given: dict[tuple[str, Layout], str] = {}

    def rename(name: str) -> str:
        layout = (R, *strategy.inputs[next(places)])
        called = given.get((name, layout))
        if called is None:
            called = given[name, layout] = f"{names[name]}_{len(given)}"
            spec = values[called] = graph.values[name]
            local = local_shape(spec.shape, layout, (1, *mesh_shape))
            emitter.give(called, spec, layout, _scaled(spec.shape, strides[name], local))
        return called

    args = tuple(map_refs(arg, rename) for arg in op.args)
    kwargs = {key: map_refs(arg, rename) for key, arg in op.kwargs.items()}
    outs = tuple(None if name is None else f"out{index}" for index, name in enumerate(op.outs))
    values |= {f"out{index}": graph.values[name] for index, name in enumerate(op.outs) if name is not None}
    renamed = Op(target=op.target, args=args, kwargs=kwargs, outs=outs, phase=op.phase, rule=op.rule)
    computed = extended(strategy.computed)
    inputs = tuple((R, *layout) for layout in strategy.inputs)
    emitter.op(
        renamed,
        Graph(inputs=tuple(given.values()), outputs=outs, values=values, ops=(renamed,)),
        Strategy(strategy.key, inputs, computed, computed),
        0,
    )
    return emitter.finish(
        tuple(
            None if out is None or lay is None else emitter.get(out, lay)
            for out, lay in zip(outs, computed, strict=True)
        ),
        (),
    )


def _scaled(shape: Dims, strides: Dims, local: Dims) -> Dims | None:
    """Strides of a local shape in the global value's order of dims, with its gaps; None for row-major."""
    if not strides:
        return None
    found = [0] * len(shape)
    place = (1, 1)  # (global, local) stride a dense dim would have here
    for dim in sorted(range(len(shape)), key=lambda index: (strides[index], shape[index] != 1, -index)):
        if strides[dim] == 0:
            continue
        gap = max(1, strides[dim] // place[0]) if shape[dim] != 1 else 1
        found[dim] = place[1] * gap
        place = (place[0] * gap * shape[dim], found[dim] * local[dim])
    return tuple(found)


_SIZES = tuple(1 << power for power in range(10, 25, 2))
"""Elements of the tensors that changes of layout are measured on: 4 KiB to 64 MiB of float32."""


def moves(dtype: str = "float32") -> tuple[LocalOp, ...]:
    """The copies that changes of layout need, and the sums of gradients, by size."""
    found = []
    for count in _SIZES:
        rows = math.isqrt(count)
        square, flat = Measured(dtype, (rows, rows)), Measured(dtype, (count,))
        half, wide = Measured(dtype, (rows, rows // 2)), Measured(dtype, (2 * rows, rows // 2))
        found += [
            LocalOp("paraplan.shard", ("%0", 1, rows // 2, 0), {}, (square,), (half,)),
            LocalOp("paraplan.stack", ("%0", 2, 1), {}, (square,), (wide,)),
            LocalOp("paraplan.unstack", ("%0", 2, 1), {}, (wide,), (square,)),
            LocalOp("paraplan.first_only", ("%0", 0), {}, (square,), (square,)),
            LocalOp("paraplan.write", ("%0", "%1"), {}, (square, square), ()),
            LocalOp("paraplan.pack", (("%0", "%1"), 1, (0, 0)), {}, (flat, flat), (Measured(dtype, (2 * count,)),)),
            LocalOp("aten.add_.Tensor", ("%0", "%1"), {}, (square, square), (square,)),
        ]
    return tuple(found)
