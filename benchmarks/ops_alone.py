"""What the model says of the ops that an H200 was measured by, beside what it took: kinds of kernels that cost alike.

    python -m benchmarks.ops_alone [--only PATTERN] [--json FILE] [--resume]

The 1,151 ops of `python -m benchmarks.gpu --only "^ops"` (no GPU needed: they are made anew and priced). Of each kind
`then_ms` is their sum on the prices they were held against at first (all bytes streamed, Hopper's power at 1,108 W),
`now_ms` on today's, `told` their quotient, and `measured` the quotient that the H200 gave, as docs/benchmarks/gpu.md
has it (least and largest where it has a range).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from benchmarks.gpu.ops import chosen, programs
from benchmarks.table import Row, main
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.ops.access_patterns import COLUMNS, SCATTER, STREAM, WIDEN
from paraplan.cost_models.ops.roofline import OpWork, op_time_s, work_of

THEN_WATTS, LIMIT_WATTS = 1108.0, 700.0


class Kind(NamedTuple):
    """Kernels that cost alike.

    Attributes:
        holds: whether an op is one of them, by its target and work.
        measured: least and largest quotient of measured over modelled time.
    """

    holds: Callable[[str, OpWork], bool]
    measured: tuple[float, float]


def _named(*prefixes: str) -> Callable[[str, OpWork], bool]:
    return lambda target, work: target.startswith(prefixes)


def _is_norm_grad(target: str, work: OpWork) -> bool:
    return work.column_bytes > 0


def _half(target: str) -> Callable[[str, OpWork], bool]:
    return lambda named, work: named == target and work.dtype == "bfloat16"


KINDS: dict[str, Kind] = {
    "products, forward": Kind(_half("paraplan.linear"), (0.96, 0.96)),
    "products, for the input": Kind(_half("paraplan.linear_grad_input"), (0.86, 0.86)),
    "products, for the weight": Kind(_half("paraplan.linear_grad_weight"), (0.91, 0.91)),
    "cross-entropy": Kind(_named("paraplan.ce_"), (1.02, 1.02)),
    "writes into stored copies": Kind(_named("paraplan.write_many"), (1.27, 1.27)),
    "casts to float32": Kind(lambda target, work: work.pattern == WIDEN, (1.9, 1.9)),
    "sums over rows": Kind(lambda target, work: work.pattern == COLUMNS, (2.5, 2.5)),
    "norms' backward": Kind(_is_norm_grad, (2.2, 2.6)),
    "embeddings' gradients": Kind(lambda target, work: work.pattern == SCATTER, (2.3, 2.3)),
}


def kinds_of_ops() -> list[Row]:
    """A row per kind."""
    cluster = parse_cluster("1xH200")
    device = cluster.groups[0].device
    then = msgspec.structs.replace(device, power_share=LIMIT_WATTS / THEN_WATTS)
    works = [
        (op.target, work_of(op.target, op.flag, op.inputs, op.outputs))
        for make in programs().values()
        for op in chosen(make(False), cluster, small=False)
    ]
    rows: list[Row] = []
    for name, kind in KINDS.items():
        held = [work for target, work in works if kind.holds(target, work)]
        streamed = [msgspec.structs.replace(work, pattern=STREAM, column_bytes=0) for work in held]
        then_s = sum(op_time_s(work, then) for work in streamed)
        now_s = sum(op_time_s(work, device) for work in held)
        least, most = kind.measured
        rows.append(
            {
                "case": name,
                "ops": len(held),
                "then_ms": 1e3 * then_s,
                "now_ms": 1e3 * now_s,
                "told": now_s / then_s,
                "measured": f"{least:g}" if least == most else f"{least:g} to {most:g}",
            }
        )
    return rows


if __name__ == "__main__":
    raise SystemExit(main("ops alone", {"ops": kinds_of_ops}, ("case", "ops", "then_ms", "now_ms", "told", "measured")))
