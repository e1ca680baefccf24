"""Names of the outer namespace: what they print, and when two are one."""

from __future__ import annotations

import itertools

import pytest

from paraplan.ir.execution import names
from paraplan.ir.execution.name import Name, Role
from paraplan.ir.execution.names import LOSS, LOSS_SCALE
from paraplan.ir.model.program import Source, source_of

TEXTS = {
    "param:w": names.param("w"),
    "state:w": names.state("w"),
    "state:w^up": names.state("w").up,
    "state:w^host?": names.state("w").coming("host"),
    "slots:w^?": names.slots("w").coming(),
    "slots:w^!": names.slots("w").leaving(),
    "batch:x@1": names.batch("x", 1),
    "buffer:b": names.buffer("b"),
    "seed:3": names.seed(3),
    "seed:3@1": names.seed(3, 1),
    "loss_scale": LOSS_SCALE,
    "s3.0@1": names.value("s3.0", 1),
    "s3.0/host!@1": names.value("s3.0", 1).leaving("host"),
    "s3.0/host@1": names.value("s3.0", 1).on("host"),
    "s3.0/host?@1": names.value("s3.0", 1).coming("host"),
    "s3.0@1>2": names.value("s3.0", 1).packed(2),
    "s3.0@1>2>2#0": names.value("s3.0", 1).packed(2).part_for(2, 0),
    "s3.0@1#4": names.value("s3.0", 1).part(4),
    "d:s3.0@1": names.grad_of("s3.0", 1),
    "d:s3.0@1<0": names.grad_of("s3.0", 1).of_group(0),
    "d:s3.0@1+4.0": names.grad_of("s3.0", 1).addend(4, 0),
    "d:s3.0@1+": names.grad_of("s3.0", 1).addend(),
    "3/mul_1@0": names.saved(3, "mul_1", 0),
    "den0.count/mul_1@0": names.inside("den0.count", "mul_1", 0),
    "3/mul_1@0'2": names.saved(3, "mul_1", 0).again(2),
    "s3.0@1'1^host!": names.value("s3.0", 1).again(1).copied("host"),
    "s3.0@1^host'2": names.value("s3.0", 1).copied("host").on("host").again(2),
    "s3.0@1^host'2?'1": names.value("s3.0", 1).copied("host").on("host").again(2).coming("host").again(1),
    "3^mul_1@0": names.half(3, "mul_1", 0),
    "acc:w": names.accumulator("w"),
    "acc:w+2.5": names.accumulator("w").addend(2, 5),
    "acc:w+2.5^": names.accumulator("w").addend(2, 5).moved,
    "acc:w+2.5^float32^": names.accumulator("w").addend(2, 5).cast("float32").moved,
    "acc:w^host!": names.accumulator("w").leaving("host"),
    "grad:w<1": names.grad("w").of_group(1),
    "tied:w^host": names.tied("w").on("host"),
    "home:w^!": names.waiting("w").leaving(),
    "late:w": names.late("w"),
    "magnitude:w": names.magnitude("w"),
    "part:w<1.0@4": names.grouped("w", 1, 0, 4),
    "part:w<1.0@4^": names.grouped("w", 1, 0, 4).moved,
    "new:b<0": names.new_buffer("b").of_group(0),
    "sum:7": names.under_way(7),
    "whole:2/1@0F1": names.gathered(2, 1, "0F1"),
    "here:2/1@0F1": names.fetched(2, 1, "0F1"),
    "here:2/1@0F1?": names.fetched(2, 1, "0F1").coming(),
    "held:w": names.held("w"),
    "den0": names.denominator(0),
    "den0@1": names.denominator(0, 1),
    "total0": names.total(0),
    "tangent0": names.tangent(0),
    "num0": names.numerator(0),
    "whole:num0": names.numerator(0).moved,
    "loss": LOSS,
    "loss:a<1": names.loss("a").of_group(1),
    "output:y": names.output("y"),
    "output:y@2": names.output("y", 2),
}


@pytest.mark.parametrize("text", TEXTS)
def test_name_prints(text: str) -> None:
    assert str(TEXTS[text]) == text and type(str(TEXTS[text])) is str


def test_different_values_have_different_names() -> None:
    for one, other in itertools.combinations(TEXTS.values(), 2):
        assert one != other
    assert len({*TEXTS.values()}) == len(TEXTS)


def test_every_role_is_printed() -> None:
    assert {name.role for name in TEXTS.values()} == {*Role}


def test_equal_fields_make_one_name() -> None:
    assert names.value("batch:x", 1) == names.batch("x", 1)
    assert names.value("buffer:b", 1) == names.buffer("b")
    assert {names.grad("w"): 1}[Name(Role.GRADIENT, "w")] == 1


@pytest.mark.parametrize(
    ("value", "source"),
    [
        ("batch:x", (Source.BATCH, "x")),
        ("buffer:a:b", (Source.BUFFER, "a:b")),
        ("param:w", (Source.PARAMETER, "w")),
        ("s3.0", (Source.SEGMENT, "s3.0")),
        ("s:0", (Source.SEGMENT, "s:0")),
    ],
)
def test_source_of_value(value: str, source: tuple[Source, str]) -> None:
    assert source_of(value) == source
