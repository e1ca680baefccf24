"""Program + Plan -> the program of one rank, per class of equal ranks."""

from paraplan.ir.lower.classes import lower
from paraplan.ir.lower.evaluate import lower_evaluation

__all__ = ["lower", "lower_evaluation"]
