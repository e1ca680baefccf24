"""Makes the mask code of Hugging Face and of `nn.Transformer` take, while exporting, a path that needs no values, and
Hugging Face's mixtures ours.

Under export transformers always builds a [b, 1, s, s] mask, since an exported file could be given any input. Our
program is for one batch signature, so what eager does is right: no mask where the caller gives none. `nn.Transformer`
looks whether the mask it is given is a causal one, to choose a kernel; it is a mask either way. Checked on transformers
4.50, 4.57, 5.1, 5.5, 5.17 and 5.23; every patch is guarded, so other versions only lose the shortcut. Mixtures of
versions before 5.1 loop over what data choose, and are refused.
"""

from __future__ import annotations

import sys
import traceback
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import PurePath
from typing import Any

from torch import Tensor

from paraplan.capture.exporting.hf_experts import experts_forward


def _never(*args: object, **kwargs: object) -> bool:
    return False


def _nothing(*args: object, **kwargs: object) -> None:
    return None


def _causal_as_said(mask: object, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


def _experts(*args: object, **kwargs: object) -> object:
    return experts_forward


def old_mixture(fault: BaseException) -> str:
    """What to say of a mixture whose experts transformers chooses by data, before it has an interface for them.

    Args:
        fault: of the forward that could not be traced.
    """
    version = getattr(sys.modules.get("transformers"), "__version__", "")
    interface = getattr(sys.modules.get("transformers.integrations.moe"), "ExpertsInterface", None)
    if not version or hasattr(interface, "get_interface"):
        return ""
    for frame in traceback.extract_tb(fault.__traceback__):
        name = PurePath(frame.filename)
        if "transformers" in name.parts and any(x in f"{name.name} {frame.name} {frame.line}" for x in _MIXTURES):
            return f"mixtures of experts are captured of transformers 5.1 and later, and this is {version}; "
    return ""


_MIXTURES = ("expert", "moe")


def _broadcast_masks(masking: Any) -> Callable[..., Callable[..., Tensor]]:
    """In place of `_vmap_for_bhqkv` of transformers 4.53 to 4.57, which export cannot follow: masks that are functions
    of indices are computed for all indices at once, as later versions do."""

    vmapped = masking._vmap_for_bhqkv
    to_index = getattr(masking, "TransformGetItemToIndex", nullcontext)

    def expanded(mask: Callable[..., Tensor], bh_indices: bool = True) -> Callable[..., Tensor]:
        def mapped(*indices: Tensor) -> Tensor:
            with to_index():
                return vmapped(mask, bh_indices)(*indices)  # type: ignore[no-any-return]

        def whole(*indices: Tensor) -> Tensor:
            placed = [x.view([-1 if at == dim else 1 for at in range(4)]) for dim, x in enumerate(indices)]
            return mask(*placed).expand([len(x) for x in indices])

        return whole if bh_indices and _is_of_indices(mask) else mapped

    return expanded


def _is_of_indices(mask: object) -> bool:
    """Whether a mask is one of transformers' own, which compare and look up indices one by one, or is made of such."""
    if isinstance(mask, tuple):
        return all(map(_is_of_indices, mask))
    if not isinstance(mask, types.FunctionType):
        return not callable(mask)
    held = [cell.cell_contents for cell in mask.__closure__ or ()]
    return mask.__module__ == "transformers.masking_utils" and all(map(_is_of_indices, held))


@contextmanager
def eager_masks(batch_names: Collection[str]) -> Iterator[None]:
    """Patches masks and experts for the length of an export; does nothing where transformers is not loaded.

    Args:
        batch_names: inputs the caller gives; packed sequences are only looked for where position_ids are given.
    """
    masking = sys.modules.get("transformers.masking_utils")
    interface = getattr(sys.modules.get("transformers.integrations.moe"), "ExpertsInterface", None)
    layers = sys.modules.get("torch.nn.modules.transformer")
    patches: list[tuple[object, str, object]] = [
        (masking, "is_torchdynamo_exporting", _never),
        (layers, "_detect_is_causal_mask", _causal_as_said),
    ]
    if "position_ids" not in batch_names:
        patches.append((masking, "find_packed_sequence_indices", _nothing))
    patches.append((interface, "get_interface", _experts))
    if hasattr(masking, "_vmap_for_bhqkv"):
        patches.append((masking, "_vmap_for_bhqkv", _broadcast_masks(masking)))
        patches.append((masking, "TransformGetItemToIndex", nullcontext))  # of use to vmap alone
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in patches if hasattr(owner, name)]
    try:
        for owner, name, new in patches:
            if hasattr(owner, name):
                setattr(owner, name, new)
        yield
    finally:
        for owner, name, original in saved:
            setattr(owner, name, original)
