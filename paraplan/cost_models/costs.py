"""What things cost on one mesh of one cluster, memoised: the face planners and the simulator see.

Prices depend on shapes and dtypes, never on names, so a model of any depth asks for few distinct ones. A profile of the
device is asked first, the analytic model where it has no answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from paraplan.cost_models.communication.collectives import input_bytes_of
from paraplan.cost_models.communication.move_costs import Moves
from paraplan.cost_models.constants import efficiency_of
from paraplan.cost_models.ops.access_patterns import STREAM, UPDATE
from paraplan.cost_models.ops.product_shapes import Outs, Specs
from paraplan.cost_models.ops.roofline import (
    OpWork,
    copy_work,
    is_free,
    op_time_s,
    registered_work_of,
    tail_bytes,
    variant,
    work_of,
)
from paraplan.cost_models.profiles.curves import Curve
from paraplan.cost_models.profiles.measured import MEASURED, MODELLED, MeasuredTimes, times_of
from paraplan.ir.execution.rank_program import GROW, PUT, ROOM, SUM, SUMMED, Block, Instr, InstrKind, LocalValue
from paraplan.ir.execution.streams import COMPUTE, IN, OUT, Stream, copy_stream
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.device import Device
from paraplan.ir.machine.kernel_choice import OpCall
from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.model.graph import Arg, refs
from paraplan.ir.model.scan import SCAN, scan_of
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.profile import Measured, OpTime, Profile, detail_of, full_key, odd_strides, shape_key
from paraplan.rules.device_kernels.kernel_counts import launch_count
from paraplan.rules.workspace import loop_workspace

FILL_TAIL = "paraplan.fill_tail_"
ADD, BETWEEN_BLOCKS = "aten.add_.Tensor", "between blocks"
"""What adds gradients and losses of microbatches, and how its times are told from those of a block's."""


VIEW_SHARE = 0.5
"""Of the host's time for a kernel, what an op takes that only reinterprets."""


