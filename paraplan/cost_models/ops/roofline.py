"""What one op does (flops, bytes) and how long a device takes: a roofline per op class.

    t = launch + max(flops / (rate(dtype) · share(class, shape)), bytes / (memory bandwidth · share))

Classes: "matmul" (GEMMs and convolutions), "attention" (fused), "memory" (everything that streams its
operands once), "view" (no work at all). Shapes are local. An op that is not known streams its inputs and
outputs: the model never fails on a name. Limits: no cache reuse between ops, no wave quantization, fused
kernels are assumed to pass over memory once. Source: Williams et al. 2009 (roofline).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from paraplan.cost_models.constants import efficiency_of
from paraplan.cost_models.ops.access_patterns import NORM_COLUMNS, STREAM, columns_of, moved_bytes_per_s, pattern_of
from paraplan.cost_models.ops.product_shapes import (
    EXPERT_TOTALS,
    PRODUCTS,
    TURNED,
    Outs,
    Specs,
    expert_copies,
    first_of,
)
from paraplan.cost_models.ops.tiles import filled
from paraplan.ir.errors import CostModelError
from paraplan.ir.execution.rank_program import SUM
from paraplan.ir.machine.device import Device
from paraplan.ir.model.graph import Arg, target_parts
from paraplan.ir.model.tensor import DTYPE_BYTES, FLOATS
from paraplan.ir.profile import Spec
from paraplan.ir.struct import Value
from paraplan.rules.device_kernels.cuda_conv import CONVOLUTIONS, turned_bytes


class OpWork(Value, frozen=True, kw_only=True):
    """What an op does, whatever the device.

    Attributes:
        kind: "matmul", "attention", "memory" or "view".
        flops: floating-point operations of its matrix products (0 for the rest).
        read_bytes, write_bytes: traffic to device memory.
        dtype: what the flops are done in.
        narrow: the narrowest dim of its matrix product, which limits its efficiency; 0 where it has none.
        shape: how many products, their rows, columns and inner dim; () where that is not known.
        copied_bytes: traffic of copies of its operands made first, as products in float8 need on Hopper, and of what
            stands between the products of experts.
        turned_bytes: of the copies that a convolution on CUDA makes of what is stored channels first, each written and
            read once at half the rate of other copies.
        pattern: how its bytes go through memory (`access_patterns.PATTERNS`).
        column_bytes: what a second kernel reads by columns.
    """

    kind: str
    flops: int
    read_bytes: int
    write_bytes: int
    dtype: str
    narrow: int = 0
    shape: tuple[int, ...] = ()
    copied_bytes: int = 0
    turned_bytes: int = 0
    pattern: str = STREAM
    column_bytes: int = 0


_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "view",
        "_unsafe_view",
        "permute",
        "transpose",
        "t",
        "expand",
        "slice",
        "select",
        "detach",
        "alias",
        "squeeze",
        "unsqueeze",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "as_strided",
        "diagonal",
        "narrow",
        "unfold",
        "reshape",
        "view_as",
        "expand_as",
        "lift_fresh",
        "numpy_T",
        "movedim",
        "swapaxes",
        "flatten",
        "unflatten",
        "view_as_real",
        "view_as_complex",
        "_assert_tensor_metadata",
        "sym_size",
    )
) | {"_operator.getitem", "paraplan.mergeable"}
_ROW_READERS = frozenset(
    {
        "paraplan.embedding",
        "aten.embedding",
        "aten.gather",
        "aten.index",
        "aten.index_select",
        "paraplan.ce_target",
        "paraplan.embedding_tables",
        "paraplan.index",
    }
)
_OUT_READERS = frozenset({"paraplan.shard"})
_TWICE_READ = {"paraplan.bn_whole": 1, "paraplan.bn_whole_grad": 3}  # so many first inputs, those per channel aside


def op_name(target: str) -> str:
    """A target without its overload: "aten.mm.default" to "aten.mm"."""
    return target_parts(target).base


def is_free(target: str) -> bool:
    """Whether an op only reinterprets its input (no kernel, no bytes) when its output is a view."""
    return op_name(target) in _VIEWS


def nbytes(spec: Spec) -> int:
    """Bytes of a dense tensor."""
    return math.prod(spec.shape) * DTYPE_BYTES[spec.dtype]


def variant(target: str, args: tuple[Arg, ...], kwargs: Mapping[str, Arg]) -> int:
    """What changes an op's work beyond its shapes: causal attention, transposed convolution, the number of experts.

    A block of keys that came round a ring is not causal here: for some rank all of it lies in the past.

    Args:
        target: the op.
        args, kwargs: its arguments, local.
    """
    if target in EXPERT_TOTALS:
        return int(args[EXPERT_TOTALS[target]])
    found = _FLAGS.get(op_name(target))
    if found is None or _is_off_diagonal(target, args):
        return False
    key, position = found
    return bool(kwargs.get(key, args[position] if len(args) > position else False))


def _is_off_diagonal(target: str, args: tuple[Arg, ...]) -> bool:
    """Whether a block of scores has queries and keys of different parts of the sequence."""
    position = _STARTS.get(target)
    if position is None or len(args) <= position or len(args[position]) != 4:
        return False
    queries, keys = args[position][2:]
    return isinstance(queries, str) and isinstance(keys, str) and queries != keys


_STARTS = {"paraplan.attention": 10, "paraplan.attention_grad": 13}
_FLAGS = {
    "paraplan.attention": ("causal", 7),
    "paraplan.attention_grad": ("causal", 10),
    "aten.scaled_dot_product_attention": ("is_causal", 5),
    "aten.convolution": ("transposed", 6),
    "aten.convolution_backward": ("transposed", 7),
    "paraplan.conv": ("transposed", 6),
    "paraplan.conv_grad_input": ("transposed", 6),
    "paraplan.conv_grad_weight": ("transposed", 6),
    "paraplan.float8_linear": ("transposed", 4),
    "paraplan.float8_linear_grad_input": ("transposed", 4),
}


def op_cost(target: str, args: tuple[Arg, ...], kwargs: Mapping[str, Arg], inputs: Specs, outputs: Outs) -> OpWork:
    """The work of one op.

    Args:
        target: e.g. "aten.mm.default" or "paraplan.linear".
        args, kwargs: as in `ir.model.graph`; only the flags of `variant` are read.
        inputs: the input tensors in the order arguments name them (`Op.tensors`), local shapes.
        outputs: the output tensors, None where absent.
    Returns:
        Its class, flops, bytes and dtype; a view's work is zero.
    """
    return work_of(target, variant(target, args, kwargs), inputs, outputs)


def work_of(target: str, flag: int, inputs: Specs, outputs: Outs) -> OpWork:
    """`op_cost` with the flag already read.

    Args:
        target: the op.
        flag: what `variant` says of its arguments.
        inputs, outputs: local specs; None for an absent output.
    """
    if is_free(target):
        return OpWork(kind="view", flops=0, read_bytes=0, write_bytes=0, dtype="float32")
    name = op_name(target)
    read, write = sum(map(nbytes, inputs)), sum(nbytes(out) for out in outputs if out is not None)
    if name in PRODUCTS:
        kind, product = PRODUCTS[name]
        # addmm names its bias first; a product's operands are always among the first two, experts' last.
        dtype = inputs[-1 if name in EXPERT_TOTALS else min(1, len(inputs) - 1)].dtype
        found = product(inputs, outputs, flag)
        if name == SUM:  # it writes the sum it reads
            write = nbytes(inputs[0])
        elif name == "paraplan.linear_into_":  # what it writes is given
            rows, columns = math.prod(inputs[1].shape[:-1]), inputs[0].shape[-1]
            read, write = read - nbytes(inputs[0]), rows * columns * DTYPE_BYTES[inputs[0].dtype]
        elif name == "paraplan.linear_rows":  # of the rows given it reads as many as it makes
            rows = math.prod(first_of(outputs).shape[:-1])
            read -= nbytes(inputs[0]) - rows * inputs[0].shape[-1] * DTYPE_BYTES[inputs[0].dtype]
        copied = 2 * sum(nbytes(inputs[index]) for index in TURNED.get((name, bool(flag)), ()))
        if name in EXPERT_TOTALS:
            copied = expert_copies(inputs, flag)
        return OpWork(
            kind=kind,
            flops=found.flops,
            read_bytes=read,
            write_bytes=write,
            dtype=dtype,
            narrow=found.narrow,
            shape=found.shape,
            copied_bytes=copied,
            turned_bytes=turned_bytes(name, inputs, outputs) if name in CONVOLUTIONS else 0,
        )
    if name in _ROW_READERS:
        read += write - (nbytes(inputs[0]) if inputs else 0)
    elif name in _OUT_READERS:
        read = write
    elif name in _TWICE_READ:
        read += sum(nbytes(x) for x in inputs[: _TWICE_READ[name]] if len(x.shape) > 1)
    elif name in ("paraplan.embedding_grad", "paraplan.embedding_tables_grad", "aten.embedding_dense_backward"):
        # Zero fill, then every row of g is added into the table: read, read, write.
        read, write = read + nbytes(inputs[0]), write + nbytes(inputs[0])
    return OpWork(
        kind="memory",
        flops=0,
        read_bytes=read,
        write_bytes=write,
        dtype=_dtype(inputs, outputs),
        pattern=pattern_of(name, inputs, outputs),
        column_bytes=sum(map(nbytes, columns_of(name, inputs, outputs))),
    )


def tail_bytes(args: tuple[Arg, ...], value: Spec) -> int:
    """What `paraplan.fill_tail_` (value, dim, size, ...) writes on the rank whose block ends in padding."""
    dim, size = int(args[1]), int(args[2])
    block = value.shape[dim]
    return nbytes(value) // block * (-size % block or block)


def copy_work(outputs: Outs) -> OpWork:
    """The work of a view op that had to copy: its output is read and written once."""
    size = sum(nbytes(out) for out in outputs if out is not None)
    return OpWork(kind="memory", flops=0, read_bytes=size, write_bytes=size, dtype=_dtype((), outputs))


def registered_work_of(registered: tuple[float, float], inputs: Specs, outputs: Outs) -> OpWork:
    """The work of an op whose cost the user registered: (flops, bytes), bytes below 0 where they gave none.

    Args:
        registered: (flops, bytes moved); bytes below 0 where the user gave none.
        inputs, outputs: local specs; None for an absent output.
    """
    flops, moved = registered
    if moved < 0:
        moved = sum(map(nbytes, inputs)) + sum(nbytes(out) for out in outputs if out is not None)
    narrow = min((spec.shape[-1] for spec in inputs if spec.shape), default=1)
    return OpWork(
        kind="matmul" if flops else "memory",
        flops=round(flops),
        read_bytes=round(moved),
        write_bytes=0,
        dtype=_dtype(inputs, outputs),
        narrow=narrow if flops else 0,
    )


def _dtype(inputs: Specs, outputs: Outs) -> str:
    return next((spec.dtype for spec in (*inputs, *outputs) if spec is not None), "float32")


def rate_of(device: Device, dtype: str) -> float:
    """Peak matrix rate of a device in flop/s; integers and complex numbers go at the slowest rate it has.

    Raises:
        CostModelError: a float dtype the device has no rate for.
    """
    rate = device.flops_per_s.get(dtype)
    if rate is not None:
        return rate
    if dtype in FLOATS:
        has = ", ".join(device.flops_per_s)
        raise CostModelError(f"{device.kind} has no rate for {dtype} (only {has}); use one of these or another device")
    return min(device.flops_per_s.values())


TURNING, TURNS = 4, 3
"""Traffic of a byte turned channels last, in bytes of other copies: read and written, at half their rate; and how many
tensors are. With both, convolutions of a ResNet take 0.95 of what an H200 took for them in the median, without 0.4."""


def op_time_s(work: OpWork, device: Device) -> float:
    """Roofline time of one op on one device.

    t = launches · launch_s + (copied_bytes + 4 · turned_bytes) / (bandwidth · share)
        + max(flops / (rate · √power · share · w / (w + half_dim)), bytes / (bandwidth · share)),
    w = work.narrow. Where the device's multiprocessors are known, the last factor is how full products of that shape
    keep them (`tiles.filled`). power: the device's `power_share`. Power goes with clock times voltage squared: with the
    clock alone where the voltage is at its floor, with its third power where they rise together; its square lies
    between. Products in float32 run on plain units, which take less than the limit at full clock.

    Returns:
        Seconds; 0.0 for a view (nothing is launched).
    Raises:
        CostModelError: the device has no rate for the work's float dtype.
    """
    if work.kind == "view":
        return 0.0
    share = efficiency_of(device.backend)
    time = (work.read_bytes + work.write_bytes) / moved_bytes_per_s(work.pattern, device, share.memory)
    if work.flops:
        of_class = share.attention if work.kind == "attention" else share.matmul
        full = work.narrow / (work.narrow + share.half_dim)
        if work.shape and device.multiprocessors:
            full = filled(work.shape, device.multiprocessors, share.half_dim)
        power = 1.0 if work.dtype == "float32" else device.clock_share or device.power_share**0.5
        time = max(time, work.flops / (rate_of(device, work.dtype) * power * of_class * full))
    turned = work.turned_bytes if device.backend == "cuda" else 0
    launches = 1 + (TURNS if turned else 0)
    by_columns = moved_bytes_per_s(NORM_COLUMNS, device, share.memory) if work.column_bytes else 0.0
    if by_columns:
        launches += 1
        time += work.column_bytes / by_columns
    copied = work.copied_bytes + TURNING * turned
    return device.launch_s * launches + time + copied / (device.memory_bytes_per_s * share.memory)
