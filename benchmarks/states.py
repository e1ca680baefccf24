"""Where optimizer states live and who updates them, by the simulator: a step of eight GPUs of the catalog.

Twelve layers of 2,048 by 2,048 in fp16 under Adam, whole on each of eight devices of one node, so that a device has its
share of the host's memory; with a small batch a step is little more than its update, with a large one compute is as
long. `host` and `fetched` keep states in the host's memory and update there or on the device, `late` updates there one
step late, `disk` keeps them on disk and updates in the host's memory, and `grads` has gradients wait on disk too.

    python -m benchmarks.states [--only H100] [--json FILE]
"""

from __future__ import annotations

from functools import cache, partial

import msgspec
import torch
from torch import Tensor, nn

from benchmarks.table import Row, main
from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import CATALOG, parse_cluster
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search

WIDTH, LAYERS = 2048, 12
ROWS = {"small": 8, "large": 131072}
PLACES = {
    "none": Constraints(),
    "host": Constraints(offload_states="host"),
    "fetched": Constraints(offload_states="fetched"),
    "late": Constraints(offload_states="host", delayed_update=0),
    "disk": Constraints(offload_states="disk"),
    "grads": Constraints(offload_states="disk-grads"),
}
COLUMNS = (
    "device",
    "batch",
    *(f"{place}_ms" for place in PLACES),
    "fetched_of_host",
    "late_of_host",
    "disk_host_mib",
    "grads_host_mib",
)


def squares(out: Tensor, _: object) -> Tensor:
    """A loss."""
    return out.float().square().mean()


@cache
def program(rows: int) -> Program:
    """The layers, captured."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    return capture(model, {"input": torch.empty(rows, WIDTH, device="meta")}, loss_fn=squares, precision="fp16")


def states(kind: str, batch: str) -> Row:
    """A step with states in each place."""
    job = Job(program(ROWS[batch]), parse_cluster(f"8x{kind}"), OPTIMIZERS["adamw"], ModelRef(display="layers"), {})
    found, there = {}, {}
    for place, where in PLACES.items():
        pins = msgspec.structs.replace(where, dp=8, zero=0, microbatches=1)
        prediction = search(job, pins, certify=False).plan.prediction
        assert prediction is not None
        found[place] = 1e3 * prediction.step_s
        there[place] = prediction.tier_peak_bytes.get("host", 0) / 2**20
    times: Row = {f"{place}_ms": step_ms for place, step_ms in found.items()}
    shares: Row = {f"{place}_of_host": found[place] / found["host"] for place in ("fetched", "late")}
    rooms: Row = {f"{place}_host_mib": there[place] for place in ("disk", "grads")}
    return {"device": kind, "batch": batch, **times, **shares, **rooms}


CASES = {
    f"{kind} {batch}": partial(states, kind, batch)
    for kind, entry in CATALOG.items()
    for batch in ROWS
    if entry.device.backend == "cuda"
}


if __name__ == "__main__":
    raise SystemExit(main("states", CASES, COLUMNS))
