"""Whether a model computes a plan's program.

What can be compared at once decides most: structure (class, parameters, buffers, modes), the Python values that the
forward read when it was captured, and digests of the user's functions it calls. Where only the functions' code differs,
which may or may not matter, the model is captured again and the programs are compared.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch
from torch import nn

from paraplan.capture import capture, fingerprint
from paraplan.capture.exporting.shared_memory import refuse_shared_memory
from paraplan.capture.python_state.aliases import names_of
from paraplan.capture.python_state.code import from_key
from paraplan.capture.python_state.reading import code_of, loss_text
from paraplan.capture.python_state.setting_keys import LOSS, LOSS_FN, SettingKind, is_of_loss, setting_key
from paraplan.capture.python_state.setting_paths import outside_value, settings_in, value_at
from paraplan.capture.python_state.values import ABSENT, named, same_text, text_of
from paraplan.ir.errors import ParaplanError, PlanMismatchError
from paraplan.ir.model.digests import codes_differ, program_meaning
from paraplan.ir.model.program import Program, given_inputs
from paraplan.ir.plan import Plan


def check_model(plan: Plan, model: nn.Module, loss_fn: object = None) -> None:
    """Refuse another model.

    Args:
        plan: made for one.
        model: to be trained under it, on any device, meta included.
        loss_fn: to be compared with the one the plan was made with, where it is known.
    Raises:
        CaptureError: tensors of the model that change share memory.
        PlanMismatchError: structure, configuration, parameters, buffers, modes, Python values that forward reads, code
            or loss function differ; says what.
    """
    program = plan.program
    if fingerprint(model, program.precision) != program.fingerprint:
        raise _refusal(plan, model, _structure(plan, model))
    refuse_shared_memory(model, (), set(program.buffer_updates))
    said = next(_settings(program, model, loss_fn), "")
    if said:
        raise _refusal(plan, model, said)
    functions = _functions(program, model, loss_fn)
    if functions and not _captures_alike(program, model, loss_fn):
        raise _refusal(plan, model, f"other code of {', '.join(functions[:3])}")


def _refusal(plan: Plan, model: nn.Module, what: str) -> PlanMismatchError:
    return PlanMismatchError(
        f"the plan is for another model: it was made for {plan.model.display}, this is {type(model).__name__} with "
        f"{what}. Give the model the plan was made for, or plan again"
    )


def _structure(plan: Plan, model: nn.Module) -> str:
    wanted = {name: spec.spec.shape for name, spec in plan.program.params.items()}
    wanted |= {alias: spec.spec.shape for spec in plan.program.params.values() for alias in spec.aliases}
    found = {name: tuple(param.shape) for name, param in model.named_parameters(remove_duplicate=False)}
    for name, shape in wanted.items():
        if name not in found:
            return f"no parameter {name} {shape}"
        if found[name] != shape:
            return f"parameter {name} of shape {found[name]} where the plan has {shape}"
    extra = [name for name in found if name not in wanted]
    if extra:
        return f"a parameter {extra[0]} that the plan does not know"
    said = next(_settings(plan.program, model, None), "")
    if said:
        return said
    mode = "training" if model.training else "evaluation"
    return (
        "the same parameters but another class, configuration (dropout too), frozen or tied parameters, buffers "
        f"or mode (it is in {mode} mode)"
    )


def _settings(program: Program, model: nn.Module, loss_fn: object) -> Iterator[str]:
    """What forward read and is another value here."""
    seen, names = set(), names_of(model)
    for key, place in settings_in(model, program):
        seen.add(key)
        text = text_of(named(value_at(place.owner, place.name, place.item), names))
        if not same_text(text, program.settings[key]):
            yield f"{place.where} {text} where the plan has {program.settings[key]}"
    for key, wanted in program.settings.items():
        kind, _, path = setting_key(key)
        if kind is SettingKind.GLOBAL:
            found = from_key(key)
            text = wanted if found is None else text_of(outside_value(found))
            if found is not None and not same_text(text, wanted):
                yield f"{found.where} {text} where the plan has {wanted}"
        elif kind is SettingKind.ATTRIBUTE and key not in seen and wanted != repr(ABSENT):
            yield f"no attribute {path}, which is {wanted} in the plan"
    if loss_fn is not None and program.settings.get(LOSS_FN) not in (None, loss_text(loss_fn)):
        yield f"the loss function {loss_text(loss_fn)} where the plan has {program.settings[LOSS_FN]}"


def _functions(program: Program, model: nn.Module, loss_fn: object) -> list[str]:
    """Functions whose code may be other than the plan's."""
    mine = code_of(model, loss_fn)
    known = {name: text for name, text in program.code.items() if loss_fn is not None or not is_of_loss(name)}
    shared = {name for name in mine if name in known and not codes_differ(mine[name], known[name])}
    return sorted({*mine, *known} - shared)


def _captures_alike(program: Program, model: nn.Module, loss_fn: object) -> bool:
    """Whether the model, captured on the plan's batch, makes its program; False where that cannot be told."""
    settings = program.settings
    if LOSS_FN in settings and loss_fn is None:
        return False
    try:
        others = {
            said.name: ast.literal_eval(text)
            for said, text in ((setting_key(key), text) for key, text in settings.items())
            if said.kind is SettingKind.ARGUMENT
        }
        choice = ast.literal_eval(settings[LOSS]) if LOSS in settings else None
        inputs = given_inputs(program)
        batch = {
            name: torch.empty(entry.spec.shape, dtype=getattr(torch, entry.spec.dtype), device="meta")
            for name, entry in inputs.items()
        }
        found = capture(
            model,
            {**batch, **others},
            loss_fn=loss_fn,
            precision=program.precision,
            loss=choice,  # type: ignore[arg-type]
            batch_dims={name: entry.batch_dim for name, entry in inputs.items()},
            per_microbatch=program.apart,
            dynamic=[entry.attribute for entry in program.batch.values() if entry.attribute],
        )
    except (ParaplanError, ValueError, SyntaxError):
        return False
    return program_meaning(found) == program_meaning(program)
