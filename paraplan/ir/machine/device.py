"""A device of a cluster and a link, with the numbers a plan is priced by.

Every rate is a peak from a data sheet or a measurement, with its source; what share of it an op reaches is the cost
model's business.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from paraplan.ir.errors import ClusterError
from paraplan.ir.machine.reserves import Reserve
from paraplan.ir.model.tensor import DTYPE_BYTES
from paraplan.ir.quantities import WAY_OUT, check_not_negative, check_positive
from paraplan.ir.struct import Value

BACKENDS = ("cuda", "cpu")
KERNELS = ("", "apex", "transformer-engine")
"""Whose kernels norms and sums over rows run (`cost_models.ops.access_patterns.LIBRARIES`); "": torch's."""
USUAL_CAPABILITY = 8
"""Ampere's: the least that torch's flash attention runs on."""
MOST_CLOCK = 4.0
"""A clock over the one that rates are quoted at, beyond which it is none of a board."""


class Link(Value, frozen=True, kw_only=True):
    """A way bytes travel.

    Attributes:
        bytes_per_s: peak bandwidth per device and direction.
        latency_s: latency of one message.
        device_share: of a device's compute, what a collective takes meanwhile (a CPU's threads, NCCL's channels).
        source: which link this is, and where its numbers come from.
    """

    bytes_per_s: float
    latency_s: float
    device_share: float = 0.0
    source: str = ""


class Device(Value, frozen=True, kw_only=True):
    """One accelerator (or CPU process).

    Attributes:
        kind: catalog name, e.g. "H100" or "cpu".
        memory_bytes: what a process may use in all.
        reserves: what of it the planner leaves to others than a plan's tensors, unless it is told how much.
        memory_bytes_per_s: bandwidth of the device's memory.
        flops_per_s: peak dense rate of matrix work per dtype (torch's names, and "tf32"); a float dtype not named
            here is not supported.
        power_share: the board's power limit over the power that matrix products would take at the clock the data
            sheet's rates are quoted at; they run at the limit, and slow down with its root.
        clock_share: the clock at which a job's products run, over the one its rates are quoted at
            (`cost_models.clocks`); 0.0: not known, and then as they run one after another, the root of power_share.
        boost_share: the highest clock, over the one its rates are quoted at; 0.0: that is the highest.
        rest_power_share: what kernels that only move bytes draw, over the board's limit; 0.0: not known, and then as
            much as products.
        kernels: whose kernels norms and sums over rows run, one of `KERNELS`.
        capability: compute capability, the larger number, by which kernels are chosen; 0: not known.
        multiprocessors: among which the tiles of a product are dealt out; 0: not known, or a CPU.
        launch_s: time to start one kernel.
        issue_s: time the host takes to issue one kernel, Python and torch's dispatch included; kernels shorter than
            that wait for it. 0.0: not known, and left out; `paraplan.detect` measures it.
        backend: torch device type the plan runs on, "cuda" or "cpu".
        source: the document or measurement the rates come from.
        sources: per dtype, and for memory_bytes and memory_bytes_per_s, what that source calls it.
    """

    kind: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: dict[str, float]
    power_share: float = 1.0
    clock_share: float = 0.0
    boost_share: float = 0.0
    rest_power_share: float = 0.0
    kernels: str = ""
    capability: int = 0
    multiprocessors: int = 0
    launch_s: float = 3e-6
    issue_s: float = 0.0
    backend: str = "cuda"
    source: str = ""
    sources: dict[str, str] = {}
    reserves: tuple[Reserve, ...] = ()


