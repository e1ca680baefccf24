"""Models nobody wrote anything for: what a user brings, captured, planned, run in this process and held against eager.

Hugging Face types by their name with small settings and the standard inputs, and modules of plain PyTorch. For each,
on 2 and 4 ranks: the planner's own choice, pure tensor parallelism, ZeRO-3 and random plans (`PLANS`, 3 a number of
ranks), three steps of SGD with momentum in float64, dropout on on 4 ranks. Columns as in `benchmarks.fuzz`; `eager`
is the captured program against the user's model, both wholly in float64 (casts to float32 in the model lifted);
`pinned out` counts pins that a model has nothing for (no linear layer to split, samples that mix); `replicated` names
ops that run whole for want of a rule. A model that is not captured has the error under `failures`.

    python -m benchmarks.unseen [--only "swin|vae"] [--json FILE [--resume]]
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.fuzz import Seen, Subject, run_plan, subject
from benchmarks.table import Row, main
from benchmarks.zoo import UNSEEN
from paraplan.capture.precision import default_dtype
from paraplan.ir.errors import ConstraintError, InfeasibleError, ParaplanError
from paraplan.ir.plan import Plan
from paraplan.planner.constraints import Constraints
from paraplan.planner.sampling import random_plan
from paraplan.planner.search import search

PLANS = int(os.environ.get("PLANS", "3"))
RANKS, STEPS, SOLVE_S = (2, 4), 3, 4.0
COLUMNS = (
    *("case", "plans", "worst_loss", "worst_grad", "worst_param", "eager", "entries_equal", "peak_ratio_min"),
    *("peak_ratio_max", "pinned_out", "replicated", "failures"),
)


class Lifted(TorchDispatchMode):
    """Every dtype that an op is told, float32 as float64: what `precision="fp64"` makes of a model, for eager."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """The op, in float64."""

        def lift(value: object) -> object:
            return torch.float64 if value is torch.float32 else value

        return func(*map(lift, args), **{name: lift(value) for name, value in (kwargs or {}).items()})


def eager_error(of: Subject) -> float:
    """The user's model against the captured program, dropout off; of no meaning where the model draws by itself."""
    if any(kind.seeds for kind in of.program[0.0].kinds):
        return float("nan")
    with default_dtype(torch.float64), Lifted():
        return of.eager_error()


def replicated(of: Subject) -> str:
    """Ops that run whole, for no rule is known."""
    ops = [op for kind in of.program[0.0].kinds for op in kind.graph.ops]
    return " ".join(sorted({op.target for op in ops if op.rule is not None and op.rule.is_whole}))


def plans(of: Subject, ranks: int) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """What makes each plan, by name."""
    job = of.job(0.1 if ranks == RANKS[-1] else 0.0, ranks)
    pins = {"own": Constraints(), "tp": Constraints(tp=ranks), "zero3": Constraints(dp=ranks, zero=3)}
    for name, pinned in pins.items():
        yield f"{name} {ranks}", lambda pinned=pinned: search(job, pinned, SOLVE_S, certify=False).plan  # type: ignore[misc]
    for seed in range(PLANS):
        yield f"random {ranks}.{seed}", partial(random_plan, job, seed, 2)


def try_model(name: str) -> Row:
    """All plans of one model."""
    torch.set_num_threads(1)
    try:
        of = subject(name)
    except ParaplanError as fault:
        return {"plans": 0, "failures": [f"{type(fault).__name__}: {fault}"]}
    worst, count, equal, failures, out = Seen(), 0, 0, [], []
    for ranks in RANKS:
        dropout = 0.1 if ranks == RANKS[-1] else 0.0
        for which, make in plans(of, ranks):
            try:
                plan = make()
            except (ConstraintError, InfeasibleError) as fault:
                out.append(f"{which}: {fault}")
                continue
            except Exception as fault:  # noqa: BLE001  (a finding like any other; the other plans go on)
                failures.append(f"{which}: {type(fault).__name__}: {fault}")
                continue
            count += 1
            try:
                seen = run_plan(plan, of.small[dropout], of.reference(dropout), STEPS)
            except Exception as fault:  # noqa: BLE001
                failures.append(f"{which}: {type(fault).__name__}: {fault}")
                continue
            worst, equal = worst.widened(seen), equal + seen.equal
            failures += [f"{which}: {seen.fault()}"] if seen.fault() else []
    return {
        "plans": count,
        "worst_loss": worst.loss,
        "worst_grad": worst.grad,
        "worst_param": worst.param,
        "eager": eager_error(of),
        "entries_equal": f"{equal}/{count}",
        "peak_ratio_min": worst.least_ratio,
        "peak_ratio_max": worst.most_ratio,
        "pinned_out": out,
        "replicated": replicated(of),
        "failures": failures,
    }


CASES: dict[str, Callable[[], Row]] = {name: partial(try_model, name) for name in UNSEEN}


if __name__ == "__main__":
    raise SystemExit(main("unseen", CASES, COLUMNS))
