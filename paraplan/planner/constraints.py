"""What the user pins: everything left out is the planner's to choose.

An option of the planner is a field of `Constraints` and its keyword in `options.keywords.ConstraintKeywords`; `compile`
and the command line follow. What its values may be is in `planner.options`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from paraplan.ir.errors import InfeasibleError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.tier_placement import HERE, TierPlacement
from paraplan.ir.option_words import OptionValue, Phrase
from paraplan.ir.options import Option, Options, at_least, documented, one_of
from paraplan.ir.sizes import parse_bytes, say_size
from paraplan.planner.options.param_pins import parse_param_pin
from paraplan.planner.options.placements import (
    KEYWORDS,
    NAMES,
    OFFLOAD_STATES,
    ON_DEVICE,
    PlacementChoice,
    check_place,
    check_updater,
    merged,
)
from paraplan.planner.options.values import (
    CP_MODES,
    OFFLOAD,
    PRESETS,
    WAYS,
    as_bounds,
    as_degree,
    as_layouts,
    as_shape,
    check_late,
    check_memory,
    check_mesh,
    check_params,
    check_reduce_dtype,
    check_zero,
    parse_degree,
    parse_mesh,
    parse_stages,
    warm_up_steps,
)
from paraplan.planner.schedules.named import NAMED

MODEL, PARALLELISM, PIPELINE = "Model and batch", "Parallelism", "Pipeline"
MEMORY, EXECUTION = "Memory", "Execution"
MOST_PIECES = 4
"""Pieces that products go in at most, where nobody says."""


@documented
class Constraints(Options, frozen=True, kw_only=True):
    """Pinned choices."""

    # fmt: off
    mesh: Annotated[tuple[int, ...] | None, Option(
        "Logical mesh, e.g. 8,8.",
        "logical mesh shape, e.g. (8, 8); None lets the planner choose.",
        PARALLELISM, metavar="N,N", parse=parse_mesh, convert=as_shape, check=check_mesh,
        wanted="the size of every axis", example=(2, 4),
    )] = None
    dp: Annotated[int | None, Option(
        "Data-parallel degree.",
        "size of a data-parallel axis: every op that sees the batch shards it there, and nothing else.",
        PARALLELISM, check=at_least(1),
    )] = None
    tp: Annotated[int | None, Option(
        "Tensor-parallel degree.",
        "size of a tensor-parallel axis: the weight of every linear layer is split over it, the batch never. "
        "Products of more dims than what segments pass on has (a mix of heads, a layer per head) may split others.",
        PARALLELISM, check=at_least(1),
    )] = None
    sp: Annotated[bool, Option(
        "With --tp: sequence-parallel activations between split layers.",
        "with tp: activations between the split layers lie sharded along the sequence on the tp axis.",
        PARALLELISM,
    )] = False
    cp: Annotated[int | None, Option(
        "Context-parallel degree: the sequence sharded throughout.",
        "size of a context-parallel axis: the sequence lies sharded there, from the batch to the loss.",
        PARALLELISM, check=at_least(1),
    )] = None
    cp_mode: Annotated[str | None, Option(
        "With --cp: gather, alltoall, ring or stripes in attention; chosen if not given.",
        'how attention deals with that: "gather", "alltoall", "ring" or "stripes"; None lets the planner choose.',
        PARALLELISM, check=one_of(*CP_MODES, beside=", and cp with it"),
    )] = None
    ep: Annotated[int | None, Option(
        "Expert-parallel degree: so many ranks of dp share experts.",
        "how many of the data-parallel ranks share one set of experts: on an axis of that size, part of dp (or two, "
        "nodes and the ranks of each), stacks of expert matrices lie by expert and all else by batch.",
        PARALLELISM, check=at_least(1),
    )] = None
    zero: Annotated[int | None, Option(
        "ZeRO level, 0 to 3.",
        "0 to 3: what is sharded over the dp axis beyond the batch (states, gradients, parameters).",
        PARALLELISM, check=check_zero,
    )] = None
    pp: Annotated[int | None, Option(
        "Pipeline-parallel degree, other degrees being within a stage; auto, or not given: the fastest.",
        "how many groups of devices the stages of a pipeline lie on; the other degrees are those of one group. 1: no "
        'pipeline. None or "auto": as many as make the simulated step shortest (`planner.joint`).',
        PIPELINE, metavar="N|auto", parse=parse_degree, convert=as_degree, check=at_least(1),
        wanted="a number of groups of devices, or 'auto'", example=2,
    )] = None
    schedule: Annotated[str | None, Option(
        f"Of a pipeline: {', '.join(NAMED)}, or searched (the shortest found). If not given: the fastest.",
        'of a pipeline: a name of `planner.schedules.named.NAMED`, or "searched" for the shortest found; None: the '
        "fastest named one.",
        PIPELINE,
    )] = None
    stages: Annotated[tuple[tuple[int, int], ...] | None, Option(
        "With --pp: segments of the stages; cut as is fastest if not given.",
        "with pp, the segments [first, stop) of every stage; None: cut by time and memory.",
        PIPELINE, metavar="A:B,B:C", parse=parse_stages, convert=as_bounds,
        wanted="the segments [first, stop) of every stage", example=((0, 3), (3, 6)),
    )] = None
    microbatches: Annotated[int | None, Option(
        "Microbatches per step.", "how many microbatches a step takes.", MODEL, check=at_least(1)
    )] = None
    memory_bytes: Annotated[int | None, Option(
        "What a device may hold, e.g. 12GiB.",
        'what a device may hold at most, bytes or "12GiB"; None: its memory, less the reserve.',
        MEMORY, keyword="memory", metavar="SIZE", parse=str, convert=parse_bytes, check=check_memory,
        wanted="bytes, or a size", example="12GiB",
    )] = None
    reserve_bytes: Annotated[int | None, Option(
        "Device memory kept from the plan (default: as the cluster says; 0: none).",
        "how much of every device's memory is kept from the plan, likewise; None: its `Device.reserves` (context, "
        "communication buffers, the allocator). What allocators reserve then fits; 0: nothing is kept, and the "
        "bytes alive alone decide.",
        MEMORY, keyword="reserve", metavar="SIZE", parse=str, convert=parse_bytes,
        wanted="bytes, or a size", example="2GiB",
    )] = None
    recompute: Annotated[str | None, Option(
        "Activations of layers made again: none, selective (attention), cheap (all but products), alternate (and "
        "every second product with a weight), full or full-early-stop; chosen if not given.",
        "one of `planner.options.values.PRESETS`: which activations of a layer are made again; None: what pays where "
        "memory is short.",
        MEMORY, check=one_of(*PRESETS, beside=", or nothing for the planner's choice"),
    )] = None
    offload: Annotated[str, Option(
        f"Where activations may wait if memory is short: {WAYS}.",
        f"where activations may wait if memory is short: {WAYS}; states and parameters may be there too, see "
        "`place_states`.",
        MEMORY, check=one_of(*OFFLOAD),
    )] = "none"
    place_states: Annotated[str | None, Option(
        f"Optimizer states: {NAMES}, or any; several with commas.",
        f"where optimizer states may be: {NAMES}, several with commas, or any for the planner's choice of those that "
        "`offload` allows (the host where it allows none). Left out: any where `offload` allows some, else the device, "
        "unless the options below ask for states elsewhere.",
        MEMORY, flag="states", metavar="PLACE", check=check_place,
    )] = None
    place_params: Annotated[str | None, Option(
        "Stored parameters, likewise; off the device they are where their states are.",
        "where stored parameters may be, likewise; off the device a parameter is in its state's storage, and copied "
        "to the device a segment ahead of its use.",
        MEMORY, flag="params", metavar="PLACE", check=check_place,
    )] = None
    place_grads: Annotated[str | None, Option(
        "Gradients until their update: where it is done if not given, or where the states are.",
        "where gradients may be until their update: where it is done (the device, or the host), or beside states that "
        'come to it. Left out: where it is done, and with parameters placed "any" beside the states where nothing fits '
        "otherwise.",
        MEMORY, flag="grads", metavar="PLACE", check=check_place,
    )] = None
    update_on: Annotated[str | None, Option(
        "Who updates states off the device: device, host, or any.",
        'who may update what is off the device: the "host" (states on disk come to its memory), or the "device", to '
        'which states then come; left out or "any": whichever is faster.',
        MEMORY, flag="update", metavar="WHO", check=check_updater,
    )] = None
    offload_states: Annotated[str | None, Option(
        "Those four as one word: host, all, disk, disk-all, fetched, ..., either, any, any-grads or none.",
        'one word for those four: a placement by name (`ir.machine.tier_placement`), such as "host" (states on the '
        'host, updated there), "all" (parameters too) or "disk-all-fetched-grads" (all on disk, updated on the '
        'device); "either", states as the planner chooses, "any", parameters too, "any-grads", gradients too; '
        '"none", all on the device.',
        MEMORY, check=one_of(*OFFLOAD_STATES),
    )] = None
    delayed_update: Annotated[int | None, Option(
        "After N steps the host's updates may be one step late, if faster.",
        "after how many steps the host's updates may be one step late, to be done beside the next step's work, "
        "where that makes the step faster (`planner.passes.delayed_updates`); True: after 40; None: never, since it "
        "changes what is computed (Ren et al. 2021, section 5.2).",
        MEMORY, metavar="N", convert=warm_up_steps, check=check_late,
        wanted="a number of steps", example=40,
    )] = None
    overlap: Annotated[int | None, Option(
        "Products in up to N pieces beside their collectives (TP).",
        "in how many pieces at most products go beside the collectives of their rows, where that is faster (see "
        "`planner.passes.overlap_products`); 1: none does; left out: 4.",
        EXECUTION, metavar="N", check=at_least(1),
    )] = None
    compiled: Annotated[bool, Option(
        "Blocks through torch.compile; priced as fused.",
        "whether forward and backward blocks go through torch.compile: chains of memory-bound ops are then priced "
        "as it fuses them. Nothing is proved of such plans, for ops are chosen at their prices apart.",
        EXECUTION, flag="compile",
    )] = False
    reduce_dtype: Annotated[str, Option(
        "Of sums of gradients over ranks: fp32 or bf16.",
        '"fp32" or "bf16": what gradients are summed over ranks in, under half precisions. Left out, those reduced '
        "as they are made (ZeRO-2 and 3, tensor parallelism) are in the half precision, those reduced once a step "
        "(ZeRO-0 and 1) in float32, as accumulators and sums between stages always are.",
        EXECUTION, check=check_reduce_dtype,
    )] = ""
    params: Annotated[dict[str, str], Option(
        "",
        "layouts of named parameters, texts as of `ir.param_layouts.ParamLayouts.text`.",
        convert=as_layouts, check=check_params,
        wanted=f"layouts by the names of parameters (where they are stored is {KEYWORDS['params']})",
        example={"fc.weight": "R/P/S0"},
    )] = {}
    # fmt: on

    @property
    def as_data(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as files have them."""
        plain, made = Constraints(), msgspec.json.decode(msgspec.json.encode(self))
        return {name: value for name, value in made.items() if getattr(self, name) != getattr(plain, name)}

    @property
    def most_pieces(self) -> int:
        """In how many pieces at most a product goes."""
        return MOST_PIECES if self.overlap is None else self.overlap

    @property
    def tiers(self) -> tuple[str, ...]:
        """Where activations may wait."""
        return OFFLOAD[self.offload]

    @property
    def placing(self) -> PlacementChoice:
        """What is said of where states, parameters and gradients may be.

        Raises:
            ConstraintError: it contradicts itself.
        """
        said = PlacementChoice(self.place_states, self.place_params, self.place_grads, self.update_on)
        return merged(self.offload_states, said)

    def placed(self, choice: PlacementChoice) -> Constraints:
        """The same with another choice of placements."""
        fields = {keyword: getattr(choice, name) for name, keyword in KEYWORDS.items()}
        return msgspec.structs.replace(self, offload_states=None, **fields)

    @property
    def places(self) -> tuple[TierPlacement, ...]:
        """Where states and stored parameters may be, of parameters not pinned by name."""
        return self.placing.allowed(self.tiers)

    @property
    def every_place(self) -> tuple[TierPlacement, ...]:
        """Likewise, of any parameter."""
        pinned = [parse_param_pin(name, text).place for name, text in self.params.items()]
        return tuple(dict.fromkeys((*self.places, *pinned)))

    @property
    def state_tiers(self) -> tuple[str, ...]:
        """Tiers that states, or their gradients, may be on."""
        return tuple(dict.fromkeys(tier for place in self.every_place for tier in place.tiers))

    @property
    def pins_away(self) -> bool:
        """Whether some state cannot be on the device."""
        return bool(self.placed(ON_DEVICE).state_tiers) or HERE not in self.places


def device_budget(cluster: ClusterSpec, constraints: Constraints, group: int | None = None) -> int:
    """Bytes any device, or any of a group, may hold: what is allowed, and at most the smallest one's memory less its
    reserve.

    Args:
        cluster: whose devices.
        constraints: with the memory and the reserve that were pinned.
        group: number of a group; None: the smallest device of all.
    Raises:
        InfeasibleError: nothing is left.
    """
    budget = cluster.plan_bytes(constraints.reserve_bytes, group)
    if budget <= 0:
        given = constraints.reserve_bytes
        said = "what its devices keep" if given is None else f"a reserve of {say_size(given)}"
        fault = Phrase(
            "{}: {} leaves a plan no device memory ({} are missing); give a smaller reserve, or {} for none",
            *(cluster.name, said, say_size(-budget), OptionValue("reserve", 0)),
        )
        raise InfeasibleError(fault)
    return min(budget, constraints.memory_bytes or budget)
