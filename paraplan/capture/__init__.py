"""Capture of models into programs: an unmodified `nn.Module` becomes segments of a few kinds.

Export, canonical ops, normal forms, cutting, joint graphs, discovery of rules. Imports torch; `api`, `fitting` and
`jobs` come in, and the runtime to what reads a model's own Python (`python_state/`).
"""

from paraplan.capture.capture import capture
from paraplan.capture.fingerprint import fingerprint
from paraplan.capture.reference import run_program

__all__ = ["capture", "fingerprint", "run_program"]
