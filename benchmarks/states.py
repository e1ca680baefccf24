"""Where optimizer states live and who updates them, by the simulator: a step of eight GPUs of the catalog.

Twelve layers of 2,048 by 2,048 in fp16 under Adam, whole on each of eight devices of one node, so that a device has its
share of the host's memory; the batch is small, so a step is little more than its update. `host` and `fetched` keep
states in the host's memory and update there or on the device, `disk` on disk and updates in the host's memory.

    python -m benchmarks.states [--only H100] [--json FILE]
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor, nn

from benchmarks.table import Row, main
from paraplan.cost_models.catalog import CATALOG, parse_cluster
from paraplan.ir.plan import OPTIMIZERS, ModelRef
from paraplan.ir.program import Program
from paraplan.ir.trace import capture
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search

WIDTH, LAYERS, ROWS = 2048, 12, 8
PLACES = ("none", "host", "fetched", "disk")
COLUMNS = ("device", *(f"{place}_ms" for place in PLACES), "fetched_of_host")


def squares(out: Tensor, _: object) -> Tensor:
    """A loss."""
    return out.float().square().mean()


@cache
def program() -> Program:
    """The layers, captured."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    return capture(model, {"input": torch.randn(ROWS, WIDTH)}, loss_fn=squares, precision="fp16")


def states(kind: str) -> Row:
    """A step with states in each place."""
    job = Job(program(), parse_cluster(f"8x{kind}"), OPTIMIZERS["adamw"], ModelRef(display="layers"), {})
    found = {}
    for place in PLACES:
        pins = Constraints(dp=8, zero=0, microbatches=1, offload_states=place)
        prediction = search(job, pins, certify=False).plan.prediction
        assert prediction is not None
        found[place] = 1e3 * prediction.step_s
    times: Row = {f"{place}_ms": step_ms for place, step_ms in found.items()}
    return {"device": kind, **times, "fetched_of_host": found["fetched"] / found["host"]}


CASES = {kind: partial(states, kind) for kind, entry in CATALOG.items() if entry.device.backend == "cuda"}


if __name__ == "__main__":
    raise SystemExit(main("states", CASES, COLUMNS))
