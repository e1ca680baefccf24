"""Which program and which model: digests that tie a plan, its file, a model and a checkpoint together.

    program_digest      of every byte of a program: a plan file whose program was changed is refused
    plan_digest         of all else in a plan file: one whose decisions or prediction were changed is priced anew
    program_meaning     of what a program computes: equal for two captures of one model
    model_fingerprint   of the model behind a program, whatever its batch, precision and plan: what a checkpoint carries

They find accidents; somebody who edits a file can also write a new digest into it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from paraplan.ir.errors import PlanMismatchError
from paraplan.ir.model.program import Program
from paraplan.ir.plan import Plan
from paraplan.ir.struct import written_fields

_ANNOTATIONS = ("sources", "source", "rule")
"""Of a graph and its ops: where they come from and how they may be sharded, not what they compute."""
_TENSORS, _CODE = "parameters and buffers", "code of "


def program_digest(program: Program) -> str:
    """sha256 of a program, every field."""
    return hashlib.sha256(msgspec.json.encode(program)).hexdigest()


def plan_digest(plan: Plan) -> str:
    """sha256 of a plan, every field but its program."""
    fields = {name: value for name, value in written_fields(plan).items() if name != "program"}
    return hashlib.sha256(msgspec.json.encode(fields)).hexdigest()


def program_meaning(program: Program) -> str:
    """sha256 of what a program computes: graphs, segments, loss, batch, parameters, buffers."""
    kept = _without(msgspec.to_builtins(program))
    for name in ("name", "fingerprint", "settings", "code"):
        kept.pop(name)
    return hashlib.sha256(msgspec.json.encode(kept)).hexdigest()


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without(item) for key, item in value.items() if key not in _ANNOTATIONS}
    return [_without(item) for item in value] if isinstance(value, (list, tuple)) else value


def model_fingerprint(program: Program) -> dict[str, str]:
    """What identifies the model of a program, by name: its tensors' shapes, its code, what its forward read.

    Independent of the batch, the precision and the plan, so that a checkpoint of one plan can say for which model it
    is; the same in every process. `refuse_other_model` compares it.
    """
    shapes = {name: [list(entry.spec.shape), sorted(entry.aliases)] for name, entry in program.params.items()}
    buffers = {name: list(spec.shape) for name, spec in program.buffers.items()}
    tensors = msgspec.json.encode([sorted(shapes.items()), sorted(buffers.items())])
    code = {f"{_CODE}{name}": text for name, text in program.code.items() if not name.startswith("loss_fn")}
    return {_TENSORS: hashlib.sha256(tensors).hexdigest(), **code, **program.settings}


def refuse_other_model(fingerprint: Mapping[str, str], program: Program, what: str = "the checkpoint") -> list[str]:
    """Refuse what was saved of another model.

    Args:
        fingerprint: `model_fingerprint` of the program it was saved under.
        program: of the plan it is loaded into.
        what: how the message calls what was saved.
    Returns:
        The functions whose code is another, where tensors and what was read are the same: code may have been tidied.
    Raises:
        PlanMismatchError: they differ in tensors or in what forward reads; names what.
    """
    mine = model_fingerprint(program)
    shared = {name: said for name, said in fingerprint.items() if name in mine}  # one batch may read what others do not
    for name, said in shared.items():
        if name.startswith(_CODE) or said == mine[name]:
            continue
        values = "" if name == _TENSORS else f" ({said} there, {mine[name]} here)"
        raise PlanMismatchError(
            f"{what} is of another model than the plan: they differ in {name}{values}; load it under a plan of the "
            "model it was saved of, or load the parameters alone (load_state_dict)"
        )
    code = [name for name in shared if name.startswith(_CODE)]
    return [name.removeprefix(_CODE) for name in code if codes_differ(fingerprint[name], mine[name])]


def codes_differ(one: str, other: str) -> bool:
    """Whether two texts about a function's code ("3.11:<bytecode> ast:<source>") say that it differs.

    Equal bytecode of one Python, or equal source, is the same code; what has neither in common says nothing.
    """
    mine, theirs = (dict(part.partition(":")[::2] for part in text.split()) for text in (one, other))
    shared = [mine[key] == theirs[key] for key in mine if key in theirs]
    return one != other and bool(shared) and not any(shared)
