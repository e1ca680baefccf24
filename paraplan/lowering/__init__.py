"""Program + Plan -> the program of one rank, per class of equal ranks.

Blocks of a kind, steps of a rank, transfers, verification. No torch; cost models, planners and the runtime come in,
by `lower`, `lower_alone` and `lower_evaluation`.
"""

from paraplan.lowering.evaluation import lower_evaluation
from paraplan.lowering.rank_classes import lower, lower_alone

__all__ = ["lower", "lower_alone", "lower_evaluation"]
