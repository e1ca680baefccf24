"""All ranks of a block (or of a rank program) in one process, instruction by instruction, with nothing but torch.

It shares no code with the runtime but the kernels, and checks on the way what lowering foretold: local shapes,
dtypes, strides, which results are views, and that every name is freed exactly once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paraplan.ir.execution.name import Name, Role
from paraplan.ir.execution.offsets import offset_value
from paraplan.ir.execution.rank_program import Block, InstrKind, Step, StepKind
from paraplan.ir.machine.mesh import Layout, Partial, Replicate, Shard, parse_layout
from paraplan.ir.model.graph import Arg, decode_number
from paraplan.ir.model.seeds import segment_seed
from paraplan.ir.model.strides import contiguous_strides
from paraplan.ir.plan import Plan
from paraplan.kernels import reference_kernels
from paraplan.kernels.scan_kernels import scan
from paraplan.lowering import lower

Dims = tuple[int, ...]
Pieces = dict[Dims, Tensor]


def everywhere(mesh_shape: Dims) -> list[Dims]:
    """Every coordinate of a mesh."""
    return list(itertools.product(*map(range, mesh_shape)))


def _addends(full: Tensor, n: int, generator: torch.Generator) -> list[Tensor]:
    if full.is_floating_point():
        parts = [torch.randn(full.shape, generator=generator, dtype=full.dtype) for _ in range(n - 1)]
    else:
        parts = [torch.randint(-9, 9, full.shape, generator=generator, dtype=full.dtype) for _ in range(n - 1)]
    return [*parts, full - sum(parts)] if parts else [full]


def _contenders(full: Tensor, n: int, generator: torch.Generator) -> list[Tensor]:
    """Tensors whose maximum is `full`, the winner different per element."""
    winner = torch.randint(0, n, full.shape, generator=generator)
    return [torch.where(winner == rank, full, full - 1 - rank) for rank in range(n)]


def blocks(x: Tensor, dim: int, n: int, length: int = 0, padding: float | None = None) -> list[Tensor]:
    """Equal parts along a dim, the last ones padded: by default with what would be noticed."""
    length = length or -(-x.shape[dim] // n)
    if padding is None:
        padding = float("nan") if x.is_floating_point() else 1 if x.dtype == torch.bool else 10**6
    missing = n * length - x.shape[dim]
    more = torch.full((*x.shape[:dim], missing, *x.shape[dim + 1 :]), padding, dtype=x.dtype)
    return list(torch.cat([x, more], dim).split(length, dim)) if missing else list(x.split(length, dim))


def scatter(full: Tensor, layout: Layout, mesh_shape: Dims, seed: int = 0, padding: float | None = None) -> Pieces:
    """What every rank holds; partial sums are random addends. For `padding` see `blocks`."""
    generator = torch.Generator().manual_seed(seed)

    def cut(x: Tensor, axis: int) -> list[tuple[Dims, Tensor]]:
        if axis == len(mesh_shape):
            return [((), x)]
        place, n = layout[axis], mesh_shape[axis]
        if isinstance(place, Shard):
            parts = blocks(x, place.dim, n, padding=padding)
        elif isinstance(place, Replicate):
            return [((k, *coords), y) for coords, y in cut(x, axis + 1) for k in range(n)]
        else:
            assert isinstance(place, Partial)
            parts = _addends(x, n, generator) if place.op == "sum" else _contenders(x, n, generator)
        assert len(parts) == n
        return [((k, *coords), y) for k, part in enumerate(parts) for coords, y in cut(part, axis + 1)]

    return {coords: x.clone(memory_format=torch.contiguous_format) for coords, x in cut(full, 0)}


def gather(pieces: Pieces, layout: Layout, mesh_shape: Dims, shape: Dims | None = None) -> Tensor:
    """The whole tensor, of a shape where there is padding to drop; ranks that should agree are held to it."""
    done = pieces
    for axis in reversed(range(len(mesh_shape))):
        place, n = layout[axis], mesh_shape[axis]
        joined: Pieces = {}
        for coords in {c[:axis] for c in done}:
            parts = [done[(*coords, k)] for k in range(n)]
            if isinstance(place, Shard):
                joined[coords] = torch.cat(parts, place.dim)
                if shape is not None:
                    joined[coords] = joined[coords][(slice(None),) * place.dim + (slice(shape[place.dim]),)]
            elif isinstance(place, Replicate):
                for other in parts[1:]:
                    assert_close(other, parts[0], "ranks that hold the same value")
                joined[coords] = parts[0]
            else:
                assert isinstance(place, Partial)
                joined[coords] = torch.stack(parts).amax(0) if place.op == "max" else sum(parts[1:], parts[0])
        done = joined
    return done[()]


def assert_close(found: Tensor, wanted: Tensor, what: str, tolerance: float = 1e-12) -> None:
    """Equal up to rounding; infinities and NaN must match."""
    assert found.shape == wanted.shape, (what, found.shape, wanted.shape)
    assert found.dtype == wanted.dtype, (what, found.dtype, wanted.dtype)
    if wanted.element_size() == 1 and wanted.is_floating_point():
        found, wanted = found.float(), wanted.float()
    if torch.equal(found, wanted):
        return
    assert wanted.is_floating_point(), what
    scale = wanted[wanted.isfinite()].abs().max().item() if wanted.isfinite().any() else 0.0
    torch.testing.assert_close(
        found, wanted, rtol=0.0, atol=tolerance * max(scale, 1.0), equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def placed(x: Tensor, strides: Dims) -> Tensor:
    """The same values laid out with these strides (dense ones)."""
    out = torch.empty_strided(x.shape, strides, dtype=x.dtype)
    return out.copy_(x)


def function(target: str):  # type: ignore[no-untyped-def]
    """What an instruction computes, written independently of `runtime.executing.instructions`."""
    space, name = target.split(".")[:2]
    if space == "aten":
        return getattr(getattr(torch.ops.aten, name), target.split(".")[2])
    fresh = {"memory_format": torch.contiguous_format}
    own = {
        "shard": lambda x, dim, length, start: _block(x, dim, length, start).clone(**fresh),
        "stack": lambda x, n, dim, block=0: torch.cat(blocks(x, dim, n, block, 0), 0).contiguous(),
        "unstack": lambda x, n, dim, size=None: _first(torch.cat(x.chunk(n, 0), dim).contiguous(), dim, size),
        "fill_tail": lambda x, *args: _set_tail(x.clone(**fresh), *args),
        "fill_tail_": lambda x, *args: _set_tail(x, *args),
        "first_only": lambda x, c: x.clone(**fresh) if c == 0 else torch.zeros(x.shape, dtype=x.dtype),
        "reshape_copy": lambda x, shape: x.clone(**fresh).view(shape),
        "write": lambda dst, src: dst.copy_(src),
        "put_": _into,
        "scan": scan,
        "grow_": lambda total, addend: total.copy_(total + addend),
        "linear_grad_weight_": lambda total, *given: total.copy_(total + reference_kernels.linear_grad_weight(*given)),
        "pack": lambda xs, n, dims: torch.cat(
            [
                x.chunk(n, dim)[r].flatten() if n > 1 else x.flatten()
                for r in range(n)
                for x, dim in zip(xs, dims, strict=True)
            ]
        ),
        "unpack": _views,
        "unpack_stacked": _joined,
    }
    return own.get(name) or getattr(reference_kernels, name)


def _block(x: Tensor, dim: int, length: int, start: int) -> Tensor:
    assert start % length == 0
    parts = blocks(x, dim, max(start // length + 1, -(-x.shape[dim] // length)), length, 0)
    return parts[start // length]


def _first(x: Tensor, dim: int, size: int | None) -> Tensor:
    return x if size is None else x[(slice(None),) * dim + (slice(size),)].clone(memory_format=torch.contiguous_format)


def _set_tail(x: Tensor, dim: int, size: int, start: int, value: float) -> Tensor:
    for index in range(x.shape[dim]):
        if start + index >= size:
            x.select(dim, index).copy_(torch.tensor(value, dtype=x.dtype))
    return x


def _into(whole: Tensor, part: Tensor, dim: int, start: int) -> Tensor:
    whole[(slice(None),) * dim + (slice(start, start + part.shape[dim]),)] = part
    return whole


def _views(buffer: Tensor, shapes: list[list[int]]) -> list[Tensor]:
    found, place = [], 0
    for shape in shapes:
        found.append(buffer[place : place + math.prod(shape)].view(shape))
        place += math.prod(shape)
    return found


def _joined(buffer: Tensor, n: int, shapes: list[list[int]], dims: list[int]) -> list[Tensor]:
    ranks = [_views(part, shapes) for part in buffer.chunk(n)]
    return [torch.cat([rank[index] for rank in ranks], dim) for index, dim in enumerate(dims)]


def decode(arg: Arg, env: Mapping[str, Tensor], coords: Dims, microbatch: int) -> object:
    """An instruction's argument as torch takes it."""
    if isinstance(arg, (tuple, list)):
        return [decode(item, env, coords, microbatch) for item in arg]
    if not isinstance(arg, str):
        return arg
    if arg.startswith("%"):
        return env[arg[1:]]
    if arg.startswith("#"):
        return offset_value(arg, coords, microbatch)
    if arg.startswith("~"):
        return decode_number(arg)
    named = getattr(torch, arg[1:], None)
    return named if isinstance(named, torch.dtype) else arg[1:]


