"""The keywords of `Constraints`, for checkers of calls, which read no other definition of keywords."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict


class ConstraintKeywords(TypedDict, total=False):
    """The keywords of `Constraints` with the types that callers give, for checkers of calls."""

    mesh: Sequence[int] | None
    dp: int | None
    tp: int | None
    sp: bool
    cp: int | None
    cp_mode: str | None
    ep: int | None
    zero: int | None
    pp: int | Literal["auto"] | None
    schedule: str | None
    stages: Sequence[tuple[int, int]] | None
    microbatches: int | None
    memory: int | str | None
    reserve: int | str | None
    recompute: str | None
    offload: str
    place_states: str | None
    place_params: str | None
    place_grads: str | None
    update_on: str | None
    offload_states: str | None
    delayed_update: bool | int | None
    overlap: int | None
    compiled: bool
    reduce_dtype: str | None
    params: Mapping[str, str] | None
