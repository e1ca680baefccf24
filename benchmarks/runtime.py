"""Step time against what people run today: torch's DDP and FSDP2 on the same processes, and plain eager on one rank.

A GPT-2-like and a Llama-like model, each compute-light (few parameters and tokens: what counts is overhead) and
communication-heavy (many parameters per token), float32 without dropout, AdamW (foreach) on both sides. Ranks are
single-threaded Gloo processes. Ours is the pinned plan of the same degrees: dp with zero=0 against DDP, dp with zero=3
against FSDP2 (every block wrapped), one rank against eager.

Both train in one process group, from the same weights on the same batches, a step of one after a step of the other,
in turns as to who is first; a step is forward, backward and update, timed until the slowest rank has ended it. `ratio`
is the quotient of the medians, ours over theirs; `ratio_min` and `ratio_max` are the quartiles of the paired
quotients; `cpu_ratio` compares rank 0's processor time, which a busy machine does not stretch. Losses are asserted
to agree after every step.

    python -m benchmarks.runtime [--only "gpt2 2"] [--json FILE]      ROUNDS=30 pairs of steps a case (environment)
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.runtime_rank import MODELS
from benchmarks.table import main
from paraplan.runtime.transport.launch import spawn_local

COLUMNS = (
    *("case", "ratio", "ratio_min", "ratio_max", "cpu_ratio", "ours_min_ms", "ours_ms", "ours_max_ms"),
    *("theirs_min_ms", "theirs_ms", "theirs_max_ms"),
)
AGAINST = {1: ("eager",), 2: ("ddp", "fsdp2"), 4: ("ddp", "fsdp2")}


def timed(model: str, ranks: int, against: str) -> dict[str, object]:
    """One case, on processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "row.json"
        rounds = os.environ.get("ROUNDS", "30")
        code = spawn_local(ranks, "benchmarks.runtime_rank", (model, against, rounds, str(found)))
        if code or not found.exists():
            raise RuntimeError(f"{model} on {ranks} ranks against {against} ended with code {code}")
        row: dict[str, object] = json.loads(found.read_text())
        return row


def cases() -> dict[str, Callable[[], dict[str, object]]]:
    """Every model, number of ranks and rival."""
    return {
        f"{model} {ranks} {against}": lambda a=(model, ranks, against): timed(*a)
        for ranks, rivals in AGAINST.items()
        for model in MODELS
        for against in rivals
    }


if __name__ == "__main__":
    raise SystemExit(main("runtime", cases(), COLUMNS))
