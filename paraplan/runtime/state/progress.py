"""What a training state has beside tensors: param groups, schedules, the scaler, steps taken, seed, and whose it is.

Param groups are told by the names of their parameters over all ranks, so that a plan whose ranks hold others of them,
or that updates some elsewhere (groups are split by place), finds the options of its own groups. Where groups differ in
number, what a schedule keeps per group follows them.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paraplan.ir.errors import PlanMismatchError
from paraplan.ir.model.digests import model_fingerprint, refuse_other_model
from paraplan.ir.model.program import Program

VERSION = 1
_OWN = frozenset(("params", "foreach", "fused", "capturable", "differentiable"))
"""Options of a group that say how it is executed, and stay as they are."""
_OF_SCHEDULES = frozenset(("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"))
"""Options that torch's schedules add to groups."""
_PER_GROUP = frozenset(("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"))
"""What torch's schedulers keep per group."""

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
Groups = list[dict[str, Any]]


def optimizers_in(value: Any) -> list[torch.optim.Optimizer]:
    """Several, one or none as a list.

    Raises:
        PlanMismatchError: it is something else.
    """
    return _listed(value, "optimizer", "a torch.optim.Optimizer", lambda x: hasattr(x, "param_groups"))


def schedulers_in(value: Any) -> list[Any]:
    """Likewise."""
    return _listed(
        value,
        "scheduler",
        "one of torch.optim.lr_scheduler",
        lambda x: hasattr(x, "load_state_dict") and not hasattr(x, "param_groups"),
    )


def check_scaler(value: Any) -> None:
    """Likewise, of one or none."""
    _listed(value, "scaler", "a torch.amp.GradScaler", lambda x: hasattr(x, "load_state_dict") and hasattr(x, "scale"))


def _listed(value: Any, argument: str, wanted: str, fits: Callable[[Any], bool]) -> list[Any]:
    found = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
    for each in found:
        if isinstance(each, type) or not fits(each):
            shown = each.__name__ if isinstance(each, type) else type(each).__name__
            raise PlanMismatchError(f"{argument}= is given a {shown}: give {wanted}, several as a list, or None")
    return found


def check_mapping(value: Any, argument: str, source: str) -> None:
    """Refuse a state that is no mapping.

    Args:
        value: what was given.
        argument: the name it was given as.
        source: what makes one.
    Raises:
        PlanMismatchError: names the argument, what it is, and what makes one.
    """
    if not isinstance(value, Mapping):
        raise PlanMismatchError(f"{argument} is a {type(value).__name__}: give a mapping as {source} makes it")


