"""What a registered rule must share with its op's schema: numbers of tensors and results, names of arguments."""

from __future__ import annotations

from typing import Any

import torch

from paraplan.ir.errors import ConstraintError
from paraplan.kernels.torch_private import OpOverload
from paraplan.rules.registered_rules import Annotation


def overload_of(target: str) -> OpOverload:
    """The op in this process.

    Raises:
        ConstraintError: it is not registered with torch.
    """
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, OpOverload):
        raise ConstraintError(f"no op {target!r} is registered with torch; import the module that defines it first")
    return found


def fits_schema(annotation: Annotation) -> None:
    """Holds what can be told of a rule by the op's schema against it.

    Raises:
        ConstraintError: no such op, or other numbers of tensors and results, or no such integer argument.
    """
    schema = overload_of(annotation.target)._schema

    def fail(why: str) -> ConstraintError:
        return ConstraintError(f"rule of {annotation.target}, {annotation.text!r}: {why}; the op is {schema}")

    if schema.is_mutable:
        raise fail("the op writes its inputs, and no rule can say what becomes of them: register one that returns them")
    given = [str(argument.type) for argument in schema.arguments]
    made = [str(result.type) for result in schema.returns]
    for what, types, terms in (("tensors", given, annotation.inputs), ("results", made, annotation.outputs)):
        tensors = [text for text in types if "Tensor" in text]
        count, is_open = len(tensors), any("List" in text or "[]" in text for text in tensors)
        if len(terms) != count and not (is_open and len(terms) >= count - 1):
            verb = "takes" if types is given else "gives"
            raise fail(f"it names {len(terms)} {what}, the op {verb} {count}")
    for names in annotation.size_args.values():
        arguments = {argument.name: str(argument.type) for argument in schema.arguments}
        if wrong := [name for name in names if "int" not in arguments.get(name, "").lower()]:
            raise fail(f"size_args names {wrong[0]!r}, which is no integer argument")
