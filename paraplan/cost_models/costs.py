"""What things cost on one mesh of one cluster, memoised: the face planners and the simulator see.

Prices depend on shapes and dtypes, never on names, so a model of any depth asks for few distinct ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from paraplan.cost_models.collectives import AxisLink, axis_link, collective_time_s, input_bytes_of
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
from paraplan.ir.rank_program import Block, Instr, InstrKind, LocalValue

COMPUTE = "compute"
COPY = "copy"
OUT, IN = "out", "in"
_MANY = 1 << 50  # bytes of a collective beside which no latency counts


@dataclass(frozen=True)
class Costs:
    """Times on a mesh. Equal ranks run in step, so on unequal devices the slowest one's time counts.

    Attributes:
        cluster: with the rates used.
        mesh: the stage's mesh.
    """

    cluster: ClusterSpec
    mesh: Mesh
    _ops: dict[object, float] = field(default_factory=dict, repr=False, compare=False)
    _collectives: dict[tuple[str, int, int], float] = field(default_factory=dict, repr=False, compare=False)

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
            time = self._ops[key] = self.work_s(
                work_of(target, key[1], inputs, outputs)
                if registered is None
                else registered_work_of(registered, inputs, outputs)
            )
        return time

    def work_s(self, work: OpWork) -> float:
        """Seconds of some work on the slowest device."""
        return max(op_time_s(work, device) for device in self.devices)

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
            time = self._collectives[key] = collective_time_s(target, input_bytes, self.links[axis])
        return time

    def collective_share_s(self, target: str, axis: int, input_bytes: int) -> float:
        """The least a tensor adds to a collective that it shares with others: its bytes at the best rate, no latency.

        Raises:
            CostModelError: see `collective_s`.
        """
        per_byte = (self.collective_s(target, axis, 2 * _MANY) - self.collective_s(target, axis, _MANY)) / _MANY
        return input_bytes * per_byte

    def copy_s(self, tier: str, nbytes: int) -> float:
        """Seconds of one copy to or from a tier (see `ClusterSpec.copy_s`).

        Raises:
            ClusterError: the cluster describes no such link.
        """
        key = (tier, -1, nbytes)
        time = self._collectives.get(key)
        if time is None:
            time = self._collectives[key] = max(
                self.cluster.copy_s(tier, device, nbytes) for device in self.mesh.devices
            )
        return time

    def instr_s(self, block: Block, instr: Instr) -> float:
        """Seconds an instruction keeps its stream busy: 0.0 for a wait or a pure view.

        Raises:
            CostModelError: see `op_s` and `collective_s`.
            ClusterError: see `copy_s`.
        """
        if instr.kind is InstrKind.WAIT:
            return 0.0
        values = block.values
        inputs = tuple([values[name] for name in refs((instr.args, tuple(instr.kwargs.values())))])
        if instr.kind is InstrKind.COLLECTIVE:
            sent = input_bytes_of(instr.target, instr.args, inputs[0].nbytes, (*inputs[0].shape, 1)[0])
            return self.collective_s(instr.target, instr.axis, sent)
        if instr.kind is InstrKind.COPY:
            return self.copy_s(instr.tier, inputs[0].nbytes)
        outputs = tuple([None if name is None else values[name] for name in instr.outs])
        made = [(name, out) for name, out in zip(instr.outs, outputs, strict=True) if out is not None]
        if instr.target == "paraplan.fill_tail_":
            return self.memory_s(0, tail_bytes(instr.args, inputs[0]))
        if all(_is_view(name, out) for name, out in made):
            return 0.0
        if is_free(instr.target):
            return self.work_s(copy_work(outputs))
        return self.op_s(instr.target, instr.args, instr.kwargs, inputs, outputs, instr.work)

    def stream(self, instr: Instr) -> str:
        """The stream an instruction runs on: "compute", "comm:in_node", "comm:between_nodes", or a copy's."""
        if instr.kind is InstrKind.COPY:
            return copy_stream(instr.tier, OUT if instr.target == "offload" else IN)
        return self.comm_streams[instr.axis] if instr.kind is InstrKind.COLLECTIVE else COMPUTE


def copy_stream(tier: str, way: str) -> str:
    """The stream of copies to (`OUT`) or from (`IN`) a tier: "copy:host:out"."""
    return f"{COPY}:{tier}:{way}"


def _is_view(name: str | None, value: LocalValue) -> bool:
    return value.storage_bytes == 0 and value.base != name
