"""What moving bytes costs on one mesh: collectives, messages to and from other meshes, copies to and from tiers.

A profile's curves are asked first, the analytic forms where it has none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from paraplan.cost_models.communication.collectives import AxisLink, axis_link, collective_time_s, p2p_s
from paraplan.cost_models.constants import efficiency_of
from paraplan.cost_models.profiles.curves import Curve
from paraplan.cost_models.profiles.measured import MeasuredTimes
from paraplan.ir.errors import CostModelError
from paraplan.ir.execution.rank_program import PeerTransfer
from paraplan.ir.execution.streams import Stream, comm_stream
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.machine.tiers import TIERS

_MANY = 1 << 50  # bytes of a collective beside which no latency counts


@dataclass(frozen=True)
class Moves:
    """Times on a mesh, memoised.

    Attributes:
        cluster: with the rates used.
        mesh: the stage's mesh.
        measured: times of a device of the mesh, if there are any.
    """

    cluster: ClusterSpec
    mesh: Mesh
    measured: MeasuredTimes | None = None
    _collectives: dict[tuple[str, int, int], float] = field(default_factory=dict, repr=False, compare=False)
    _messages: dict[tuple[tuple[int, ...], int], float] = field(default_factory=dict, repr=False, compare=False)
    _copies: dict[tuple[str, int, bool, bool], float] = field(default_factory=dict, repr=False, compare=False)
    _carried: dict[str, float] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def links(self) -> tuple[AxisLink, ...]:
        """The link of every mesh axis."""
        return tuple(axis_link(self.cluster, self.mesh, axis) for axis in range(len(self.mesh.shape)))

    @cached_property
    def comm_streams(self) -> tuple[Stream, ...]:
        """The stream each mesh axis communicates on."""
        return tuple(comm_stream(link.level) for link in self.links)

    def collective_s(self, target: str, axis: int, input_bytes: int) -> float:
        """Seconds of a collective over a mesh axis; input_bytes is what one rank puts in (see `collectives`).

        Args:
            target: the collective's name.
            axis: number of the mesh axis.
            input_bytes: what one rank puts in (see `collectives`).
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

        Args:
            target, axis, input_bytes: as of `collective_s`.
        Raises:
            CostModelError: see `collective_s`.
        """
        seconds = self.collective_s(target, axis, input_bytes)
        _, curve = self._curves(target, axis)
        return self._taken_s(axis, seconds, min(seconds, curve.at(input_bytes)) if curve is not None else 0.0)

    @cached_property
    def least_waited(self) -> dict[str, float]:
        """Per communication stream, what share of a collective's time at least is not the compute stream's as well."""
        found: dict[str, float] = {}
        for axis, stream in enumerate(self.comm_streams):
            called = self.measured is not None and bool(self.measured.calls)
            share = 0.0 if called else 1.0 - self.links[axis].device_share
            found[stream] = min(found.get(stream, 1.0), share)
        return found

    def taken_share_s(self, target: str, axis: int, input_bytes: int) -> float:
        """The least of it that a tensor adds to a collective that it shares with others.

        Args:
            target, axis: as of `collective_s`.
            input_bytes: of the tensor alone.
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

        Args:
            target, axis: as of `collective_s`.
            input_bytes: of the tensor alone.
        Raises:
            CostModelError: see `collective_s`.
        """
        curve, _ = self._curves(target, axis)
        if curve is not None:
            return input_bytes * curve.least_ratio
        per_byte = (self.collective_s(target, axis, 2 * _MANY) - self.collective_s(target, axis, _MANY)) / _MANY
        return input_bytes * per_byte

    def message_s(self, transfer: PeerTransfer) -> float:
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

    def copy_s(self, tier: str, nbytes: int, from_host: bool = False, both_ways: bool = False) -> float:
        """Seconds of one copy to or from a tier (see `ClusterSpec.copy_s`).

        Args:
            tier, nbytes, from_host: as there.
            both_ways: as much goes the other way beside it, and the host's memory, shared by its devices, carries both.
        Raises:
            ClusterError: the cluster describes no such link.
        """
        key = (tier, nbytes, from_host, both_ways)
        time = self._copies.get(key)
        if time is None:
            time = max(self.cluster.copy_s(tier, device, nbytes, from_host) for device in self.mesh.devices)
            if both_ways and TIERS[tier].is_memory:
                time = max(time, 2 * nbytes / self.carried_bytes_per_s(tier))
            self._copies[key] = time
        return time

    def carried_bytes_per_s(self, tier: str) -> float:
        """A device's share of what the memory on the way to a tier carries; infinite where that is not known."""
        memory = TIERS[tier].updated_in
        rate = self._carried.get(memory)
        if rate is None:
            groups = [self.cluster.group_of(device) for device in self.mesh.devices]
            rates = [
                group.update_bytes_per_s(memory) / group.devices_per_node * efficiency_of(group.device.backend).memory
                for group in groups
            ]
            rate = self._carried[memory] = min((each for each in rates if each), default=math.inf)
        return rate
