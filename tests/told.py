"""All that tells of a plan."""

from __future__ import annotations

import paraplan as pp
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.plan import Plan
from paraplan.report.html import html_page


def assert_told(data: Plan, programs: tuple[RankProgram, ...]) -> None:
    """Words, page, memory and timeline of a plan are made, whatever strategies it names."""
    plan = pp.Plan(data, programs)
    told = plan.explain()
    assert told.kinds and str(plan) and html_page(told) and plan.memory() and plan.trace()
