"""The benchmarks' command line: rows are there as soon as they are made, and a run goes on from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.table import Row, main


def rows(path: Path) -> list[Row]:
    found: list[Row] = json.loads(path.read_text())
    return found


def test_a_run_that_is_cut_off_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, made = tmp_path / "out" / "rows.json", []

    def case(name: str, fails: bool = False) -> Row:
        if fails:
            raise KeyboardInterrupt
        made.append(name)
        return {"ms": float("inf")}

    options = ["--json", str(path)]
    cases = {"a": lambda: case("a"), "b": lambda: case("b", fails=True), "c": lambda: case("c")}
    with pytest.raises(KeyboardInterrupt):
        main("fake", cases, ("case", "ms"), options)
    assert rows(path) == [{"case": "a", "ms": None}]
    assert main("fake", {**cases, "b": lambda: case("b")}, ("case", "ms"), [*options, "--resume"]) == 0
    assert [row["case"] for row in rows(path)] == ["a", "b", "c"] and made == ["a", "b", "c"]
    assert "a" in capsys.readouterr().out
    main("fake", {"c": lambda: case("c")}, ("case", "ms"), options)
    assert [row["case"] for row in rows(path)] == ["c"]  # without --resume the file is begun anew


def test_a_run_takes_a_share_of_the_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    cases = dict.fromkeys("abcdefg", dict)

    def ran(*options: str) -> list[str]:
        assert main("fake", cases, ("case",), ["--json", str(path), *options]) == 0
        return [row["case"] for row in rows(path)]

    assert ran("--part", "2/3") == ["b", "e"]
    assert ran("--limit", "2") == ["a", "b"] and ran("--limit", "2", "--resume") == ["a", "b", "c", "d"]
    path.unlink()
    assert main("fake", cases, ("case",), ["--json", str(path), "--minutes", "0"]) == 0 and not path.exists()
    with pytest.raises(SystemExit):
        main("fake", cases, ("case",), ["--part", "4/3"])
    assert "is no share" in capsys.readouterr().err


def test_failures_are_the_exit_code(tmp_path: Path) -> None:
    cases = {"a": lambda: {"failures": ["seed 3: grad 1e-3"]}, "b": lambda: {"failures": []}}
    assert main("fake", cases, ("case",), ["--only", "a"]) == 1
    assert main("fake", cases, ("case",), ["--only", "b"]) == 0


@pytest.mark.parametrize("text", ("{", "3", '[{"name": 1}]'))
def test_rows_that_are_none_are_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    assert main("fake", {"a": lambda: {}}, ("case",), ["--json", str(path), "--resume"]) == 2
    assert str(path) in capsys.readouterr().err and path.read_text() == text
    assert main("fake", {"a": lambda: {}}, ("case",), ["--resume"]) == 2
