"""What only a CUDA device can tell: correctness, prediction and speed, in the order of what is likeliest to fail.

    python -m benchmarks.gpu [--only "^kernels "] [--json FILE [--resume]]       make gpu [PART=kernels]

kernels      every instruction of a model's step against its reference kernel in float64: values, strides, and what it
             allocates inside; random bits equal; and every kernel that attention may run as
inside       what instructions allocate and drop inside at full sizes, beside what is said
ranks        random plans of four ranks on the one device, in float32, against one device in float64
attention    one attention's step at 1k, 8k and 32k positions, with and without dropout
train        steps of models against eager PyTorch: losses, time, peak and reserved memory against what the plan says,
             and no wait of the host for the device
copies       tensors on host and disk, their copies held up and unwritten memory poisoned
memory       a user's loop within 100, 97 and 94 % of its peak, a limit that the allocator enforces
graphs       steps captured once and replayed
rest         fp16, fp8, torch.compile, states on the host, checkpoints
nccl         collectives of one rank, the device busy
host         time of the host for an instruction, beside eager's
speed        dropout, norm, loss and every kernel of attention beside torch's
ops          every op of large models' layers, and of their parts: measured beside modelled
profile      ops measured, a plan made of them, twenty of its steps

A case that fails is told, and the others go on; what is wrong is under `failures`, and what is right but slower or
larger than it should be under `misses` (time within 10 % of the predicted and at most eager's, peak 1.00 to 1.05).
Without a CUDA device every part runs small on the CPU, as a test of itself: times then say nothing.
"""

from __future__ import annotations

import sys
import traceback

from benchmarks.gpu import host, inside, ops, parity, tiers, training
from benchmarks.gpu.place import Place, described, here
from benchmarks.table import Case, Row, main

ORDER = (
    *(
        "kernels",
        "inside",
        "ranks",
        "attention",
        "train",
        "copies",
        "memory",
        "graphs",
        "rest",
        "nccl",
        "host",
        "speed",
    ),
    *("ops", "profile"),
)
COLUMNS = (
    *("case", "error", "ms", "device_ms", "host_ms", "predicted_ms", "time_ratio", "reference_ms", "peak_ratio"),
    *("reserved_ratio", "note", "misses", "failures"),
)
OFF, MOST_PEAK = 0.10, 1.05


def misses(row: Row) -> list[str]:
    """What is slower or larger than it should be."""
    found = []
    time_ratio, peak = row.get("time_ratio"), row.get("peak_ratio")
    if time_ratio is not None and abs(time_ratio - 1) > OFF:
        found.append(f"time {time_ratio:.2f} of the predicted")
    if peak is not None and not 1 / MOST_PEAK <= peak <= 1 + 1e-3:  # measured over predicted
        found.append(f"peak {peak:.3f} of the predicted")
    if row.get("reference_ms") and row["ms"] > row["reference_ms"]:
        found.append(f"{row['ms'] / row['reference_ms']:.2f} of eager's time")
    return found


def told(run: Case, place: Place) -> list[Row]:
    """A case's rows, whatever happens in it."""
    try:
        found = run()
        rows = found if isinstance(found, list) else [found]
    except Exception as fault:  # noqa: BLE001  (told; the other cases go on)
        traceback.print_exc(file=sys.stderr)
        rows = [{"failures": [f"{type(fault).__name__}: {str(fault)[:300]}"]}]
    place.forget()
    return [{**row, "misses": misses(row) if place.is_cuda else []} for row in rows]


def cases(place: Place) -> dict[str, Case]:
    """All, in order."""
    parts = {
        name: made
        for module in (parity, inside, training, tiers, host, ops)
        for name, made in module.cases(place).items()  # type: ignore[attr-defined]
    }
    assert sorted(parts) == sorted(ORDER), set(parts) ^ set(ORDER)
    return {f"{part} {name}": lambda run=run: told(run, place) for part in ORDER for name, run in parts[part].items()}  # type: ignore[misc]


if __name__ == "__main__":
    print(described()["note"], file=sys.stderr)
    raise SystemExit(main("gpu", {"where": described, **cases(here())}, COLUMNS))
