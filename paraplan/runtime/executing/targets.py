"""What an instruction's target and arguments stand for: callables, and Python values.

`resolve` turns a target's name into a callable: "aten.mm.default" into torch's operator, "paraplan.linear" into the
canonical op's kernel, "mylib.fused.default" into an op the user registered with torch, and the ops that lowering itself
adds into functions of `instructions`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paraplan.ir.errors import CodegenError
from paraplan.ir.model.graph import Arg, ArgKind, arg_kind, arg_text, decode_number, target_parts
from paraplan.ir.model.tensor import DTYPE_BYTES
from paraplan.ir.process.memo import SESSION
from paraplan.kernels import gpu, reference_kernels
from paraplan.runtime.executing.instructions import OWN, WORKING


def resolve(target: str, kernel: str = "") -> Callable[..., Any]:
    """The callable behind an instruction's target, run as the kernel it was lowered to.

    Raises:
        CodegenError: nothing has that name.
    """
    if kernel:
        return gpu.kernel(target, kernel)
    parts = target_parts(target)
    name = parts.name
    if parts.is_canonical:
        found = (
            OWN.get(name)
            or WORKING.get(name)
            or (getattr(reference_kernels, name, None) if name in reference_kernels.__all__ else None)
        )
    else:
        found = getattr(torch.ops, parts.namespace)
        for attribute in parts.attributes:
            found = getattr(found, attribute, None)
    if found is None or not callable(found):
        if parts.namespace in ("paraplan", "aten", "prims"):
            raise CodegenError(f"no op is called {target!r}")
        raise CodegenError(
            f"op {target!r} is not registered with torch in this process; import the module that defines it before "
            "the plan is made executable"
        )
    return found  # type: ignore[no-any-return]


@SESSION.cached()
def is_factory(target: str) -> bool:
    """Whether an op makes a tensor from numbers alone, so that it must be told the device: its schema has an argument
    `device` and none that is a tensor."""
    schema = getattr(resolve(target), "_schema", None)
    if schema is None:
        return target == "paraplan.constant"
    types = {argument.name: str(argument.type) for argument in schema.arguments}
    return "device" in types and not any("Tensor" in kind for kind in types.values())


def returns_many(target: str, num_outs: int) -> bool:
    """Whether the op returns a tuple or list of tensors rather than one tensor."""
    schema = getattr(resolve(target), "_schema", None)
    if schema is None:
        return num_outs > 1
    return len(schema.returns) > 1 or any("List[" in str(result.type) for result in schema.returns)


def decode_literal(arg: Arg) -> Any:
    """ ":float32" to a dtype, other ":text" to text, "~inf" to a float; everything else is itself."""
    if not isinstance(arg, str):
        return arg
    if arg_kind(arg) is ArgKind.NUMBER:
        return decode_number(arg)
    text = arg_text(arg)
    return getattr(torch, text) if text in DTYPE_BYTES else text