def run_block(
    block: Block, given: dict[Dims, dict[str, Tensor]], mesh_shape: Dims, microbatch: int = 0, orders: bool = True
) -> dict[Dims, dict[str, Tensor]]:
    """Run a block on every rank of a mesh (without the microbatch axis).

    Args:
        block: the block.
        given: per coordinate, its inputs by name; consumed.
        microbatch: for offsets.
        orders: whether strides must be the foretold ones.
    Returns:
        Per coordinate, what is left: the outputs and saved values, and nothing else.
    """
    for coords, env in given.items():
        assert set(env) == set(block.inputs), (block.name, coords, set(env) ^ set(block.inputs))
        for name, value in env.items():
            _check_value(block, name, value, "input", orders)
    for instr in block.instrs:
        if instr.kind is InstrKind.COLLECTIVE:
            _collective(block, instr, given, mesh_shape)
        elif instr.kind is InstrKind.WAIT:
            for env in given.values():
                env[instr.outs[0]] = env[instr.args[0][1:]]  # type: ignore[index]
        elif instr.kind is InstrKind.COPY:
            for env in given.values():
                foretold, source = block.values[instr.outs[0]], env[instr.args[0][1:]]  # type: ignore[index]
                made = torch.empty_strided(foretold.shape, foretold.strides, dtype=source.dtype)
                env[instr.outs[0]] = made.copy_(source)  # type: ignore[index]
        else:
            for coords, env in given.items():
                _run_op(block, instr, env, coords, microbatch, orders)
        for env in given.values():
            for name in instr.frees:
                del env[name]
    kept = {name for name in (*block.outputs, *block.saved) if name is not None}
    for env in given.values():
        assert set(env) - set(block.inputs) == kept - set(block.inputs), (block.name, set(env) ^ kept)
        assert kept <= set(env)
    return given


