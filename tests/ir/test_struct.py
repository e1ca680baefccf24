"""Files are data: what would drive a terminal is refused."""

from __future__ import annotations

import msgspec
import pytest

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.plan import ModelRef
from paraplan.ir.struct import from_json, to_json


@pytest.mark.parametrize("text", ["\x1b[2J", "a\x9b31m", "\x9d0;title"])
@pytest.mark.parametrize("escaped", [True, False])
def test_text_that_would_drive_a_terminal_is_refused(text: str, escaped: bool) -> None:
    for model in (ModelRef(display=text), ModelRef(display="x", hf_settings={"a": [{text: 1}]})):
        data = to_json(model)
        if escaped:
            data = "".join(c if ord(c) < 0x80 else f"\\u{ord(c):04x}" for c in data.decode()).encode()
        with pytest.raises(InvalidPlanError, match="file: text that would drive a terminal"):
            from_json(data, ModelRef, "file", InvalidPlanError)


@pytest.mark.parametrize("text", ["a\tb\nc", "\\u001b[31m", "é – 漢", "\x7f\b"])
def test_other_text_is_read(text: str) -> None:
    model = ModelRef(display=text, hf_settings={text: text})
    assert from_json(to_json(model), ModelRef, "file", InvalidPlanError) == model
    assert msgspec.json.decode(to_json(model))["display"] == text
