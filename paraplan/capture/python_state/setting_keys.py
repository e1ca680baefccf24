"""Keys of a program's settings: what each says, in fields. The one place that reads their text.

"layers.*:attention.heads"   an attribute: modules, with numbers left out, and the path from there
"global train:CONFIG.tau"    a global of a module
"argument causal"            an argument of forward that is no tensor
"loss", "loss_fn"            which of several losses is trained on; the loss function
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class SettingKind(Enum):
    """What a setting is; the text begins its key."""

    ATTRIBUTE = ""
    GLOBAL = "global "
    ARGUMENT = "argument "
    LOSS = "loss"
    LOSS_FN = "loss_fn"


_ALONE = (SettingKind.LOSS, SettingKind.LOSS_FN)
LOSS, LOSS_FN = (kind.value for kind in _ALONE)


class SettingKey(NamedTuple):
    """A key, read; `str` writes it.

    Attributes:
        kind: what it is.
        owner: of an attribute its modules, of a global its module.
        name: of an attribute or a global the path from there; of an argument its name.
    """

    kind: SettingKind
    owner: str = ""
    name: str = ""

    def __str__(self) -> str:
        of = f"{self.owner}:" if self.kind in (SettingKind.ATTRIBUTE, SettingKind.GLOBAL) else ""
        return f"{self.kind.value}{of}{self.name}"


def setting_key(text: str) -> SettingKey:
    """A key of a program's settings."""
    for kind in _ALONE:
        if text == kind.value:
            return SettingKey(kind)
    if text.startswith(SettingKind.ARGUMENT.value):
        return SettingKey(SettingKind.ARGUMENT, name=text.removeprefix(SettingKind.ARGUMENT.value))
    kind = SettingKind.GLOBAL if text.startswith(SettingKind.GLOBAL.value) else SettingKind.ATTRIBUTE
    owner, _, name = text.removeprefix(kind.value).partition(":")
    return SettingKey(kind, owner, name)


def is_of_loss(name: str) -> bool:
    """Whether a function among a program's code belongs to the loss function."""
    return name.startswith(LOSS_FN)
