"""What the user pins: everything left out is the planner's to choose."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

from paraplan.ir.cluster import ClusterSpec
from paraplan.ir.errors import ConstraintError, InfeasibleError
from paraplan.ir.plan import AHEAD, HERE, ON_HOST, PLACES, REDUCE_DTYPES, Place
from paraplan.ir.program import HALVES
from paraplan.ir.sizes import say_size
from paraplan.ir.struct import Value

PRESETS = ("none", "selective", "cheap", "alternate", "full", "full-early-stop")
"""Of a layer (an element of a list of modules): `none`: every activation is kept. `full`: its input alone is kept, and
it runs again to its end (Chen et al. 2016; Megatron-LM). `full-early-stop`: as far as the backward needs it (torch's
checkpoint). `selective`: attention alone is made again, from queries, keys and values on (Korthikanti et al. 2022).
`cheap`: all but results of matrix products, convolutions and attention is. `alternate`: and of those every second
product with a weight (torchtitan's selective policy by op)."""
WARM_UP_STEPS = 40
"""Steps before updates are late where it is only said that they may be: some dozens, as Ren et al. 2021 (section 5.2)
advise, for parameters move most at first."""
AUTO: Literal["auto"] = "auto"
"""A degree for the planner to choose."""
OFFLOAD = {"none": (), "host": ("host",), "disk": ("host", "disk")}
"""The tiers activations may wait on."""
OFFLOAD_STATES: dict[str, tuple[Place, ...]] = {
    **{words.removeprefix("@") or "none": (place,) for place, words in PLACES.items()},
    "either": (HERE, ON_HOST, Place("host", "", True)),
    "any": tuple(place for place in PLACES if not place.grads),
    "any-grads": tuple(PLACES),
}
"""Where the optimizer's states and the stored parameters may be ("" is the device), and whether the device updates what
is away; "either" leaves states to the planner, "any" parameters too (on disk only where `offload` is "disk"), and
"any-grads" also where gradients wait."""
CP_MODES = ("gather", "alltoall", "ring", "stripes")
"""How attention deals with a sharded sequence: see `planner.sharding.sequence`."""


class Constraints(Value, frozen=True, kw_only=True):
    """Pinned choices.

    Attributes:
        mesh: logical mesh shape, e.g. (8, 8); None lets the planner choose.
        dp: size of a data-parallel axis: every op that sees the batch shards it there, and nothing else.
        tp: size of a tensor-parallel axis: the weight of every linear layer is split over it, the batch never. Products
            of more dims than what segments pass on has (a mix of heads, a layer per head) may split others.
        sp: with tp: activations between the split layers lie sharded along the sequence on the tp axis.
        cp: size of a context-parallel axis: the sequence lies sharded there, from the batch to the loss.
        cp_mode: how attention deals with that: "gather", "alltoall", "ring" or "stripes"; None lets the planner choose.
        ep: how many of the data-parallel ranks share one set of experts: on an axis of that size, part of dp, stacks of
            expert matrices lie by expert and all else by batch.
        zero: 0 to 3: what is sharded over the dp axis beyond the batch (states, gradients, parameters).
        pp: how many groups of devices the stages of a pipeline lie on; the other degrees are those of one group.
            "auto": as many as make the simulated step shortest (`planner.pipeline_degrees`).
        schedule: with pp, a name of `planner.schedules.named.NAMED`, or "searched" for the shortest found; None:
            "1f1b", or with pp "auto" the fastest named one.
        stages: with pp, the segments [first, stop) of every stage; None: cut evenly by time.
        microbatches: how many microbatches a step takes.
        memory_bytes: what a device may hold at most; None: its memory, less the reserve.
        reserve_bytes: how much of every device's memory is kept from the plan; None: its `Device.reserves`; 0: nothing,
            and what allocators reserve beyond the bytes alive is not looked at.
        recompute: one of `PRESETS`; None: what pays where memory is short.
        offload: where activations may wait if memory is short: "none", "host", or "disk" (the host as well).
        overlap: in how many pieces at most products go beside the collectives of their rows (see `planner.overlap`);
            1: none does.
        compiled: whether forward and backward blocks go through torch.compile: chains of memory-bound ops are then
            priced as it fuses them. Nothing is proved of such plans, for ops are chosen at their prices apart.
        reduce_dtype: in which dtype gradients are summed over ranks, as in `ir.plan.Plan`.
        offload_states: "host" keeps optimizer states in the host's memory and updates parameters there, "all" keeps
            parameters there too, "none" all on the device; "either" leaves the states to the planner, "any" states and
            parameters; None: as "any" where `offload` allows the host, and on the disk where it allows that. "disk"
            and "disk-all" keep them on disk, to be updated in the host's memory; with "fetched" ("fetched",
            "all-fetched", "disk-fetched", "disk-all-fetched") the device updates. "-grads" after any of those but
            "host" and "all" has gradients wait beside the states; "any-grads" leaves that to the planner as well, as
            "any" does where nothing fits otherwise.
        delayed_update: after how many steps the host's updates may be one step late, to be done beside the next step's
            work, where that makes the step faster (`planner.delaying`); None: never, since it changes what is computed.
        params: layouts of named parameters, texts as of `ir.plan.ParamLayouts.text`.
    """

    mesh: tuple[int, ...] | None = None
    dp: int | None = None
    tp: int | None = None
    sp: bool = False
    cp: int | None = None
    cp_mode: str | None = None
    ep: int | None = None
    zero: int | None = None
    pp: int | Literal["auto"] | None = None
    schedule: str | None = None
    stages: tuple[tuple[int, int], ...] | None = None
    microbatches: int | None = None
    memory_bytes: int | None = None
    reserve_bytes: int | None = None
    recompute: str | None = None
    offload: str = "none"
    overlap: int = 1
    compiled: bool = False
    reduce_dtype: str = ""
    offload_states: str | None = None
    delayed_update: int | None = None
    params: dict[str, str] = {}

    @property
    def tiers(self) -> tuple[str, ...]:
        """Where activations may wait."""
        return OFFLOAD[self.offload]

    @property
    def places(self) -> tuple[Place, ...]:
        """Where states and stored parameters may be, of parameters not pinned by name."""
        every = OFFLOAD_STATES[self.offload_states or "none"]
        if self.offload_states in ("any", "any-grads") and "disk" not in self.tiers:
            return tuple(place for place in every if place.states != "disk")
        return every

    @property
    def every_place(self) -> tuple[Place, ...]:
        """Likewise, of any parameter."""
        pinned = [parse_param_pin(name, text).place for name, text in self.params.items()]
        return tuple(dict.fromkeys((*self.places, *pinned)))

    @property
    def state_tiers(self) -> tuple[str, ...]:
        """Tiers that states, or their gradients, may be on."""
        away = [place for place in self.every_place if place.states]
        return tuple(dict.fromkeys(at for x in away for at in ((x.states,) if x.fetched else ("host", x.states))))


def warm_up_steps(delayed_update: bool | int | None) -> int | None:
    """How many steps come before late updates: a number as it is, True for the literature's; None: all are timely."""
    if isinstance(delayed_update, bool):
        return WARM_UP_STEPS if delayed_update else None
    return delayed_update


def _check_types(c: Constraints) -> None:
    numbers = {"dp": c.dp, "tp": c.tp, "cp": c.cp, "ep": c.ep, "zero": c.zero, "microbatches": c.microbatches}
    numbers |= {"overlap": c.overlap, "pp": None if c.pp == AUTO else c.pp}
    for name, value in numbers.items():
        if value is not None and not isinstance(value, int):
            raise ConstraintError(f"{name}={value!r}: give a whole number, not a {type(value).__name__}")
    if c.mesh is not None and not all(isinstance(size, int) for size in c.mesh):
        raise ConstraintError(f"mesh={c.mesh!r}: give whole numbers, one for each axis, e.g. mesh=(2, 4)")


def check_time_limit(seconds: float) -> None:
    """Refuse a time in which nothing can be solved.

    Raises:
        ConstraintError: it is not a number above 0.
    """
    if not seconds > 0:
        raise ConstraintError(f"a time limit of {seconds} s (--time-limit): give a number of seconds above 0")


def check_constraints(constraints: Constraints, num_devices: int) -> Constraints:
    """The constraints themselves, when they make sense together.

    Raises:
        ConstraintError: a size below 1, pp that does not divide the devices, a schedule or stages without pp, degrees
            that do not multiply to the devices, zero without dp, sp without tp, an unknown cp_mode or one without cp,
            an ep that does not divide dp.
    """
    c = constraints
    _check_types(c)
    if c.pp == AUTO:
        if c.stages is not None:
            raise ConstraintError("stages with pp=auto: how many there are follows from the degree; give pp a number")
        return c  # degrees are checked with every pp that is tried
    num_devices = _stage_devices(c, num_devices)
    degrees = {name: size for name, size in (("dp", c.dp), ("tp", c.tp), ("cp", c.cp)) if size is not None}
    for name, size in (
        *degrees.items(), ("ep", c.ep), ("pp", c.pp), ("microbatches", c.microbatches), ("overlap", c.overlap)
    ):  # fmt: skip
        if size is not None and size < 1:
            raise ConstraintError(f"{name}={size}: must be at least 1")
    if c.zero is not None and c.zero not in (0, 1, 2, 3):
        raise ConstraintError(f"zero={c.zero}: must be 0, 1, 2 or 3")
    if c.sp and (c.tp is None or c.tp < 2):
        raise ConstraintError("sp needs a tensor-parallel axis to share: give tp of at least 2 as well")
    if c.cp_mode is not None and (c.cp_mode not in CP_MODES or c.cp is None):
        raise ConstraintError(f"cp_mode={c.cp_mode}: one of {', '.join(CP_MODES)}, and cp with it")
    if c.zero and c.dp is None and (c.tp is not None or c.cp is not None):
        raise ConstraintError(f"zero={c.zero} shards over a data-parallel axis: give dp as well")
    if c.recompute is not None and c.recompute not in PRESETS:
        raise ConstraintError(
            f"recompute={c.recompute}: one of {', '.join(PRESETS)}, or nothing for the planner's choice"
        )
    if c.offload not in OFFLOAD:
        raise ConstraintError(f"offload={c.offload}: one of {', '.join(OFFLOAD)}")
    _check_states(c)
    if c.memory_bytes is not None and c.memory_bytes <= 0:
        raise ConstraintError(f"memory={c.memory_bytes}: must be more than 0 bytes")
    if c.mesh is not None:
        if any(size < 1 for size in c.mesh):
            raise ConstraintError(f"mesh={c.mesh}: every axis must be at least 1")
        if degrees or c.ep is not None:
            degrees |= {} if c.ep is None else {"ep": c.ep}
            given = " ".join(f"{name}={size}" for name, size in degrees.items())
            raise ConstraintError(f"mesh={c.mesh} together with {given}: give the mesh or the degrees, not both")
        product = math.prod(c.mesh)
        if product != num_devices:
            raise ConstraintError(f"mesh={c.mesh} has {product} places for {num_devices} devices")
    product = math.prod(degrees.values())
    if len(degrees) > 1 and (num_devices % product or (c.dp is not None and product != num_devices)):
        given = " times ".join(f"{name}={size}" for name, size in degrees.items())
        raise ConstraintError(f"{given} is {product}, the cluster has {num_devices} devices")
    for name, size in degrees.items():
        if num_devices % size:
            raise ConstraintError(f"{name}={size} does not divide the cluster's {num_devices} devices")
    dp = c.dp if c.dp is not None else num_devices // math.prod(degrees.values())
    if c.ep is not None and dp % c.ep:
        raise ConstraintError(f"ep={c.ep} does not divide the {dp} data-parallel ranks, which share the experts")
    return c


def check_param_names(constraints: Constraints, names: Iterable[str]) -> None:
    """What is pinned by name is there.

    Args:
        constraints: whose `params`.
        names: of the model's parameters.
    Raises:
        ConstraintError: there is no parameter of a name.
    """
    known = list(names)
    for name in constraints.params:
        if name not in known:
            near = difflib.get_close_matches(name, known, 3) or known[:5]
            raise ConstraintError(
                f"params pins {name!r}, which the model does not have; its parameters have names such as "
                f"{', '.join(near)}"
            )


def check_reduce_dtype(constraints: Constraints, precision: str) -> None:
    """Refuse a dtype of sums over ranks that is unknown, or beside a precision that knows one alone.

    Raises:
        ConstraintError: so it is.
    """
    given = constraints.reduce_dtype
    if given not in REDUCE_DTYPES:
        raise ConstraintError(f"reduce_dtype={given!r}: one of {', '.join(filter(None, REDUCE_DTYPES))}")
    if given and precision not in HALVES:
        raise ConstraintError(
            f"reduce_dtype={given!r} says how gradients of half precisions are summed over ranks, and "
            f"precision={precision!r} sums them as they are; leave it out, or plan with precision='bf16'"
        )


def device_budget(cluster: ClusterSpec, constraints: Constraints) -> int:
    """Bytes any device may hold: what is allowed, and at most the smallest one's memory less its reserve.

    Raises:
        InfeasibleError: nothing is left.
    """
    budget = cluster.plan_bytes(constraints.reserve_bytes)
    if budget <= 0:
        given = constraints.reserve_bytes
        said = "what its devices keep" if given is None else f"a reserve of {say_size(given)}"
        raise InfeasibleError(
            f"{cluster.name}: {said} leaves a plan no device memory ({say_size(-budget)} are missing); give a smaller "
            "reserve, or reserve=0 for none"
        )
    return min(budget, constraints.memory_bytes or budget)


def _check_states(c: Constraints) -> None:
    """Where states are said to be is a place they can be."""
    for name, text in c.params.items():
        parse_param_pin(name, text)
    if c.offload_states is not None and c.offload_states not in OFFLOAD_STATES:
        raise ConstraintError(f"offload_states={c.offload_states}: one of {', '.join(OFFLOAD_STATES)}")
    if c.delayed_update is not None:
        if c.delayed_update < 0:
            raise ConstraintError(f"delayed_update={c.delayed_update}: at least 0 steps come before the first late one")
        chosen = c.offload_states is None and c.tiers
        if not chosen and ON_HOST not in c.every_place:
            raise ConstraintError(
                f"delayed_update={c.delayed_update}: only what the host updates where its states stay can be late, and "
                f"with offload_states={c.offload_states or 'none'} there is nothing; give offload_states='host', or "
                "offload='host'"
            )
    if c.zero in (1, 2) and all(place.stored for place in c.places):
        raise ConstraintError(
            f"offload_states={c.offload_states} with zero={c.zero}: parameters off the device lie as their states do; "
            "give zero=3 or 0"
        )


def _stage_devices(c: Constraints, num_devices: int) -> int:
    """How many devices share a stage, among which the other degrees are."""
    if isinstance(c.pp, int) and c.pp > 1:
        if num_devices % c.pp:
            raise ConstraintError(f"pp={c.pp} does not divide the cluster's {num_devices} devices")
        return num_devices // c.pp
    if c.schedule is not None or c.stages is not None:
        pinned = f"schedule={c.schedule}" if c.schedule is not None else "stages"
        raise ConstraintError(f"{pinned} without a pipeline: give pp of at least 2 as well")
    return num_devices


class ParamPin(NamedTuple):
    """A parameter's pinned layouts; where states and stored copy are; whether that is gathered ahead."""

    stored: str
    grad: str
    state: str
    place: Place
    ahead: bool


def parse_param_pin(name: str, text: str) -> ParamPin:
    """`"S0/S0/S0@host"` or `"R/P/S0+ahead"` in parts; without "@" that is the device.

    Raises:
        ConstraintError: not three layouts, or states cannot be there.
    """
    lies, at, place = text.partition("@")
    layouts = lies.removesuffix(AHEAD)
    parts, places = layouts.split("/"), {words: tiers for tiers, words in PLACES.items()}
    if len(parts) != 3 or at + place not in places:
        raise ConstraintError(
            f"params[{name!r}] = {text!r}: give stored/grad/state, e.g. 'R,S0/R,S0/R,S0', and '@host' after it where "
            f"the states are to be in the host's memory ({', '.join(filter(None, places))}), or '{AHEAD}' where the "
            "stored copy is gathered once a step"
        )
    return ParamPin(parts[0], parts[1], parts[2], places[at + place], layouts != lies)
