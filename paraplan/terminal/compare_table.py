"""Memory strategies, and planners, side by side, on a terminal and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from paraplan.ir.plan_words import plan_words
from paraplan.report.units import show_bytes, show_seconds


def compare_table(found: Any) -> Group:
    """A row per strategy, a column per budget: how much longer the step is, and what is proved of that."""
    budgets = list(dict.fromkeys(row.budget_bytes for row in found.rows))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("strategy", no_wrap=True)
    for budget in budgets:
        share = (budget - found.base_bytes) / (found.peak_bytes - found.base_bytes)
        table.add_column(f"{show_bytes(budget)} ({100 * share:.0f} %)", justify="right")
    table.add_column("seconds", justify="right")
    for name in dict.fromkeys(row.strategy for row in found.rows):
        rows = [row for row in found.rows if row.strategy == name]
        table.add_row(name, *(_cell(found, row) for row in rows), f"{sum(row.solve_s for row in rows):.1f}")
    head = (
        f"{found.num_ops} ops, {show_seconds(found.step_s)} a step; {show_bytes(found.peak_bytes)} at the peak without "
        f"recomputation, {show_bytes(found.base_bytes)} of it always there (shares are of the rest)"
    )
    ours = [row for row in found.rows if row.strategy == "paraplan" and row.why]
    foot = (
        "Longer steps in percent; in brackets what is proved to be the least. > takes more memory than the budget; "
        "– nothing found, ∅ proved impossible, n/a does not apply."
    )
    told = [Text(f"{show_bytes(row.budget_bytes)} {row.why}", style="yellow") for row in ours]
    return Group(Text(head), table, Text(foot, style="dim"), *told)


def _cell(found: Any, row: Any) -> str:
    if row.answer is None:
        return {"INFEASIBLE": "∅", "NONE_FOUND": "–"}.get(row.outcome.name, "n/a")
    over = ">" if row.answer.evaluation.peak_bytes > row.budget_bytes else ""
    bound = row.answer.bound_s
    proved = "" if bound is None else f" [{100 * (bound / found.step_s - 1):.1f}]"
    return f"{over}{100 * (row.answer.evaluation.step_s / found.step_s - 1):.1f}{proved}"


def compare_json(found: Any) -> dict[str, Any]:
    """Everything compared, as the JSON object of `--json`."""
    rows = []
    for row in found.rows:
        told = {"strategy": row.strategy, "budget_bytes": row.budget_bytes, "solve_s": row.solve_s, "why": row.why}
        if row.answer is not None:
            cost = row.answer.evaluation
            told |= {
                "step_s": cost.step_s,
                "bound_s": row.answer.bound_s,
                "peak_bytes": cost.peak_bytes,
                "recomputed_s": cost.recomputed_s,
                "moved_bytes": cost.moved_bytes,
                "waited_s": cost.waited_s,
                "status": row.answer.status.value,
                "notes": list(row.answer.notes),
            }
        rows.append(told)
    return {
        "num_ops": found.num_ops,
        "step_s": found.step_s,
        "peak_bytes": found.peak_bytes,
        "base_bytes": found.base_bytes,
        "rows": rows,
    }


def plans_table(found: Any) -> Group:
    """A row per planner: what its plan takes, how much longer that is than ours, and the plan in a few words."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("strategy", no_wrap=True)
    for name in ("step", "to the fastest", "MFU", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("plan")
    table.add_column("seconds", justify="right")
    least_s = min((row.plan.prediction.step_s for row in found if row.plan is not None), default=0.0)
    for row in found:
        seconds = f"{row.solve_s:.1f}"
        if row.plan is None:
            table.add_row(row.strategy, "–", "", "", "", Text(row.why, style="yellow"), seconds)
            continue
        told = row.plan.prediction
        table.add_row(
            row.strategy,
            show_seconds(told.step_s),
            f"+{100 * (told.step_s / least_s - 1):.1f} %",
            f"{100 * told.mfu:.1f} %" if told.mfu else "",
            show_bytes(max(told.peak_bytes)),
            plan_words(row.plan),
            seconds,
        )
    return Group(table, Text("Every plan runs: paraplan plan --strategy NAME. – nothing fits.", style="dim"))


def plans_json(found: Any) -> dict[str, Any]:
    """The same as the JSON object of `--json`."""
    rows = []
    for row in found:
        told = {"strategy": row.strategy, "solve_s": row.solve_s, "why": row.why}
        if row.plan is not None:
            prediction = row.plan.prediction
            told |= {
                "step_s": prediction.step_s,
                "mfu": prediction.mfu,
                "peak_bytes": max(prediction.peak_bytes),
                "plan": plan_words(row.plan),
                "notes": list(row.plan.notes),
            }
        rows.append(told)
    return {"rows": rows}
