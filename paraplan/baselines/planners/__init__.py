"""Other planners' choices by name, as answers in our types: what they decide is decided, the rest is planned as ever.

A named planner searches as its paper says, with the paper's own costs, over a profile of layers (`layer_profile`) in
place of measured ones. Its answers are plans of ours in all else, so they are priced by one simulator, run, and can be
set side by side. What a system decides that these types have no place for (stages replicated unequally, another
sharding for equal layers) is replaced by the best of its space that they can say; its entry of `registry.PLANNERS` says
so.
"""

from paraplan.baselines.planners.choosing import ComparedPlan, check_planner, compare_planners, plan_by
from paraplan.baselines.planners.registry import NAMES, OURS, PLANNERS

__all__ = ["NAMES", "OURS", "PLANNERS", "ComparedPlan", "check_planner", "compare_planners", "plan_by"]
