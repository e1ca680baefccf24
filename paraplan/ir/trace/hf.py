"""Makes Hugging Face's mask code take, while exporting, the path it takes in eager mode.

Under export transformers always builds a [b, 1, s, s] mask, since an exported file could be given any input. Our
program is for one batch signature, so what eager does is right: no mask where the caller gives none. Checked on
transformers 5.23; every patch is guarded, so other versions only lose the shortcut.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager


def _never(*args: object, **kwargs: object) -> bool:
    return False


def _nothing(*args: object, **kwargs: object) -> None:
    return None


@contextmanager
def eager_masks(batch_names: Collection[str]) -> Iterator[None]:
    """Patches `transformers.masking_utils` for the length of an export; does nothing where it is not loaded.

    Args:
        batch_names: inputs the caller gives; packed sequences are only looked for where position_ids are given.
    """
    masking = sys.modules.get("transformers.masking_utils")
    patches: dict[str, object] = {"is_torchdynamo_exporting": _never}
    if "position_ids" not in batch_names:
        patches["find_packed_sequence_indices"] = _nothing
    saved = {name: getattr(masking, name) for name in patches if hasattr(masking, name)}
    try:
        for name in saved:
            setattr(masking, name, patches[name])
        yield
    finally:
        for name, original in saved.items():
            setattr(masking, name, original)
