"""`benchmarks.fuzz` over Gloo: every small model on 2, 4 and 8 processes, a tenth of the plans.

The planner's own choice and two random legal plans on each number of processes (six a model, with `PLANS=6`), five
steps of SGD with momentum each, one job for all of a case. Every step is held against one device as `paraplan run
--check` does it, and, where there is no dropout, against the user's eager model; entries of every rank, and its peak,
against the prediction.

    python -m benchmarks.gloo [--only "t5 4"] [--json FILE [--resume]]      PLANS=6 plans a model (environment)
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.fuzz import MICROBATCHES, plans, subject
from benchmarks.table import Row, main
from benchmarks.zoo import NAMES
from paraplan.ir.struct import to_json
from paraplan.runtime.launch import spawn_local

PLANS = int(os.environ.get("PLANS", "6"))
COLUMNS = (
    *("case", "plans", "worst_loss", "worst_grad", "worst_param", "eager", "entries_equal", "peak_ratio_min"),
    *("peak_ratio_max", "failures"),
)


def trained(name: str, ranks: int) -> Row:
    """One model's plans, on processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        for index, (which, make, dropout, _) in enumerate(plans(subject(name), ranks, PLANS)):
            (Path(folder) / f"{index} {which}, dropout {dropout}.plan").write_bytes(to_json(make()))
        found = Path(folder) / "row.json"
        code = spawn_local(ranks, "benchmarks.gloo_rank", (name, folder, str(found)))
        if code or not found.exists():
            return {"failures": [f"a rank ended with code {code}"]}
        row: Row = json.loads(found.read_text())
        return row


CASES: dict[str, Callable[[], Row]] = {
    f"{name} {ranks}": partial(trained, name, ranks) for name in NAMES for ranks in MICROBATCHES
}


if __name__ == "__main__":
    raise SystemExit(main("gloo", CASES, COLUMNS))
