"""Keys of a program's settings are read as they are written."""

from __future__ import annotations

import pytest

from paraplan.capture.python_state.setting_keys import SettingKey, SettingKind, setting_key


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("layers.*:attention.heads", SettingKey(SettingKind.ATTRIBUTE, "layers.*", "attention.heads")),
        (":scale", SettingKey(SettingKind.ATTRIBUTE, "", "scale")),
        ("loss_head:scale", SettingKey(SettingKind.ATTRIBUTE, "loss_head", "scale")),
        ("loss:table['a:b']", SettingKey(SettingKind.ATTRIBUTE, "loss", "table['a:b']")),
        ("global train:CONFIG.tau", SettingKey(SettingKind.GLOBAL, "train", "CONFIG.tau")),
        ("argument causal", SettingKey(SettingKind.ARGUMENT, name="causal")),
        ("loss", SettingKey(SettingKind.LOSS)),
        ("loss_fn", SettingKey(SettingKind.LOSS_FN)),
    ],
)
def test_a_key_is_read_as_it_is_written(text: str, key: SettingKey) -> None:
    """Attributes of what a model calls `loss` are attributes."""
    assert setting_key(text) == key and str(key) == text