def pack(value: Any) -> bytes:
    """Numbers of any structure as one leaf of a checkpoint."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpack(packed: bytes) -> Any:
    """The inverse of `pack`; loads data alone.

    Raises:
        PlanMismatchError: it has something else, or is none of these.
    """
    try:
        return torch.load(io.BytesIO(packed), weights_only=True)
    except Exception as fault:  # noqa: BLE001  (whatever unpickling raises)
        raise PlanMismatchError(
            f"what the checkpoint has beside tensors cannot be read as data ({type(fault).__name__}: {fault}); a "
            "scheduler's or optimizer's own objects are no part of a training state: keep numbers and tensors there"
        ) from None


def header(program: Program) -> dict[str, Any]:
    """Which model a state is of."""
    return {
        "version": VERSION,
        "model": program.name,
        "fingerprint": program.fingerprint,
        "identity": model_fingerprint(program),
        "precision": program.precision,
        "params": {name: tuple(param.spec.shape) for name, param in program.params.items()},
        "written": {name: tuple(program.buffers[name].shape) for name in program.buffer_updates},
    }


def check_header(program: Program, found: Any) -> None:
    """Refuse the state of another model. One trained in another precision has to agree in names and shapes.

    Raises:
        PlanMismatchError: says what differs.
    """
    if not isinstance(found, Mapping) or not {"version", "params", "written"} <= set(found):
        raise PlanMismatchError(
            "this is no training state: parameters and optimizer states without what says whose they are; make it with "
            "trainer.training_state or trainer.save"
        )
    if found["version"] > VERSION:
        raise PlanMismatchError(
            f"the training state is of version {found['version']}, this paraplan reads up to {VERSION}"
        )
    own = header(program)
    difference = _difference(own["params"], found["params"], "parameter")
    difference = difference or _difference(own["written"], found["written"], "buffer")
    same = found["precision"] != own["precision"] or found["fingerprint"] == own["fingerprint"]
    if difference or not same:
        difference = difference or "the same parameters, but another class, configuration, frozen parameters or mode"
        raise PlanMismatchError(
            f"the training state is of another model: it is of {found['model']}, the plan is for {own['model']}; it "
            f"has {difference}. Resume with the model it was saved from; parameters alone, where names agree, load "
            "with load_state_dict or load_full_state_dict"
        )
    for name in refuse_other_model(found.get("identity", {}), program, "the training state"):
        warnings.warn(
            f"the code of {name} is not what it was when the training state was saved; training goes on with what the "
            "plan was made of",
            stacklevel=2,
        )


def _difference(own: Mapping[str, Any], found: Mapping[str, Any], what: str) -> str:
    for name in own:
        if name not in found:
            return f"no {what} {name} {tuple(own[name])}"
        if tuple(found[name]) != tuple(own[name]):
            return f"{what} {name} of shape {tuple(found[name])} where the plan has {tuple(own[name])}"
    extra = next((name for name in found if name not in own), None)
    return "" if extra is None else f"a {what} {extra} that the plan does not know"


def groups_of(
    optimizers: Sequence[torch.optim.Optimizer],
    params: Mapping[str, nn.Parameter],
    everyones: Callable[[Any], list[Any]] = lambda own: [own],
) -> Groups:
    """The groups of optimizers one after another, with names for parameters.

    Args:
        optimizers: of this rank.
        params: this rank's parameters by name.
        everyones: what all ranks give, in their order.
    Raises:
        PlanMismatchError: an optimizer has a parameter that is not the trainer's; ranks have other groups or options.
    """
    names = {id(param): name for name, param in params.items()}
    own: Groups = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            unknown = next((param for param in group["params"] if id(param) not in names), None)
            if unknown is not None:
                raise PlanMismatchError(
                    f"{type(optimizer).__name__} has a parameter of shape {tuple(unknown.shape)} that is none of the "
                    "trainer's; make it with trainer.optimizer, and keep others in an optimizer of their own"
                )
            told = {key: value for key, value in group.items() if key != "params"}
            own.append({"params": [names[id(param)] for param in group["params"]], **told})
    found: Groups = []
    every = everyones(own)
    for index, ranks in enumerate(zip(*every, strict=False)):
        held = [group for group in ranks if group["params"]] or [ranks[0]]
        texts = {repr({key: value for key, value in group.items() if key != "params"}) for group in held}
        if len(texts) > 1 or len({len(groups) for groups in every}) > 1:
            raise PlanMismatchError(
                f"group {index} of the optimizer is another on other ranks ({' / '.join(sorted(texts))}); make groups "
                "of the same number and options on every rank, some of which may be empty there"
            )
        joined = dict.fromkeys(name for group in ranks for name in group["params"])
        found.append({**held[0], "params": list(joined)})
    return found


def others_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer keeps in its state under names of its own."""
    return {key: value for key, value in optimizer.state.items() if isinstance(key, str)}


