"""Program + Plan -> the program of one rank, per class of equal ranks."""

from paraplan.ir.lower.program import lower

__all__ = ["lower"]
