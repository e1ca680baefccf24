"""The plan: the narrow waist between planners, simulator and runtime.

A plan says, for one training step of one program on one cluster: the stages, every layout, what happens
to every saved activation, and the ordered actions of every rank; with it, what was predicted and proved.
It is data: loading one never imports or executes anything.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from paraplan.ir.execution.schedule import Schedule
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import Optimizer
from paraplan.ir.param_layouts import ParamLayouts
from paraplan.ir.profile import Profile
from paraplan.ir.step_options import StepOptions
from paraplan.ir.struct import Value

PLAN_VERSION = 3


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
        status: "optimal" (the gap is no more than solvers leave, so no plan in scope is faster), "feasible" (it is
            more, so one may be) or "pinned" (nothing was searched).
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


class Plan(StepOptions, frozen=True, kw_only=True):
    """Everything needed to simulate, show and run one training step; how it is done throughout is in `StepOptions`.

    Attributes:
        version: of this format.
        made_with: versions of paraplan and of the libraries that shape a plan.
        model: which model.
        program: the captured model.
        cluster: where it runs, with the rates used.
        num_microbatches: microbatches per step; each takes 1/num of the global batch.
        optimizer: what keeps states.
        sum_products: whether products add the gradients of weights to their sums themselves, and make those of halves
            in float32 where they are to be (`lowering.rewrites`: `summed_grads`, `wide_grads`).
        compiled: whether forward and backward blocks go through torch.compile.
        reduce_dtype: "fp32" or "bf16": in which half precisions sum parameters' gradients over a mesh's ranks. "": in
            themselves as gradients are made (ZeRO-2, ZeRO-3, tensor parallelism), in float32 once a step (ZeRO-0,
            ZeRO-1). Accumulators, and what stages that share a parameter exchange, are float32 in any case.
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
    written_first: ClassVar[tuple[str, ...]] = (
        *("version", "made_with", "model", "program", "cluster", "num_microbatches", "optimizer"),
        *("bundle_bytes", "reducing_bytes", "reduce_every", "sum_products", "compiled", "reduce_dtype"),
    )

    version: int = PLAN_VERSION
    made_with: dict[str, str]
    model: ModelRef
    program: Program
    cluster: ClusterSpec
    num_microbatches: int
    optimizer: Optimizer
    sum_products: bool = True
    compiled: bool = False
    reduce_dtype: str = ""
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
    def options(self) -> StepOptions:
        """How the step is done throughout, by itself."""
        return StepOptions(**{name: getattr(self, name) for name in StepOptions.__struct_fields__})

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
