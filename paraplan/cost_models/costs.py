"""What things cost on one mesh of one cluster, memoised: the face planners and the simulator see.

Prices depend on shapes and dtypes, never on names, so a model of any depth asks for few distinct ones. A profile of the
device is asked first, the analytic model where it has no answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from paraplan.cost_models.collectives import AxisLink, axis_link, collective_time_s, input_bytes_of, p2p_s
from paraplan.cost_models.constants import efficiency_of
from paraplan.cost_models.curves import Curve
from paraplan.cost_models.measured import MEASURED, MODELLED, MeasuredTimes, times_of
from paraplan.cost_models.ops import (
    OpWork,
    Outs,
    Specs,
    copy_work,
    is_free,
    op_time_s,
    registered_work_of,
    tail_bytes,
    variant,
    work_of,
)
from paraplan.ir.cluster import ClusterSpec, Device
from paraplan.ir.errors import CostModelError
from paraplan.ir.graph import Arg, refs
from paraplan.ir.mesh import Mesh
from paraplan.ir.profile import Measured, OpTime, Profile, detail_of, full_key, odd_strides, shape_key
from paraplan.ir.rank_program import GROW, PUT, ROOM, Block, Instr, InstrKind, LocalValue, Transfer

COMPUTE = "compute"
COPY = "copy"
UPDATE = "update"
OUT, IN = "out", "in"
FILL_TAIL = "paraplan.fill_tail_"
_MANY = 1 << 50  # bytes of a collective beside which no latency counts


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
    _collectives: dict[tuple[str, int, int], float] = field(default_factory=dict, repr=False, compare=False)
    _messages: dict[tuple[tuple[int, ...], int], float] = field(default_factory=dict, repr=False, compare=False)
    _lowered: dict[str, tuple[OpTime, str]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def measured(self) -> MeasuredTimes | None:
        """The profile's times, where a device of the mesh is the one they were taken on."""
        profile = self.profile
        device = next((each for each in self.devices if profile is not None and each.kind == profile.device), None)
        return times_of(profile, device) if profile is not None and device is not None else None

    @property
    def used(self) -> tuple[tuple[OpTime, str], ...]:
        """The lowered ops priced so far, and whether their time is measured, interpolated or modelled."""
        return tuple(self._lowered[key] for key in sorted(self._lowered))

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The distinct devices of the mesh."""
        groups = {id(group): group for group in map(self.cluster.group_of, self.mesh.devices)}
        return tuple(group.device for group in groups.values())

    @cached_property
    def links(self) -> tuple[AxisLink, ...]:
        """The link of every mesh axis."""
        return tuple(axis_link(self.cluster, self.mesh, axis) for axis in range(len(self.mesh.shape)))

    @cached_property
    def comm_streams(self) -> tuple[str, ...]:
        """The stream each mesh axis communicates on."""
        return tuple(f"comm:{link.level}" for link in self.links)

    def op_s(
        self,
        target: str,
        args: tuple[Arg, ...],
        kwargs: Mapping[str, Arg],
        inputs: Specs,
        outputs: Outs,
        registered: tuple[float, float] | None = None,
    ) -> float:
        """Seconds of one op on local shapes; see `ops.op_cost` for the arguments.

        `registered`: (flops, bytes moved) as the user says; bytes below 0: those of its inputs and outputs.

        Raises:
            CostModelError: a device has no rate for the dtype.
        """
        key = (
            target, variant(target, args, kwargs), tuple([(x.dtype, x.shape) for x in inputs]),
            tuple([None if x is None else (x.dtype, x.shape) for x in outputs]), registered,
        )  # fmt: skip
        time = self._ops.get(key)
        if time is None:
            work = _work(target, key[1], inputs, outputs, registered)
            shape = shape_key(target, key[1], inputs, outputs) if self.measured is not None else ""
            time = self._ops[key] = self._slowest_s(target, shape, None, work)[0]
        return time

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
            work = _work(instr.target, flag, inputs, outputs, instr.work)
            seconds, how = self._slowest_s(instr.target, shape, full, work)
            op = OpTime(
                target=instr.target, flag=flag, seconds=seconds, samples=int(how == MEASURED), detail=detail,
                inputs=_tensors(inputs, strides), outputs=_made(outputs),
            )  # fmt: skip
            self._lowered[full] = op, how
        return self._lowered[full][0].seconds

    def update_s(self, param_bytes: tuple[int, ...], read_bytes: int, write_bytes: int) -> float:
        """Seconds of the optimizer's update of parameters of these sizes, which reads and writes so much in all.

        Where measured: one parameter after another on a CPU, all at once elsewhere. Else one fused kernel.
        """
        curve = self._update
        if curve is None:
            return self.memory_s(read_bytes, write_bytes)
        alone = self.devices[0].backend == "cpu"
        return sum(map(curve.at, param_bytes)) if alone else curve.at(sum(param_bytes))

    def update_share_s(self, param_bytes: int, read_bytes: int, write_bytes: int) -> float:
        """The least that one more parameter adds to an update."""
        if self._update is None:
            return self.memory_s(read_bytes, write_bytes) - self.memory_s(0, 0)
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

    def memory_s(self, read_bytes: int, write_bytes: int) -> float:
        """Seconds of one kernel that only moves bytes through device memory."""
        work = OpWork(kind="memory", flops=0, read_bytes=read_bytes, write_bytes=write_bytes, dtype="float32")
        return self.work_s(work)

    def collective_s(self, target: str, axis: int, input_bytes: int) -> float:
        """Seconds of a collective over a mesh axis; input_bytes is what one rank puts in (see `collectives`).

        Raises:
            CostModelError: no such collective or axis, or negative bytes.
        """
        key = (target, axis, input_bytes)
        time = self._collectives.get(key)
        if time is None:
            if not 0 <= axis < len(self.links):
                raise CostModelError(f"{target} over axis {axis}: the mesh has axes 0 to {len(self.links) - 1}")
            curve, _ = self._curves(target, axis)
            known = curve.at(input_bytes) if curve is not None else None
            time = collective_time_s(target, input_bytes, self.links[axis]) if known is None else known
            self._collectives[key] = time
        return time

    def taken_s(self, target: str, axis: int, input_bytes: int) -> float:
        """Of the compute stream's time, what a collective takes for itself: its call, and a share of what is left.

        Raises:
            CostModelError: see `collective_s`.
        """
        seconds = self.collective_s(target, axis, input_bytes)
        _, curve = self._curves(target, axis)
        return self._taken_s(axis, seconds, min(seconds, curve.at(input_bytes)) if curve is not None else 0.0)

    def taken_share_s(self, target: str, axis: int, input_bytes: int) -> float:
        """The least of it that a tensor adds to a collective that it shares with others.

        Raises:
            CostModelError: see `collective_s`.
        """
        seconds = self.collective_share_s(target, axis, input_bytes)
        _, curve = self._curves(target, axis)
        called = min(seconds, input_bytes * curve.least_ratio) if curve is not None else 0.0
        return self._taken_s(axis, seconds, called)

    def _taken_s(self, axis: int, seconds: float, called: float) -> float:
        return called + self.links[axis].device_share * (seconds - called)

    def _curves(self, target: str, axis: int) -> tuple[Curve | None, Curve | None]:
        """Measured seconds of a collective and of its call."""
        if self.measured is None:
            return None, None
        key = (target, self.links[axis].size, self.links[axis].local_size)
        return self.measured.collectives.get(key), self.measured.calls.get(key)

    def collective_share_s(self, target: str, axis: int, input_bytes: int) -> float:
        """The least a tensor adds to a collective that it shares with others: its bytes at the best rate, no latency.

        Raises:
            CostModelError: see `collective_s`.
        """
        curve, _ = self._curves(target, axis)
        if curve is not None:
            return input_bytes * curve.least_ratio
        per_byte = (self.collective_s(target, axis, 2 * _MANY) - self.collective_s(target, axis, _MANY)) / _MANY
        return input_bytes * per_byte

    def message_s(self, transfer: Transfer) -> float:
        """Seconds of a message between this mesh and another: the slowest of the pairs of ranks that exchange it.

        Raises:
            ClusterError: ranks on different nodes and no link between them described.
        """
        key = (transfer.peers, transfer.nbytes)
        time = self._messages.get(key)
        if time is None:
            pairs = [pair for pair in zip(self.mesh.devices, transfer.peers, strict=True) if pair[1] >= 0]
            time = self._messages[key] = max((self._pair_s(pair, transfer.nbytes) for pair in pairs), default=0.0)
        return time

    def _pair_s(self, pair: tuple[int, int], nbytes: int) -> float:
        level, backend = self.cluster.span(pair), self.cluster.group_of(pair[0]).device.backend
        link = self.cluster.link(level, pair[0]) if level == "in_node" else self.cluster.network(pair)
        return p2p_s(nbytes, link, backend, level)

    def host_s(self, block: Block, instr: Instr) -> float:
        """Seconds for which a copy takes a device's share of the host's memory; 0.0 of all else."""
        return block.values[next(refs(instr.args))].nbytes / self._host_bytes_per_s if instr.tier else 0.0

    def copy_s(self, tier: str, nbytes: int, from_host: bool = False, both_ways: bool = False) -> float:
        """Seconds of one copy to or from a tier (see `ClusterSpec.copy_s`).

        `both_ways`: as much goes the other way beside it, and the host's memory, shared by its devices, carries both.

        Raises:
            ClusterError: the cluster describes no such link.
        """
        key = (tier, -1 - from_host - 2 * both_ways, nbytes)
        time = self._collectives.get(key)
        if time is None:
            time = max(self.cluster.copy_s(tier, device, nbytes, from_host) for device in self.mesh.devices)
            if both_ways and tier == "host":
                time = max(time, 2 * nbytes / self._host_bytes_per_s)
            self._collectives[key] = time
        return time

    @cached_property
    def _host_bytes_per_s(self) -> float:
        """A device's share of what its host's memory carries; infinite where that is not known."""
        groups = [self.cluster.group_of(device) for device in self.mesh.devices]
        rates = [
            group.host_memory_bytes_per_s / group.devices_per_node * efficiency_of(group.device.backend).memory
            for group in groups
        ]
        return min((rate for rate in rates if rate), default=math.inf)

    def instr_s(self, block: Block, instr: Instr) -> float:
        """Seconds an instruction keeps its stream busy: 0.0 for a wait, and without a profile for a pure view.

        Raises:
            CostModelError: see `op_s` and `collective_s`.
            ClusterError: see `copy_s`.
        """
        if instr.kind is InstrKind.WAIT:
            return 0.0
        values = block.values
        inputs = tuple([values[name] for name in refs((instr.args, tuple(instr.kwargs.values())))])
        if instr.kind is InstrKind.COLLECTIVE:
            return self.collective_s(instr.target, instr.axis, input_bytes_of(instr.target, instr.args, inputs[0]))
        if instr.kind is InstrKind.COPY:
            from_host = instr.target == "lift" or (instr.target == "store" and inputs[0].tier == "host")
            both_ways = instr.target == "bring" or (instr.target == "store" and not from_host)
            return self.copy_s(instr.tier, inputs[0].nbytes, from_host, both_ways)
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
            return self._lowered_s(block, instr, outputs)
        return self.op_s(instr.target, instr.args, instr.kwargs, inputs, outputs, instr.work)

    def instr_taken_s(self, block: Block, instr: Instr) -> float:
        """Seconds of compute that an instruction on another stream takes for itself: of a collective, `taken_s`.

        Raises:
            CostModelError: see `collective_s`.
        """
        if instr.kind is not InstrKind.COLLECTIVE:
            return 0.0
        sent = block.values[next(refs((instr.args, tuple(instr.kwargs.values()))))]
        return self.taken_s(instr.target, instr.axis, input_bytes_of(instr.target, instr.args, sent))

    def stream(self, instr: Instr) -> str:
        """The stream an instruction runs on: "compute", "comm:in_node", "comm:between_nodes", or a copy's."""
        if instr.kind is InstrKind.COPY:
            return copy_stream(instr.tier, OUT if instr.target in ("offload", "store", "keep") else IN)
        return self.comm_streams[instr.axis] if instr.kind is InstrKind.COLLECTIVE else COMPUTE


