"""Program + Plan -> the program of one rank, per class of equal ranks."""

from paraplan.ir.lower.evaluate import lower_evaluation
from paraplan.ir.lower.program import lower

__all__ = ["lower", "lower_evaluation"]