def matched(groups: Groups, saved: Groups) -> list[int | None]:
    """For each group, the saved one whose options it takes; None where it has no parameter.

    Raises:
        PlanMismatchError: a parameter has none, those of a group had several options, or they are of another class.
    """
    of = {name: index for index, group in enumerate(saved) for name in group["params"]}
    found: list[int | None] = []
    for index, group in enumerate(groups):
        lost = [name for name in group["params"] if name not in of]
        if lost:
            raise PlanMismatchError(
                f"the training state has no options for {', '.join(lost[:3])} ({len(lost)} in all): its optimizer did "
                "not have them; make the optimizer over the parameters it was saved with"
            )
        there = sorted({of[name] for name in group["params"]})
        texts = [{key: repr(saved[at][key]) for key in saved[at] if key not in _OWN} for at in there]
        differ = next((key for text in texts for key in text if text[key] != texts[0].get(key)), None)
        if differ is not None:
            values = ", ".join(f"{saved[at].get(differ)} for {saved[at]['params'][0]}" for at in there)
            raise PlanMismatchError(
                f"group {index} of the optimizer takes parameters that were saved in {len(there)} groups of other "
                f"options ({differ}: {values}); make the optimizer with the same groups"
            )
        for at in there:
            _check_class(group, saved[at])
        alone = index if len(groups) == len(saved) else None
        found.append(there[0] if there else alone)
    return found


def _check_class(group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse options of another class of optimizers, whose states are others too: each has some the other lacks."""
    own, other = (set(options) - _OWN - _OF_SCHEDULES for options in (group, saved))
    if own - other and other - own:
        raise PlanMismatchError(
            f"the training state is of another class of optimizer: it has {', '.join(sorted(other - own))}, this one "
            f"{', '.join(sorted(own - other))}; make the optimizer of the class it was saved with"
        )


def take_groups(optimizers: Sequence[torch.optim.Optimizer], saved: Groups, match: Sequence[int | None]) -> None:
    """Give groups the saved options: learning rates, betas, decay and whatever schedules keep there.

    Args:
        optimizers: whose groups.
        saved: options of the saved groups.
        match: per group, the saved one; None for a new one.
    """
    here = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group, at in zip(here, match, strict=True):
        for key, value in {} if at is None else saved[at].items():  # type: ignore[attr-defined]
            if key in _OWN:
                continue
            now = group.get(key)
            if isinstance(now, Tensor):
                group[key] = torch.as_tensor(value, dtype=now.dtype, device=now.device).clone()
            else:
                group[key] = value.item() if isinstance(value, Tensor) and isinstance(now, (int, float)) else value


def schedules_of(schedulers: Sequence[Any]) -> list[Any]:
    """The states of schedulers."""
    return [scheduler.state_dict() for scheduler in schedulers]


def take_schedules(
    schedulers: Sequence[Any],
    saved: Sequence[Any],
    optimizers: Sequence[torch.optim.Optimizer],
    match: Sequence[int | None],
) -> None:
    """Give schedulers their saved states; what they keep per group follows the groups.

    Args:
        schedulers: in order.
        saved: states of as many.
        optimizers: theirs.
        match: as of `take_groups`.
    Raises:
        PlanMismatchError: there are more or fewer of them.
    """
    if len(schedulers) != len(saved):
        raise PlanMismatchError(
            f"the training state has {len(saved)} schedulers' states and {len(schedulers)} schedulers were given: give "
            "those it was saved with, made on the optimizer as then"
        )
    starts = [0]
    for optimizer in optimizers:
        starts.append(starts[-1] + len(optimizer.param_groups))
    for scheduler, state in zip(schedulers, saved, strict=True):
        mine = next((i for i, each in enumerate(optimizers) if each is getattr(scheduler, "optimizer", None)), 0)
        places = [0 if at is None else at for at in match[starts[mine] : starts[mine + 1]]]
        first = min(places, default=0)
        scheduler.load_state_dict(_regrouped(state, [at - first for at in places]))


def _regrouped(state: Any, places: Sequence[int]) -> Any:
    if isinstance(state, list):
        return [_regrouped(each, places) for each in state]
    if not isinstance(state, dict):
        return state
    return type(state)(
        {
            key: [value[at] for at in places]
            if key in _PER_GROUP and isinstance(value, (list, tuple)) and len(value) > max(places, default=0)
            else _regrouped(value, places)
            for key, value in state.items()
        }
    )
