"""The plan: the narrow waist between planners, simulator and runtime.

A plan says, for one training step of one program on one cluster: the stages, every layout, what happens
to every saved activation, and the ordered actions of every rank; with it, what was predicted and proved.
It is data: loading one never imports or executes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from paraplan.ir.execution.schedule import Schedule
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.machine.tier_placement import DEVICE, HOST, TierPlacement
from paraplan.ir.model.program import Program
from paraplan.ir.profile import Profile
from paraplan.ir.struct import Value

PLAN_VERSION = 3

AHEAD = "+ahead"
"""How pins say that a stored copy is gathered once a step."""


class ModelRef(Value, frozen=True, kw_only=True):
    """Which model a plan is for.

    Attributes:
        display: what people call it; never imported.
        hf_type: transformers model type when built from a configuration, else None.
        hf_settings: the configuration's settings as data.
    """

    display: str
    hf_type: str | None = None
    hf_settings: dict[str, Any] = {}


class Optimizer(Value, frozen=True, kw_only=True):
    """What an optimizer keeps and needs.

    Attributes:
        name: e.g. "adamw".
        state_slots: tensors of a parameter's size it keeps.
        workspace_slots: tensors of one parameter's size alive at once while that parameter is updated.
        lingering_slots: tensors of the previous parameter's size still alive then.
        scalar_bytes: bytes of small state per parameter (step counters).
        fused: whether torch's fused kernels update what has no gaps (`ir.model.fused_updates`), which takes no
        workspace.
    """

    name: str
    state_slots: int
    workspace_slots: int
    lingering_slots: int = 0
    scalar_bytes: int = 0
    fused: bool = False

    def workspace_bytes(self, sizes: Sequence[int]) -> int:
        """The most an update that is not fused of parameters of these bytes, one after another, allocates and drops
        inside."""
        pairs = zip(sizes, [0, *sizes], strict=False)
        return max((self.workspace_slots * n + self.lingering_slots * last for n, last in pairs), default=0)

    @property
    def timed_as(self) -> str:
        """What profiles call the times of its updates."""
        return f"{self.name}.fused" if self.fused else self.name


OPTIMIZERS: dict[str, Optimizer] = {
    each.name: each
    for each in (
        Optimizer(name="sgd", state_slots=0, workspace_slots=0, fused=True),
        Optimizer(name="momentum", state_slots=1, workspace_slots=0, fused=True),
        Optimizer(name="adam", state_slots=2, workspace_slots=2, lingering_slots=1, scalar_bytes=4, fused=True),
        Optimizer(name="adamw", state_slots=2, workspace_slots=2, lingering_slots=1, scalar_bytes=4, fused=True),
        Optimizer(name="nesterov", state_slots=1, workspace_slots=1, fused=True),
        Optimizer(name="sgd+decay", state_slots=0, workspace_slots=1, fused=True),
        Optimizer(name="momentum+decay", state_slots=1, workspace_slots=1, fused=True),
        Optimizer(name="nesterov+decay", state_slots=1, workspace_slots=2, fused=True),
        Optimizer(name="adam+decay", state_slots=2, workspace_slots=3, lingering_slots=1, scalar_bytes=4, fused=True),
    )
}
"""By name. `+decay`: with `weight_decay`, which adds the parameter to its gradient in a tensor of its own (AdamW's
scales the parameter in place and needs none)."""


class ParamLayouts(Value, frozen=True, kw_only=True):
    """Where a parameter lives between uses; each a layout in text form on the stage's mesh.

    `stored` is the copy ops read, `grad` the accumulator each microbatch adds into, `state` what the optimizer updates
    (gradients are brought there once a step, the updated parameter goes back to `stored`). ZeRO-3 shards all three,
    ZeRO-2 the last two, ZeRO-1 the last.

    With `ahead` the stored copy lies as the state does between steps: it is gathered once a step, while segments before
    its first reader run, and kept until its last. So nobody waits for the gather that would follow an update, and
    ZeRO-1 and ZeRO-2 hold no whole copy then (FSDP's SHARD_GRAD_OP, Megatron-LM's overlapped gather of parameters).

    `state_tier` is where the optimizer's copy and states are: "" for the device, or "host": gradients are then copied
    there, the host updates, and the updated parameter is copied back (ZeRO-Offload, Ren et al. 2021). On "disk" they
    are files, of which a few parameters' at a time are brought to the host's memory, updated there, and written back
    (ZeRO-Infinity, Rajbhandari et al. 2021). With `fetched` they are brought to the device instead, from either tier,
    and updated there; gradients then stay on the device. `stored_tier` is where the stored copy is: off the device it
    is copied there a segment before it is read, and given up after it. A trained parameter's state then is on the same
    tier, in the same storage, and where that has another dtype (float32, under bf16) what comes is cast on arrival.

    `grad_tier` is where the gradient waits for its update: "" for where that is done, or the tier of states that come
    to it, to which it is written as it is made and with which it comes. All of it as one value is `place`."""

    stored: str
    grad: str
    state: str
    state_tier: str = ""
    stored_tier: str = ""
    fetched: bool = False
    ahead: bool = False
    grad_tier: str = ""

    @property
    def resting(self) -> str:
        """The layout of the stored copy between steps."""
        return self.state if self.ahead else self.stored

    @property
    def text(self) -> str:
        """As a pin says it: "stored/grad/state", then "+ahead", or "@host" where the state is, "@all" where all is."""
        place = self.place if self.state_tier else self.place.frozen
        at = AHEAD if self.ahead else f"@{place.text}" if place.states else ""
        return f"{self.stored}/{self.grad}/{self.state}{at}"

    @property
    def update_tier(self) -> str:
        """Where the optimizer updates: "" for the device, or a memory of the host."""
        return self.place.update_tier

    @property
    def staged(self) -> bool:
        """Whether states are brought to where they are updated, and back."""
        return self.place.is_staged

    @property
    def place(self) -> TierPlacement:
        """Where a trained parameter, its states and its gradient are, and who updates it."""
        update = HOST if self.state_tier and not self.fetched else DEVICE
        place = TierPlacement(self.stored_tier, self.state_tier, self.grad_tier, update)
        return place if self.grad_tier else place._replace(grads=place.update_tier)

    def placed(self, place: TierPlacement, ahead: bool = False) -> ParamLayouts:
        """The same layouts elsewhere, gathered ahead or not."""
        return msgspec.structs.replace(
            self,
            state_tier=place.states,
            stored_tier=place.params,
            ahead=ahead,
            fetched=bool(place.states) and place.update == DEVICE,
            grad_tier=place.grads if place.grads_wait else "",
        )


class Split(Value, frozen=True, kw_only=True):
    """A run of a kind's ops that is executed in chunks of one dim, one after another (see `lowering.rewrites.chunks`).

    Attributes:
        op: index of the op of the joint graph the run begins with.
        dim: the named dim of that op that is cut; in files its key is `letter`.
        chunks: how many.
        at_once: whether the backward runs with the forward, chunk by chunk: of a segment that makes numerators of the
            loss, whose gradients are known beforehand.
    """

    op: int
    dim: str = msgspec.field(name="letter")
    chunks: int
    at_once: bool = False


class KindChoice(Value, frozen=True, kw_only=True):
    """How the instances of a kind that take this choice run.

    Attributes:
        kind: index into the program's kinds.
        ops: per op of the joint graph, the key of its strategy (see `rules.strategies`).
        input_grads: per boundary input, the layout its gradient is handed over in, or None.
        activations: per value of the forward not simply kept for the backward: "recompute", or the tier it waits on
            (see `lowering.blocks.remat`).
        split: what runs in chunks, or None.
    """

    kind: int
    ops: tuple[str, ...]
    input_grads: tuple[str | None, ...]
    activations: dict[str, str] = {}
    split: Split | None = None


class Stage(Value, frozen=True, kw_only=True):
    """A run of segments on a mesh.

    Attributes:
        first, stop: segments [first, stop).
        mesh: its devices.
        replicas: further meshes of the same shape that hold the stage as well, all with the same layouts; the schedule
            says which microbatches each of them runs (bidirectional pipelines, `ir.execution.schedule`).
        choices: the kind choices used here.
        segment_choice: per segment, index into `choices`.
        batch: layout of each batch input the stage reads.
        params: layouts of each parameter the stage holds.
    """

    first: int
    stop: int
    mesh: Mesh
    choices: tuple[KindChoice, ...]
    segment_choice: tuple[int, ...]
    batch: dict[str, str]
    params: dict[str, ParamLayouts]
    replicas: tuple[Mesh, ...] = ()

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """All meshes that hold the stage, each once."""
        return tuple(dict.fromkeys((self.mesh, *self.replicas)))


class Prediction(Value, frozen=True, kw_only=True):
    """What the simulator says of the plan.

    Attributes:
        step_s: time of one step.
        peak_bytes: per rank class, the most bytes alive on the device at once.
        reserved_bytes: per rank class, the most that torch's caching allocator reserves for it where it has the plan's
            room (`Plan.room_bytes`); () where devices have none.
        tier_peak_bytes: per tier in use (`ir.machine.tiers`), the most bytes any rank has there.
        compute_s, exposed_comm_s, exposed_copy_s: of the busiest rank.
        tokens_per_s: elements of the first batch input's leading two dims per second.
        mfu: model flops per second over the cluster's peak for the dtypes that they are in.
    """

    step_s: float
    peak_bytes: tuple[int, ...]
    compute_s: float
    exposed_comm_s: float
    tokens_per_s: float
    mfu: float
    tier_peak_bytes: dict[str, int] = {}
    exposed_copy_s: float = 0.0
    reserved_bytes: tuple[int, ...] = ()


class Certificate(Value, frozen=True, kw_only=True):
    """What was proved.

    Attributes:
        status: "optimal" (within the scope), "feasible" (time limit) or "pinned" (nothing was searched).
        objective_s: the solver's objective; equals the plan's cost evaluated afresh.
        bound_s: lower bound on the simulated step over every plan in scope.
        bound_scope: what was fixed.
        gap: (step_s - bound_s) / step_s.
    """

    status: str
    objective_s: float
    bound_s: float
    bound_scope: str
    gap: float


MOST_TRIED = 24
"""Records that a plan keeps of what its search tried."""


class Tried(Value, frozen=True, kw_only=True):
    """A plan that a search made, or found none of.

    Attributes:
        what: its degrees, mesh, microbatches and schedule in words.
        step_s: simulated; None where nothing was found.
        peak_bytes: the most any rank has alive; 0 where nothing was found.
        estimated_s: what the step was estimated at before it was planned; None where it was not, or not to fit.
        why: why nothing was found, or why it was not taken though it is faster; "" where there is nothing to say.
        pins: what was pinned to plan it, beside what the user pinned, as in `Plan.pins`; {} where nothing was.
    """

    what: str
    step_s: float | None = None
    peak_bytes: int = 0
    estimated_s: float | None = None
    why: str = ""
    pins: dict[str, Any] = {}


REDUCE_DTYPES = {"": "", "fp32": "float32", "bf16": "bfloat16"}
"""In which dtype gradients may be summed over ranks; "" where each is summed in the dtype it then has."""


class Plan(Value, frozen=True, kw_only=True):
    """Everything needed to simulate, show and run one training step.

    Attributes:
        version: of this format.
        made_with: versions of paraplan and of the libraries that shape a plan.
        model: which model.
        program: the captured model.
        cluster: where it runs, with the rates used.
        num_microbatches: microbatches per step; each takes 1/num of the global batch.
        optimizer: what keeps states.
        bundle_bytes: from how many bytes on small parameters and gradients of several segments set out together;
            0: nothing waits for another segment's.
        reducing_bytes: what gradients on their way to the optimizer's layout may hold until they are there, where a
            collective holds what it reads (a reduce-scatter does); two are under way in any case.
        reduce_every: of how many microbatches of a stage gradients are added up, as they are made, before they are
            brought to the layout they accumulate in (`lowering.steps.microbatch_groups`).
        sum_products: whether products add the gradients of weights to their sums themselves, and make those of halves
            in float32 where they are to be (`lowering.rewrites`: `summed_grads`, `wide_grads`).
        compiled: whether forward and backward blocks go through torch.compile.
        reduce_dtype: "fp32" or "bf16": in which half precisions sum parameters' gradients over a mesh's ranks. "": in
            themselves as gradients are made (ZeRO-2, ZeRO-3, tensor parallelism), in float32 once a step (ZeRO-0,
            ZeRO-1). Accumulators, and what stages that share a parameter exchange, are float32 in any case.
        hold_casts: whether weights are cast to float8 once a step and held, not in every forward and backward.
        delayed_update: after how many steps the host's updates of states that stay there are done beside the next
            step's work, and so are one step late (see `lowering.steps.delayed_update`); None: never.
        params_ahead: whether large sharded parameters are gathered beside the segment before the one that reads them,
            as small ones are (`lowering.transfers.param_allgather`), and not in the block that does.
        states_ahead: whether the first states that come to their update set out before the last segment's backward, and
            not after it (see `lowering.transfers.streamed_update`).
        parted_messages: whether, of what a stage sends, ranks that hold the same send a part each, which the next stage
            gathers where it is read (Narayanan et al. 2021, section 4.1); gradients added to whole ones go whole.
        stages, schedule: the plan proper.
        memory_actions: on one device, the order in which the step's ops run, are run again, and tensors are freed and
            copied to a tier and back (`ir.execution.memory_actions`); None: as lowered.
        profile: measured times the prediction rests on, where there are any: those of this plan's ops alone.
        prediction, certificate: what is foretold and proved.
        notes: what the reader should know (ops replicated for want of a rule, times measured or modelled).
        pins: what was pinned: the fields of `planner.constraints.Constraints` that differ from their defaults.
        tried: what the search tried, the fastest first, this plan among them; () where there was one way alone.
    """

    left_out: ClassVar[tuple[str, ...]] = ("pins", "tried")

    version: int = PLAN_VERSION
    made_with: dict[str, str]
    model: ModelRef
    program: Program
    cluster: ClusterSpec
    num_microbatches: int
    optimizer: Optimizer
    bundle_bytes: int = 8 << 20
    reducing_bytes: int = 0
    reduce_every: int = 1
    sum_products: bool = True
    compiled: bool = False
    reduce_dtype: str = ""
    hold_casts: bool = False
    delayed_update: int | None = None
    params_ahead: bool = False
    states_ahead: bool = False
    parted_messages: bool = False
    stages: tuple[Stage, ...]
    schedule: Schedule
    memory_actions: str | None = None
    profile: Profile | None = None
    prediction: Prediction | None = None
    certificate: Certificate | None = None
    notes: tuple[str, ...] = ()
    pins: dict[str, Any] = {}
    tried: Annotated[tuple[Tried, ...], msgspec.Meta(max_length=MOST_TRIED)] = ()

    @property
    def num_shares(self) -> int:
        """Extent of the microbatch axis."""
        return self.program.shares(self.num_microbatches)

    @property
    def group(self) -> int:
        """Microbatches whose gradients are reduced at once."""
        return min(self.reduce_every, self.num_microbatches)

    @property
    def wire_dtype(self) -> str:
        """What gradients are cast to before they are summed over ranks; "" where they are not."""
        return REDUCE_DTYPES[self.reduce_dtype]

    @property
    def room_bytes(self) -> tuple[int, ...]:
        """Per device, what allocators may reserve for the plan: as was pinned, else its memory less its reserves."""
        pinned = {name: nbytes for name, nbytes in self.pins.items() if isinstance(nbytes, int)}
        kept, most = pinned.get("reserve_bytes"), pinned.get("memory_bytes")
        room = [self.cluster.plan_bytes(kept, number) for number in range(len(self.cluster.groups))]
        sizes = [group.nodes * group.devices_per_node for group in self.cluster.groups]
        return tuple(min(each, most or each) for each, size in zip(room, sizes, strict=True) for _ in range(size))

    def is_late(self, layouts: ParamLayouts) -> bool:
        """Whether a trained parameter that lies so is updated one step late."""
        return self.delayed_update is not None and layouts.place.can_be_late
