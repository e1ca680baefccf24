"""Capture of models into programs. The only folder of `ir` that imports torch."""

from paraplan.ir.trace.capture import capture
from paraplan.ir.trace.fingerprint import fingerprint
from paraplan.ir.trace.reference import run_program

__all__ = ["capture", "fingerprint", "run_program"]
