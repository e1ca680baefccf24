"""Strategies side by side on a model: of memory on one device, each at every budget; of whole plans on several."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from paraplan.api import Progress, as_cluster, captured_job
from paraplan.api import compile as compile_plan
from paraplan.baselines.compare import Comparison, compare
from paraplan.baselines.planners import ComparedPlan, check_planner, compare_planners
from paraplan.ir.errors import ConstraintError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.options import from_keywords
from paraplan.ir.sizes import parse_bytes
from paraplan.plan_options import JobOptions
from paraplan.planner.constraints import Constraints
from paraplan.planner.contradictions import check_time_limit

if TYPE_CHECKING:
    from torch import nn


def compare_memory(
    model: nn.Module,
    cluster: ClusterSpec | str,
    memory: Sequence[int | str],
    strategies: Sequence[str],
    *,
    strategy_time_s: float = 10.0,
    progress: Progress | None = None,
    **given: Any,
) -> Comparison:
    """What memory strategies make of a model on one device, side by side.

    Args:
        model, cluster: as for `compile`; a cluster of one device, whose memory does not count.
        memory: budgets: bytes, texts such as "12GiB", or shares such as "60%" of the peak without recomputation
            (of what it holds beside parameters and states).
        strategies: names among `baselines.compare.STRATEGIES`; "paraplan" is ours.
        strategy_time_s: seconds for each strategy at each budget.
        progress: told what is being done.
        given: as for `compile`.
    Raises:
        ConstraintError: the cluster has several devices, a budget is none, or a strategy is unknown.
        CaptureError: the model cannot be captured.
    """
    check_time_limit(strategy_time_s)
    spec = as_cluster(cluster)
    if spec.num_devices != 1:
        raise ConstraintError(
            f"{spec.name} has {spec.num_devices} devices; strategies are compared on one: local:1, 1xH100"
        )
    parsed = [_budget(text) for text in memory]
    group = spec.groups[0]
    roomy = msgspec.structs.replace(group, device=msgspec.structs.replace(group.device, memory_bytes=1 << 59))
    plan = compile_plan(
        model,
        msgspec.structs.replace(spec, groups=(roomy,)),
        recompute="none",
        microbatches=1,
        progress=progress,
        **given,
    )
    tell = progress or (lambda text: None)

    def budgets(*peak: int) -> list[int]:
        return [budget(*peak) for budget in parsed]

    return compare(plan.data, plan.programs[0], budgets, strategies, strategy_time_s, tell)


def compare_plans(
    model: nn.Module,
    cluster: ClusterSpec | str,
    strategies: Sequence[str],
    *,
    strategy_time_s: float = 60.0,
    progress: Progress | None = None,
    constraints: Constraints | None = None,
    **given: Any,
) -> list[ComparedPlan]:
    """What planners choose for a model on several devices, side by side; their plans run as ours do.

    Args:
        model, cluster: as for `compile`.
        strategies: names among `baselines.planners.NAMES`; "paraplan" is ours.
        strategy_time_s: seconds for each.
        progress: told what is being done.
        constraints: pinned for all.
        given: options of `JobOptions`, as for `compile`.
    Raises:
        ConstraintError: a strategy is unknown.
        CaptureError: the model cannot be captured.
    """
    check_time_limit(strategy_time_s)
    for name in strategies:
        check_planner(name)
    pins = constraints or Constraints()
    asked = from_keywords(JobOptions, {**given, "progress": progress})
    job, *_ = captured_job(model, as_cluster(cluster), asked, pins)
    return compare_planners(job, pins, strategies, strategy_time_s, progress or (lambda text: None))


def _budget(text: int | str) -> Callable[[int, int], int]:
    """A size; or what is always there, and a share of what else the peak holds."""
    share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", str(text).strip())
    if share is None:
        try:
            size = parse_bytes(text)
        except ConstraintError:
            raise ConstraintError(
                f"{text!r} is neither a size, such as 2GiB, nor a share of the peak, such as 60%; several are given "
                "one by one (--memory 60% --memory 40%)"
            ) from None
        return lambda peak, base: size
    return lambda peak, base: base + int((peak - base) * float(share[1]) / 100)
