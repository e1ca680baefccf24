"""Plans, what ranks execute, predictions and code are byte for byte what they were (`python -m tests.golden`)."""

from __future__ import annotations

import json

import pytest
import torch

from tests.golden.__main__ import KEPT
from tests.golden.cases import CASES, plan_of
from tests.golden.texts import digest, texts_of

torch.set_num_threads(1)


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="another torch is captured as other graphs")
@pytest.mark.parametrize("case", CASES)
def test_what_a_plan_becomes(case: str) -> None:
    assert {part: digest(text) for part, text in texts_of(plan_of(case)).items()} == json.loads(KEPT.read_text())[case]