def _run_op(block: Block, instr, env: dict[str, Tensor], coords: Dims, microbatch: int, orders: bool) -> None:  # type: ignore[no-untyped-def]
    args = [decode(arg, env, coords, microbatch) for arg in instr.args]
    kwargs = {key: decode(arg, env, coords, microbatch) for key, arg in instr.kwargs.items()}
    storages = {x.untyped_storage().data_ptr() for x in env.values() if x.numel()}
    result = function(instr.target)(*args, **kwargs)
    results = result if isinstance(result, (tuple, list)) else (result,)
    for name, value in zip(instr.outs, results, strict=False):
        if name is None:
            continue
        _check_value(block, name, value, instr.target, orders)
        if value.numel():
            base = block.values[name].base
            if base == name:
                assert value.untyped_storage().data_ptr() not in storages, (
                    instr.target,
                    name,
                    "shares storage, foretold fresh",
                )
            elif base in env:
                assert value.untyped_storage().data_ptr() == env[base].untyped_storage().data_ptr(), (
                    instr.target,
                    name,
                    "is no view",
                )
        env[name] = value


def _check_value(block: Block, name: str, value: Tensor, what: str, orders: bool = True) -> None:
    foretold = block.values[name]
    where = (block.name, what, name)
    assert tuple(value.shape) == foretold.shape, (*where, tuple(value.shape), foretold.shape)
    assert str(value.dtype) == f"torch.{foretold.dtype}", (*where, value.dtype, foretold.dtype)
    real = [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size != 1]
    said = [stride for stride, size in zip(foretold.strides, foretold.shape, strict=True) if size != 1]
    assert real == said or value.numel() == 0 or not orders, (
        *where,
        "strides",
        tuple(value.shape),
        value.stride(),
        foretold.strides,
    )