def check_device(cluster: str, device: Device, at: str) -> None:
    """Refuse a device that no machine has.

    Args:
        cluster: the name of the cluster it is in.
        device: to look at.
        at: where in the cluster it is.
    Raises:
        ClusterError: a rate that is not positive, a number no machine has, an unknown dtype or backend.
    """
    check_positive(cluster, device.memory_bytes, f"{at}.memory_bytes")
    check_positive(cluster, device.memory_bytes_per_s, f"{at}.memory_bytes_per_s")
    check_not_negative(cluster, device.launch_s, f"{at}.launch_s")
    check_not_negative(cluster, device.issue_s, f"{at}.issue_s")
    for index, each in enumerate(device.reserves):
        check_not_negative(cluster, each.nbytes, f"{at}.reserves[{index}].nbytes")
    if device.multiprocessors < 0:
        raise ClusterError(
            f"cluster {cluster!r}: {at}.multiprocessors is {device.multiprocessors}; give how many there are, or 0"
        )
    if device.capability < 0:
        raise ClusterError(
            f"cluster {cluster!r}: {at}.capability is {device.capability}; give the larger number of the device's "
            "compute capability, or 0"
        )
    if not 0 < device.power_share <= 1:
        raise ClusterError(
            f"cluster {cluster!r}: {at}.power_share is {device.power_share}; a share of the rated power is "
            "more than 0 and at most 1"
        )
    _check_clocks(cluster, device, at)
    if not device.flops_per_s:
        raise ClusterError(
            f"cluster {cluster!r}: {at}.flops_per_s names no dtype; give at least one rate, e.g. float32: 19.5e12"
        )
    for dtype, rate in device.flops_per_s.items():
        if dtype not in DTYPE_BYTES and dtype != "tf32":
            known = (*DTYPE_BYTES, "tf32")
            raise ClusterError(
                f"cluster {cluster!r}: {at}.flops_per_s names dtype {dtype!r}{did_you_mean(dtype, known)}; "
                f"it knows {', '.join(known)}"
            )
        check_positive(cluster, rate, f"{at}.flops_per_s.{dtype}")
    if device.kernels not in KERNELS:
        raise ClusterError(
            f"cluster {cluster!r}: {at}.kernels is {device.kernels!r}{did_you_mean(device.kernels, KERNELS)}; "
            f"it is one of {', '.join(map(repr, KERNELS))}"
        )
    if device.backend not in BACKENDS:
        raise ClusterError(
            f"cluster {cluster!r}: {at}.backend is {device.backend!r}; it is one of {', '.join(BACKENDS)}"
        )


def _check_clocks(cluster: str, device: Device, at: str) -> None:
    """Refuse clocks that no board has."""
    for name in ("clock_share", "boost_share"):
        share = getattr(device, name)
        check_not_negative(cluster, share, f"{at}.{name}")
        if share > MOST_CLOCK:
            raise ClusterError(
                f"cluster {cluster!r}: {at}.{name} is {share:g}; a clock over that which rates are quoted at is at "
                f"most {MOST_CLOCK:g}, and 0 where it is not known"
            )
    if not 0 <= device.rest_power_share <= 1:
        raise ClusterError(
            f"cluster {cluster!r}: {at}.rest_power_share is {device.rest_power_share}; a share of the board's limit "
            "is at least 0 and at most 1"
        )


def check_link(cluster: str, link: Link | None, at: str) -> None:
    """Refuse a link that no machine has.

    Args:
        cluster: the name of the cluster it is in.
        link: to look at; None for one that is not there.
        at: where in the cluster it is.
    Raises:
        ClusterError: a rate that is not positive, or a share that is more than all.
    """
    if link is not None:
        check_positive(cluster, link.bytes_per_s, f"{at}.bytes_per_s")
        check_not_negative(cluster, link.latency_s, f"{at}.latency_s")
        if not 0 <= link.device_share <= 1:
            share = f"{at}.device_share is {link.device_share}; a share of a device is at least 0 and at most 1"
            raise ClusterError(f"cluster {cluster!r}: {share}; {WAY_OUT}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`", did you mean X or Y?"`, or nothing where no name is near."""
    by_lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(by_lower[one] for one in near)}?)" if near else ""