def _work(
    target: str, flag: int, inputs: Specs, outputs: Outs, registered: tuple[float, float] | None
) -> OpWork:  # fmt: skip
    registered_work = None if registered is None else registered_work_of(registered, inputs, outputs)
    return registered_work or work_of(target, flag, inputs, outputs)


def copy_stream(tier: str, way: str) -> str:
    """The stream of copies to (`OUT`) or from (`IN`) a tier: "copy:host:out"."""
    return f"{COPY}:{tier}:{way}"


def update_stream(tier: str) -> str:
    """The stream of updates done on a tier: "update:host"."""
    return f"{UPDATE}:{tier}"


def lowered_op(block: Block, instr: Instr) -> OpTime | None:
    """An instruction as a profile knows it, without a time; None for what no profile is asked about."""
    made = [(name, None if name is None else block.values[name]) for name in instr.outs]
    whole = [(name, out) for name, out in made if out is not None]
    moves = instr.target in (FILL_TAIL, GROW, PUT, ROOM) or is_free(instr.target)
    if instr.kind is not InstrKind.OP or moves or (whole and all(_is_view(name, out) for name, out in whole)):
        return None
    inputs, flag, strides, detail = _signature(block, instr)
    return OpTime(
        target=instr.target, flag=flag, seconds=0.0, samples=0, detail=detail, inputs=_tensors(inputs, strides),
        outputs=_made(tuple([out for _, out in made])),
    )  # fmt: skip


def _signature(block: Block, instr: Instr) -> tuple[tuple[LocalValue, ...], int, list[tuple[int, ...]], str]:
    """What an op is looked up by: inputs, what changes its work, strides that are not row-major, other arguments."""
    inputs = tuple([block.values[name] for name in refs((instr.args, tuple(instr.kwargs.values())))])
    flag = int(variant(instr.target, instr.args, instr.kwargs))
    strides = [odd_strides(x.shape, x.strides) for x in inputs]
    return inputs, flag, strides, detail_of(instr.target, instr.args, instr.kwargs)


def _tensors(inputs: tuple[LocalValue, ...], strides: list[tuple[int, ...]]) -> tuple[Measured, ...]:
    return tuple(Measured(x.dtype, x.shape, lie) for x, lie in zip(inputs, strides, strict=True))


def _made(outputs: Outs) -> tuple[Measured | None, ...]:
    return tuple(None if x is None else Measured(x.dtype, x.shape) for x in outputs)


def _is_view(name: str | None, value: LocalValue) -> bool:
    return value.storage_bytes == 0 and value.base != name
