"""Which updates torch's fused optimizer kernels make: those of tensors without gaps.

A fused kernel makes one pass over a parameter, its gradient and its states, and allocates nothing. It walks all of them
as flat arrays; on a CPU it does not look whether they are, and where a parameter has gaps, or a gradient or state lies
in another order of dims, it updates wrong elements without an error. So gradients accumulate row by row, as parameters
lie, and a place (device, host, disk) where some rank updates a parameter with gaps is updated without fused kernels, on
all ranks: copies of a parameter that several hold then stay equal bit for bit, and so does what is predicted.

    gaps        a shard of another dim than the first within its stored copy; one padded in such a dim
    no gaps     a tensor of its own, rows of the stored copy, rows of a padded shard
"""

from __future__ import annotations

from collections.abc import Iterable

from paraplan.ir.machine.mesh import is_view_of, local_shape, padded_dims, parse_layout
from paraplan.ir.machine.rank_groups import Holding
from paraplan.ir.model.program import Program, master_dtype
from paraplan.ir.model.strides import contiguous_strides, is_contiguous
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.param_layouts import ParamLayouts

Dims = tuple[int, ...]

_REAL = frozenset(("float64", "float32", "bfloat16", "float16"))


def is_fusible(spec: TensorSpec, dtype: str, layouts: ParamLayouts, mesh_shape: Dims) -> bool:
    """Whether what is updated of a parameter is floating point and has no gaps on any rank of a mesh.

    Args:
        spec: of the whole parameter, as ops read it.
        dtype: of the optimizer's copy.
        layouts: of the parameter.
        mesh_shape: of the stage.
    """
    stored, state = parse_layout(layouts.resting), parse_layout(layouts.state)
    shape = local_shape(spec.shape, state, mesh_shape)
    if dtype not in _REAL:
        return False
    if any(size > 1 for dim, _ in padded_dims(spec.shape, state, mesh_shape) for size in shape[:dim]):
        return False
    alike = dtype == spec.dtype and is_view_of(spec.shape, stored, state, mesh_shape)
    if layouts.staged or layouts.state_tier != layouts.stored_tier or not (alike or layouts.stored_tier):
        return True
    return is_contiguous(shape, contiguous_strides(local_shape(spec.shape, stored, mesh_shape)))


def fusible_places(program: Program, held: Iterable[Holding]) -> frozenset[str]:
    """The places of updates ("" is the device) that fused kernels can make, on all ranks.

    Args:
        program: of a plan.
        held: `holdings(plan)`.
    """
    found: dict[str, bool] = {}
    for holding in held:
        for name in holding.trained:
            spec, layouts = program.params[name].spec, holding.params[name]
            place, dtype = layouts.update_tier, master_dtype(program.precision, spec.dtype)
            if found.get(place, True):
                found[place] = is_fusible(spec, dtype, layouts, holding.mesh.shape)
    return frozenset(place for place, fused in found.items() if fused)
