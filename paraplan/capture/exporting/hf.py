"""Makes the mask code of Hugging Face and of `nn.Transformer` take, while exporting, a path that needs no values, and
Hugging Face's mixtures ours.

Under export transformers always builds a [b, 1, s, s] mask, since an exported file could be given any input. Our
program is for one batch signature, so what eager does is right: no mask where the caller gives none. `nn.Transformer`
looks whether the mask it is given is a causal one, to choose a kernel; it is a mask either way. Checked on transformers
5.23; every patch is guarded, so other versions only lose the shortcut.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from paraplan.capture.exporting.hf_experts import experts_forward


def _never(*args: object, **kwargs: object) -> bool:
    return False


def _nothing(*args: object, **kwargs: object) -> None:
    return None


def _causal_as_said(mask: object, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


def _experts(*args: object, **kwargs: object) -> object:
    return experts_forward


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
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in patches if hasattr(owner, name)]
    try:
        for owner, name, new in patches:
            if hasattr(owner, name):
                setattr(owner, name, new)
        yield
    finally:
        for owner, name, original in saved:
            setattr(owner, name, original)
