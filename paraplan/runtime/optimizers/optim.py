"""The user's optimizer over a rank's shards, and the gradient norm over all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paraplan.ir.errors import ConstraintError, PlanMismatchError
from paraplan.ir.machine.mesh import Layout
from paraplan.runtime.executing.torch_private import scale_all
from paraplan.runtime.optimizers.grad_norms import chunk_norms
from paraplan.runtime.optimizers.waiting_grads import WaitingGrads
from paraplan.runtime.state.params import Dims, owned_here

Named = Mapping[str, nn.Parameter]
GroupMaker = Callable[[Named], Iterable[Any]]


def param_groups(
    named: Named,
    groups: Sequence[Mapping[str, Any]] | None,
    params: GroupMaker | None,
    tiers: Mapping[str, str] | None = None,
    everywhere: Iterable[tuple[str, str]] = (),
) -> list[Any]:
    """What the optimizer's class is given: the same groups on every rank, so that schedulers are the same there, some
    without parameters where a stage of a pipeline has none of theirs.

    Args:
        named: a rank's shards by parameter name.
        groups: `{"match": regex, **options}`: a parameter goes to the first whose pattern is found in its
            name; the rest form a group with the optimizer's own options.
        params: makes the groups itself, of this rank's parameters; not together with `groups`.
        tiers: where each parameter is updated; a group whose parameters are updated in several places becomes one
            for each, device first, so that what is updated together lies together.
        everywhere: names and tiers of all ranks' parameters.
    Raises:
        PlanMismatchError: a group has no pattern, or one that matches no rank's parameter; or `params` makes groups of
            nothing, or of tensors that are not the trainer's.
    """
    if params is not None:
        if groups is not None:
            raise PlanMismatchError("groups= and params= both say which parameters are grouped how; give one of them")
        return _made_groups(named, params, {name for name, _ in everywhere})
    own = {name: (tiers or {}).get(name, "") for name in named}
    left = list(dict.fromkeys((*own.items(), *everywhere)))
    names = [name for name, _ in left]
    found: list[Any] = []
    for group in groups or ():
        pattern = _pattern(group)
        if not any(re.search(pattern, name) for name in names):
            raise PlanMismatchError(
                f"optimizer group {pattern!r} matches no parameter; names look like {', '.join(names[:5])}"
            )
        taken = [pair for pair in left if re.search(pattern, pair[0])]
        left = [pair for pair in left if not re.search(pattern, pair[0])]
        options = {key: value for key, value in group.items() if key != "match"}
        found += _by_tier(named, own, taken, options)
    return [*found, *_by_tier(named, own, left, {})] or [{"params": []}]


def _made_groups(named: Named, params: GroupMaker, everywhere: Collection[str]) -> list[Any]:
    """What the user's function makes of a rank's parameters, once it is known to be made of them."""
    if not callable(params):
        raise PlanMismatchError(
            f"params= is a {type(params).__name__}: give a function from the parameters by name to param groups, e.g. "
            "params=lambda named: [named['out.weight']]"
        )
    made = [
        {**each, "params": _listed(each["params"])} if isinstance(each, Mapping) and "params" in each else each
        for each in params(named)
    ]
    own, found = {id(param) for param in named.values()}, False
    for each in made:
        for entry in each.get("params", ()) if isinstance(each, Mapping) else (each,):
            tensor = entry[-1] if isinstance(entry, tuple) and entry else entry
            if isinstance(tensor, Tensor) and id(tensor) not in own:
                raise PlanMismatchError(
                    f"params= gives a tensor of shape {tuple(tensor.shape)} that is no parameter of the trainer, which "
                    "trains shards of its own; choose among those it is called with, by name: "
                    f"{', '.join(list(named)[:5])}"
                )
            found = True
    if not found and named and named.keys() >= set(everywhere):
        raise PlanMismatchError("params= chooses no parameter, so nothing would train; choose some, or leave it out")
    return made or [{"params": []}]


def _listed(params: Any) -> Any:
    if isinstance(params, set):  # which torch refuses
        return params
    return [params] if isinstance(params, Tensor) else list(params)


def _pattern(group: object) -> str:
    pattern = group.get("match") if isinstance(group, Mapping) else None
    try:
        re.compile(pattern)  # type: ignore[arg-type]
    except (re.error, TypeError) as fault:
        raise PlanMismatchError(
            f"optimizer group {group!r:.200}: give {{'match': regex, **options}} with a regular expression over "
            f"parameter names ({fault})"
        ) from None
    return str(pattern)


def _by_tier(
    named: Named, own: Mapping[str, str], taken: Iterable[tuple[str, str]], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """A group for every tier on which some rank has some of these parameters, with those that this rank has there."""
    split: dict[str, list[nn.Parameter]] = {}
    for name, tier in taken:
        here = split.setdefault(tier, [])
        if own.get(name) == tier:
            here.append(named[name])
    return [{"params": split[tier], **options} for tier in sorted(split)]


def check_norm(max_norm: float | Tensor, norm_type: float) -> float:
    """The kind of norm, as a number, what to clip to being one too.

    Raises:
        ConstraintError: one is no number, or shares of that norm do not add up to torch's norm of all gradients.
    """
    _read("max_norm", max_norm, lambda value: value / 1.0)
    found: float = _read("norm_type", norm_type, float)
    if found == 0 or found != found or found == float("-inf"):
        raise ConstraintError(
            f"norm_type={norm_type}: torch's norm of that kind counts or picks among tensors, which shards of them do "
            "not tell; give another number, such as 2, or inf for the largest element"
        )
    return found


def _read(name: str, value: Any, read: Callable[[Any], Any]) -> Any:
    try:
        return read(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConstraintError(f"{name}={value!r:.80}: give a number") from None


def norm_share(
    grads: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    coordinates: Dims,
    norm_type: float,
    device: str = "cpu",
    waiting: WaitingGrads | None = None,
) -> Tensor:
    """This rank's share of sum |g|^p (of max |g| for p = inf), each element counted on one rank only; float64.

    Of gradients that wait beside states (`waiting`) it is known already. Others are read where they are, without a
    copy, with as many launches as there are devices and dtypes among them.

    Args:
        grads: this rank's, by parameter.
        layouts: they lie in.
        coordinates: of the rank on its mesh.
        norm_type: p; infinity for the largest.
        device: of the result.
        waiting: gradients that wait beside states.
    """
    read: list[Tensor] = []
    known: list[Tensor] = []
    for name, grad in grads.items():
        if owned_here(layouts[name], coordinates):
            power = None if waiting is None else waiting.power(name, grad, norm_type)
            if power is not None:
                known.append(power)
            elif grad.numel():
                read.append(grad)
    shares = [torch.stack(known)] if known else []
    for kind in _by_kind(read):
        norms = chunk_norms(kind, norm_type).double()
        shares.append(norms if norm_type == float("inf") else norms.pow_(norm_type))
    reduced = [share.max() if norm_type == float("inf") else share.sum() for share in shares]
    if not reduced:
        return torch.zeros((), dtype=torch.float64, device=device)
    together = torch.stack([share.to(device) for share in reduced])
    return together.max() if norm_type == float("inf") else together.sum()


def _by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors of one device and dtype together."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for x in tensors:
        found.setdefault((x.device, x.dtype), []).append(x)
    return list(found.values())


def norm_of(total: Tensor, norm_type: float) -> Tensor:
    """The norm from the sum of all shares."""
    return total if norm_type == float("inf") else total.pow(1.0 / norm_type)


def clip(grads: Mapping[str, Tensor], norm: Tensor, max_norm: float, waiting: WaitingGrads) -> None:
    """Scale gradients in place, or in their update, so that their norm is at most `max_norm` (torch's
    clip_grad_norm_).

    Args:
        grads: this rank's, by parameter.
        norm: of all ranks' gradients.
        max_norm: that it may be.
        waiting: gradients that wait beside states.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for kind in _by_kind(grad for name, grad in grads.items() if not waiting.scale(name, grad, factor)):
        scale_all(kind, factor.to(kind[0].device, kind[0].dtype))