@dataclass(frozen=True)
class Costs:
    """Times on a mesh. Equal ranks run in step, so on unequal devices the slowest one's time counts.

    Attributes:
        cluster: with the rates used.
        mesh: the stage's mesh.
        profile: measured times of a device of the cluster, if there is one.
        optimizer: whose update is priced, where a profile has several.
        compiled: whether segments' blocks go through torch.compile, which fuses chains (see `fusion`).
    """

    cluster: ClusterSpec
    mesh: Mesh
    profile: Profile | None = None
    optimizer: str = ""
    compiled: bool = False
    _ops: dict[object, float] = field(default_factory=dict, repr=False, compare=False)
    _lowered: dict[str, tuple[OpTime, str]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def measured(self) -> MeasuredTimes | None:
        """The profile's times, where a device of the mesh is the one they were taken on."""
        profile = self.profile
        device = next((each for each in self.devices if profile is not None and each.kind == profile.device), None)
        return times_of(profile, device) if profile is not None and device is not None else None

    @cached_property
    def moves(self) -> Moves:
        """What moving bytes costs."""
        return Moves(self.cluster, self.mesh, self.measured)

    @property
    def used(self) -> tuple[tuple[OpTime, str], ...]:
        """The lowered ops priced so far, and whether their time is measured, interpolated or modelled."""
        return tuple(self._lowered[key] for key in sorted(self._lowered))

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The distinct devices of the mesh."""
        groups = {id(group): group for group in map(self.cluster.group_of, self.mesh.devices)}
        return tuple(group.device for group in groups.values())

    def op_s(
        self,
        target: str,
        args: tuple[Arg, ...],
        kwargs: Mapping[str, Arg],
        inputs: Specs,
        outputs: Outs,
        registered: tuple[float, float] | None = None,
    ) -> float:
        """Seconds of one op on local shapes.

        Args:
            target, args, kwargs, inputs, outputs: as of `ops.op_cost`.
            registered: (flops, bytes moved) as the user says; bytes below 0: those of its inputs and outputs.
        Raises:
            CostModelError: a device has no rate for the dtype.
        """
        key = (
            target,
            variant(target, args, kwargs),
            tuple([(x.dtype, x.shape) for x in inputs]),
            tuple([None if x is None else (x.dtype, x.shape) for x in outputs]),
            registered,
        )
        time = self._ops.get(key)
        if time is None:
            work = _work(target, key[1], inputs, outputs, registered)
            shape = shape_key(target, key[1], inputs, outputs) if self.measured is not None else ""
            time = self._ops[key] = self._slowest_s(target, shape, None, work)[0]
        return time

    def sum_s(self, held: TensorSpec, added: TensorSpec) -> float:
        """Seconds of adding a tensor to one that is held, outside of blocks.

        Raises:
            CostModelError: see `op_s`.
        """
        inputs, outputs, args = (held, added), (held,), ("%0", "%1")
        seconds = self.op_s(ADD, args, {}, inputs, outputs)
        if self.measured is not None:
            flag = int(variant(ADD, args, {}))
            shape, work = shape_key(ADD, flag, inputs, outputs), _work(ADD, flag, inputs, outputs, None)
            how = self._slowest_s(ADD, shape, None, work)[1]
            made = tuple(Measured(each.dtype, each.shape) for each in inputs)
            op = OpTime(
                target=ADD,
                flag=flag,
                inputs=made,
                outputs=made[:1],
                detail=BETWEEN_BLOCKS,
                seconds=seconds,
                samples=int(how == MEASURED),
            )
            self._lowered[op.full_key] = op, how
        return seconds

    def work_s(self, work: OpWork) -> float:
        """Seconds of some work on the slowest device, by the analytic model."""
        return max(op_time_s(work, device) for device in self.devices)

    def _slowest_s(self, target: str, shape: str, full: str | None, work: OpWork) -> tuple[float, str]:
        """Seconds of an op on the slowest device, and how they are known."""
        times, found = self.measured, None
        if times is None or work.kind == "view":
            return self.work_s(work), MODELLED
        found = times.op(shape, full, work, target)
        if found is None:
            return self.work_s(work), MODELLED
        others = [op_time_s(work, device) for device in self.devices if device.kind != times.device.kind]
        return (max(found[0], *others), found[1]) if others else found

    def _lowered_s(self, block: Block, instr: Instr, outputs: Outs) -> float:
        """Seconds of a lowered op, by its own strides and arguments where they were measured."""
        inputs, flag, strides, detail = _signature(block, instr)
        shape = shape_key(instr.target, flag, inputs, outputs)
        full = full_key(shape, strides, detail)
        if full not in self._lowered:
            work = _work(instr.target, flag, inputs, outputs, _said_work(instr))
            seconds, how = self._slowest_s(instr.target, shape, full, work)
            op = OpTime(
                target=instr.target,
                flag=flag,
                seconds=seconds,
                samples=int(how == MEASURED),
                detail=detail,
                inputs=_tensors(inputs, strides),
                outputs=_made(outputs),
            )
            self._lowered[full] = op, how
        return self._lowered[full][0].seconds

    def update_s(self, param_bytes: tuple[int, ...], read_bytes: int, write_bytes: int) -> float:
        """Seconds of the optimizer's update of parameters of these sizes, which reads and writes so much in all.

        Where measured: one parameter after another on a CPU, all at once elsewhere. Else one fused kernel.

        Args:
            param_bytes: of every parameter.
            read_bytes, write_bytes: of all of them, with gradients and states.
        """
        curve = self._update
        if curve is None:
            return self.memory_s(read_bytes, write_bytes, UPDATE)
        alone = self.devices[0].backend == "cpu"
        return sum(map(curve.at, param_bytes)) if alone else curve.at(sum(param_bytes))

    def update_share_s(self, param_bytes: int, read_bytes: int, write_bytes: int) -> float:
        """The least that one more parameter adds to an update.

        Args:
            param_bytes: of the parameter.
            read_bytes, write_bytes: of it, its gradient and its states.
        """
        if self._update is None:
            return self.memory_s(read_bytes, write_bytes, UPDATE) - self.memory_s(0, 0)
        return self._update.least_ratio * param_bytes

    def update_away_s(self, tier: str, moved_bytes: int) -> float:
        """Seconds of the update of parameters on a tier that reads and writes so many bytes there, in one pass.

        Raises:
            ClusterError: the cluster does not say how fast the host's memory is.
        """
        rates = [
            self.cluster.update_bytes_per_s(tier, device)
            * efficiency_of(self.cluster.group_of(device).device.backend).memory
            for device in self.mesh.devices
        ]
        return moved_bytes / min(rates)

    @cached_property
    def _update(self) -> Curve | None:
        return None if self.measured is None else self.measured.updates.get(self.optimizer)

    def memory_s(self, read_bytes: int, write_bytes: int, pattern: str = STREAM) -> float:
        """Seconds of one kernel that only moves bytes through device memory.

        Args:
            read_bytes, write_bytes: that it moves.
            pattern: how, of `access_patterns.PATTERNS`.
        """
        work = OpWork(
            kind="memory", flops=0, read_bytes=read_bytes, write_bytes=write_bytes, dtype="float32", pattern=pattern
        )
        return self.work_s(work)

    def instr_s(self, block: Block, instr: Instr) -> float:
        """Seconds an instruction keeps its stream busy: 0.0 for a wait, and without a profile for a pure view.

        Raises:
            CostModelError: see `op_s` and `Moves.collective_s`.
            ClusterError: see `Moves.copy_s`.
        """
        if instr.kind is InstrKind.WAIT:
            return 0.0
        values = block.values
        inputs = tuple([values[name] for name in refs((instr.args, tuple(instr.kwargs.values())))])
        if instr.kind is InstrKind.COLLECTIVE:
            sent = input_bytes_of(instr.target, instr.args, inputs[0])
            return self.moves.collective_s(instr.target, instr.axis, sent)
        if instr.kind is InstrKind.COPY:
            from_host = instr.target == "lift" or (instr.target == "store" and bool(inputs[0].tier))
            both_ways = instr.target == "bring" or (instr.target == "store" and not from_host)
            return self.moves.copy_s(instr.tier, inputs[0].nbytes, from_host, both_ways)
        outputs = tuple([None if name is None else values[name] for name in instr.outs])
        made = [(name, out) for name, out in zip(instr.outs, outputs, strict=True) if out is not None]
        if instr.target == FILL_TAIL:
            return self.memory_s(0, tail_bytes(instr.args, inputs[0]))
        if instr.target == GROW:
            return self.memory_s(inputs[0].nbytes + inputs[1].nbytes, inputs[0].nbytes)
        if instr.target in (PUT, ROOM):
            moved = inputs[1].nbytes if instr.target == PUT else 0
            return self.memory_s(moved, moved)
        if all(_is_view(name, out) for name, out in made) and (made or is_free(instr.target)):
            return 0.0 if self.measured is None else self.measured.view_s
        if is_free(instr.target):
            return self.work_s(copy_work(outputs))
        if self.measured is not None:
            added = self.memory_s(inputs[0].nbytes, 0) if instr.target == SUM else 0.0
            return added + self._lowered_s(block, *_alone(instr, inputs, outputs))
        more = self._more_launches_s(instr, inputs, outputs)
        return more + self.op_s(instr.target, instr.args, instr.kwargs, inputs, outputs, _said_work(instr))

    def _more_launches_s(self, instr: Instr, inputs: tuple[LocalValue, ...], outputs: Outs) -> float:
        """Seconds of the launches of an op after its first, which `op_s` counts."""
        if self.cluster.backend == "cpu" and instr.target != SCAN:
            return 0.0
        call = OpCall(inputs, outputs, instr.args)  # type: ignore[arg-type]
        count = launch_count(self.cluster.backend, instr.target, instr.kernel, call)
        return max(count - 1, 0) * max(device.launch_s for device in self.devices)

    def loop_s(self, target: str, args: tuple[Arg, ...]) -> float:
        """Seconds of a loop's launches after its first, which `op_s` counts: however it is sharded, steps follow one
        another. 0.0 of all else, and where times were measured.

        Args:
            target, args: the op's.
        """
        if target != SCAN or self.measured is not None:
            return 0.0
        return max(loop_workspace.launches(scan_of(args)) - 1, 0) * max(device.launch_s for device in self.devices)

    def host_s(self, block: Block, instr: Instr) -> float:
        """Seconds for which a copy takes a device's share of the host's memory; 0.0 of all else."""
        return (
            block.values[next(refs(instr.args))].nbytes / self.moves.carried_bytes_per_s(instr.tier)
            if instr.tier
            else 0.0
        )

    @cached_property
    def kernel_issue_s(self) -> float:
        """Seconds the host takes to issue one kernel; 0.0: not known."""
        return max(device.issue_s for device in self.devices)

    def issue_s(self, block: Block, instr: Instr) -> float:
        """Seconds the host takes to issue an op: 0.0 of what is only reinterpreted, or where that is not known."""
        each = self.kernel_issue_s
        if not each:
            return 0.0
        values = block.values
        made = [(name, values[name]) for name in instr.outs if name is not None]
        if is_free(instr.target) and all(_is_view(name, out) for name, out in made):
            return each * VIEW_SHARE
        inputs = tuple([values[name] for name in refs((instr.args, tuple(instr.kwargs.values())))])
        call = OpCall(inputs, [out for _, out in made], instr.args)  # type: ignore[arg-type]
        return each * max(launch_count(self.cluster.backend, instr.target, instr.kernel, call), 1)

    def instr_taken_s(self, block: Block, instr: Instr) -> float:
        """Seconds of compute that an instruction on another stream takes for itself: of a collective, `Moves.taken_s`.

        Raises:
            CostModelError: see `Moves.collective_s`.
        """
        if instr.kind is not InstrKind.COLLECTIVE:
            return 0.0
        sent = block.values[next(refs((instr.args, tuple(instr.kwargs.values()))))]
        return self.moves.taken_s(instr.target, instr.axis, input_bytes_of(instr.target, instr.args, sent))

    def stream(self, instr: Instr) -> Stream:
        """The stream an instruction runs on: "compute", "comm:in_node", "comm:between_nodes", or a copy's."""
        if instr.kind is InstrKind.COPY:
            return copy_stream(instr.tier, OUT if instr.target in ("offload", "store", "keep") else IN)
        return self.moves.comm_streams[instr.axis] if instr.kind is InstrKind.COLLECTIVE else COMPUTE


def _said_work(instr: Instr) -> tuple[float, float] | None:
    """(flops, bytes moved) that an instruction itself says: the user's, or those of a loop's steps."""
    return loop_workspace.work(scan_of(instr.args)) if instr.target == SCAN else instr.work


def _work(target: str, flag: int, inputs: Specs, outputs: Outs, registered: tuple[float, float] | None) -> OpWork:
    registered_work = None if registered is None else registered_work_of(registered, inputs, outputs)
    return registered_work or work_of(target, flag, inputs, outputs)


def lowered_op(block: Block, instr: Instr) -> OpTime | None:
    """An instruction as a profile knows it, without a time; None for what no profile is asked about."""
    made = [(name, None if name is None else block.values[name]) for name in instr.outs]
    whole = [(name, out) for name, out in made if out is not None]
    moves = instr.target in (FILL_TAIL, GROW, PUT, ROOM, SUM) or is_free(instr.target)
    if instr.kind is not InstrKind.OP or moves or (whole and all(_is_view(name, out) for name, out in whole)):
        return None
    inputs, flag, strides, detail = _signature(block, instr)
    return OpTime(
        target=instr.target,
        flag=flag,
        seconds=0.0,
        samples=0,
        detail=detail,
        inputs=_tensors(inputs, strides),
        outputs=_made(tuple([out for _, out in made])),
    )


def _alone(instr: Instr, inputs: tuple[LocalValue, ...], outputs: Outs) -> tuple[Instr, Outs]:
    """An op as profiles know it: of a product that adds to a sum, the product."""
    if instr.target != SUM:
        return instr, outputs
    return msgspec.structs.replace(instr, target=SUMMED, args=instr.args[1:]), inputs[:1]


def _signature(block: Block, instr: Instr) -> tuple[tuple[LocalValue, ...], int, list[tuple[int, ...]], str]:
    """What an op is looked up by: inputs, what changes its work, strides that are not row-major, other arguments."""
    inputs = tuple([block.values[name] for name in refs((instr.args, tuple(instr.kwargs.values())))])
    flag = int(variant(instr.target, instr.args, instr.kwargs))
    strides = [odd_strides(x.shape, x.strides) for x in inputs]
    return inputs, flag, strides, detail_of(instr.target, instr.args, instr.kwargs, instr.kernel)


def _tensors(inputs: tuple[LocalValue, ...], strides: list[tuple[int, ...]]) -> tuple[Measured, ...]:
    return tuple(Measured(x.dtype, x.shape, lie) for x, lie in zip(inputs, strides, strict=True))


def _made(outputs: Outs) -> tuple[Measured | None, ...]:
    return tuple(None if x is None else Measured(x.dtype, x.shape) for x in outputs)


def _is_view(name: str | None, value: LocalValue) -> bool:
    return value.storage_bytes == 0 and value.base != name