def _collective(block: Block, instr, given: dict[Dims, dict[str, Tensor]], mesh_shape: Dims) -> None:  # type: ignore[no-untyped-def]
    source, reduction, axis, n = instr.args[0][1:], instr.args[1][1:], instr.axis, mesh_shape[instr.axis]
    results = {}
    for coords in given:
        xs = [given[(*coords[:axis], k, *coords[axis + 1 :])][source] for k in range(n)]
        assert all(x.is_contiguous() for x in xs), f"{instr.target} of a tensor that is not contiguous"
        me = coords[axis]
        if instr.target == "all_reduce":
            results[coords] = torch.stack(xs).amax(0) if reduction == "max" else sum(xs[1:], xs[0].clone())
        elif instr.target == "all_gather":
            results[coords] = torch.cat(xs, 0)
        elif instr.target == "reduce_scatter":
            assert reduction == "sum"
            results[coords] = sum(x.chunk(n, 0)[me] for x in xs)
        elif instr.target == "permute":
            results[coords] = xs[me - 1].clone()
        elif instr.target == "route":
            peers = [given[(*coords[:axis], k, *coords[axis + 1 :])] for k in range(n)]
            sent = [peer[instr.args[2][1:]].tolist() for peer in peers]
            assert [row[me] for row in sent] == given[coords][instr.args[3][1:]].tolist()
            rows = [x[sum(row[:me]) : sum(row[: me + 1])] for x, row in zip(xs, sent, strict=True)]
            results[coords] = xs[0].new_zeros((instr.args[4], *xs[0].shape[1:]))
            results[coords][: sum(map(len, rows))] = torch.cat(rows)
        else:
            assert instr.target == "all_to_all", instr.target
            results[coords] = torch.cat([x.chunk(n, 0)[me] for x in xs], 0)
    for coords, value in results.items():
        if block.values[instr.outs[0]].base != instr.outs[0]:
            value = given[coords][source].copy_(value)
        given[coords][instr.outs[0]] = value
        _check_value(block, instr.outs[0], value, instr.target)


def run_plan(
    plan: Plan, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Mapping[str, Tensor], seed: int = 0
) -> tuple[list[float], dict[str, Tensor]]:
    """One step of a plan up to the update: the loss as every rank has it, and full gradients."""
    program, stage = lower(plan)[0], plan.stages[0]
    shape = stage.mesh.shape
    outer: dict[Dims, dict[Name, Tensor]] = {coords: {} for coords in everywhere(shape)}
    for name, value in program.outer.items():
        layout = parse_layout(value.layout)
        if value.role in (Role.PARAMETER, Role.STATE):
            full = params[value.source].to(getattr(torch, value.dtype))
        elif value.role is Role.BUFFER:
            full = buffers[value.source]
        elif value.role is Role.SEED:
            full = torch.tensor(segment_seed(seed, 0, int(value.source)))
        else:
            full, dim = batch[value.source], plan.program.batch[value.source].batch_dim
            if dim is not None and plan.num_microbatches > 1:
                full = full.chunk(plan.num_microbatches, dim)[name.microbatch]
        for coords, piece in scatter(full, layout, shape, padding=0).items():
            assert tuple(piece.shape) == value.shape, name
            outer[coords][name] = piece
    with torch.no_grad():
        for step in program.steps:
            if step.kind is StepKind.UPDATE:
                break
            _run_step(step, program.blocks, outer, shape)
    grads = {}
    for name, out in program.grads.items():
        pieces = {coords: env[out] for coords, env in outer.items()}
        whole = plan.program.params[name].spec.shape
        grads[name] = gather(pieces, parse_layout(stage.params[name].state), shape, whole)
    return [env[program.loss].item() for env in outer.values()], grads


def _run_step(step: Step, blocks: Mapping[str, Block], outer: dict[Dims, dict[Name, Tensor]], shape: Dims) -> None:
    if step.kind is StepKind.CALL:
        block = blocks[step.block]
        given = {
            coords: dict(zip(block.inputs, (env[arg] for arg in step.args), strict=True))
            for coords, env in outer.items()
        }
        left = run_block(block, given, shape, step.microbatch)
        for coords, env in outer.items():
            for name in step.drops:
                del env[name]
            for name, local in zip(step.outs, (*block.outputs, *block.saved), strict=True):
                if name is not None:
                    assert local is not None
                    env[name] = left[coords][local]
    elif step.kind is StepKind.ACCUMULATE:
        into, addend = step.args
        for env in outer.values():
            value = env.pop(addend)
            if into in env:
                env[into].add_(value)
            else:
                env[into] = value
    else:
        for env in outer.values():
            for name in step.drops:
                del env[name]


def local_strides(shape: Dims, order: Sequence[int] | None) -> Dims:
    """Dense strides whose dims lie in this order, slowest first; None: row-major."""
    if order is None:
        return contiguous_strides(shape)
    strides = [0] * len(shape)
    for dim, stride in zip(order, contiguous_strides(tuple(shape[dim] for dim in order)), strict=True):
        strides[dim] = stride
    return tuple(strides)
