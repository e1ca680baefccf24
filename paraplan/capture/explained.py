"""What a forward's failure under an export means, in words of its user."""

from __future__ import annotations

from paraplan.capture.exporting.hf import old_mixture
from paraplan.capture.following.refusals import Refused
from paraplan.capture.precision import brought_by
from paraplan.capture.source_lines import DATA_DEPENDENT, depends_on_data, line_of_error
from paraplan.ir.errors import CaptureError

_KNOWN = {
    "failed to unpack the object at pos": (
        "a size is a tensor's value (packed sequences, repeats by count): pad to a fixed length and mask what lies "
        "beyond, as loss * (arange(length) < lengths[:, None])"
    ),
    "expected compiled_fn to be GraphModule": (
        "torch could not export a write: is a tensor that forward writes registered under two names? Register it once"
    ),
    "'Tensor' object has no attribute 'constant'": (
        "a transform of torch.func (grad, vmap) runs inside forward, which export does not follow: write it out"
    ),
    "invalid syntax (<eval_with_key>": "export cannot write down random_(low, high): draw with torch.randint",
    "as_strided() is non-compositional": (
        "fill_diagonal_ or a write to as_strided(...) of a view: write to a copy (x.clone()), or use torch.where"
    ),
    "is mutated in the forward method": (
        "forward writes a tensor that no buffer holds: register_buffer it, and write it under that name"
    ),
    "Couldn't swap": (
        "forward makes a module and moves or casts it (.to, .double()): make it in __init__, or, where forward makes "
        "it on its first run alone, run forward once on such a batch before"
    ),
    "nested_tensor": "nested tensors are no tensors of one shape: pad them and pass a mask",
}
"""Remedies by what torch says."""


def explain(fault: Exception, precision: str = "") -> CaptureError:
    """What a forward's failure on fake tensors means, with the user's line and the remedy.

    Args:
        fault: of the forward.
        precision: what it was captured for.
    """
    line = line_of_error(fault) or "somewhere in the forward"
    text = str(fault).strip().split("\n")[0].removesuffix(".")
    kind = type(fault).__name__
    if depends_on_data(fault):
        return CaptureError(f"{line}: {old_mixture(fault)}{DATA_DEPENDENT} ({kind})")
    known = next((remedy for said, remedy in _KNOWN.items() if said in str(fault)), "")
    if known:
        return CaptureError(f"{line}: {known} ({kind})")
    if isinstance(fault, Refused):
        return CaptureError(f"{line}: {fault}")
    return CaptureError(f"{line}: tracing the forward failed: {kind}: {text}{brought_by(precision, text)}")
