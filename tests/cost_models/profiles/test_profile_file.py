"""Profile files: what goes in comes out; what is damaged, locked, hostile or another machine's is refused."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from msgspec.structs import replace

from paraplan.cost_models.profiles.profile_file import ProfileWriter, choose_profile, read_profiles
from paraplan.ir.errors import ProfileError
from paraplan.ir.profile import CollectiveTime, Measured, OpTime, Profile

HERE = Profile(device="cpu", name="a processor", torch="2.13.0")
OP = OpTime(
    target="aten.mul.Tensor",
    flag=0,
    inputs=(Measured("float32", (4, 8), (1, 4)), Measured("float32", ())),
    outputs=(Measured("float32", (4, 8)), None),
    detail='[["%"],{}]',
    seconds=1e-5,
    spread=0.1,
    samples=7,
    workspace_bytes=64,
)
SUM = CollectiveTime(
    target="all_reduce", size=4, local_size=2, input_bytes=1 << 20, seconds=2e-3, samples=9, called_s=5e-4
)


def written(path: Path, *found: OpTime | CollectiveTime, machine: Profile = HERE) -> Path:
    with ProfileWriter(path, machine) as writer:
        for each in found:
            writer.add(each)
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "p.db", OP, SUM)
    assert read_profiles(path) == (replace(HERE, source="p.db", ops=(OP,), collectives=(SUM,)),)


def test_a_second_measurement_replaces_the_first_and_other_strides_do_not(tmp_path: Path) -> None:
    again = replace(OP, seconds=3e-5)
    other = replace(OP, inputs=(Measured("float32", (4, 8)), OP.inputs[1]))
    (found,) = read_profiles(written(tmp_path / "p.db", OP, other, again))
    assert sorted(op.seconds for op in found.ops) == [1e-5, 3e-5]


def test_what_was_measured_is_kept_when_measuring_is_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "p.db"
    with pytest.raises(KeyboardInterrupt), ProfileWriter(path, HERE) as writer:
        writer.add(OP)
        writer.cover("mul")
        raise KeyboardInterrupt
    with ProfileWriter(path, HERE) as writer:
        assert writer.profile().ops == (OP,)
        assert writer.covered() == {"mul"}
    with ProfileWriter(path, replace(HERE, torch="2.14.0")) as writer:
        assert writer.profile().ops == ()
        assert not writer.covered()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("CREATE VIEW v AS SELECT 1", "v is not as a profile has it"),
        ("CREATE TRIGGER t AFTER INSERT ON op BEGIN DELETE FROM op; END", "t is not as a profile has it"),
        ("ALTER TABLE op ADD COLUMN more TEXT", "op is not as a profile has it"),
        ("DROP TABLE collective", "collective is not as a profile has it"),
        ("PRAGMA user_version = 9", "version 9; this paraplan reads up to"),
        ("UPDATE op SET seconds = -1", "-1.0 s .* is no measurement"),
        ("UPDATE op SET seconds = 9e999", "inf s .* is no measurement"),
        ("UPDATE op SET seconds = 'soon'", "no measurement: .*float"),
        ("UPDATE op SET inputs = '[[1,2]]'", "no measurement"),
        ("UPDATE op SET inputs = '[[\"float31\",[2]]]'", "unknown dtype"),
        ("UPDATE op SET inputs = '[[\"float32\",[-2]]]'", "negative size"),
        ("UPDATE op SET inputs = '[[\"float32\",[2],[1,1]]]'", "another number of strides"),
        ("UPDATE op SET inputs = 'import os'", "no measurement"),
        ("UPDATE collective SET local_size = 9", "9 of them in a node"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, damage: str, said: str) -> None:
    path = written(tmp_path / "p.db", OP, SUM)
    database = sqlite3.connect(path)
    database.execute(damage)
    database.commit()
    database.close()
    with pytest.raises(ProfileError, match=said):
        read_profiles(path)


def test_a_damaged_or_missing_or_locked_file_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.db").write_text("not a database, but long enough to have a header" * 40)
    with pytest.raises(ProfileError, match="no profile file, or a damaged one"):
        read_profiles(tmp_path / "text.db")
    with pytest.raises(ProfileError, match="damaged"):
        ProfileWriter(tmp_path / "text.db", HERE)
    whole = written(tmp_path / "p.db", *(replace(OP, flag=flag) for flag in range(400))).read_bytes()
    (tmp_path / "half.db").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ProfileError, match="damaged"):
        read_profiles(tmp_path / "half.db")
    with pytest.raises(ProfileError, match=r"no profile file .*paraplan profile MODEL -o"):
        read_profiles(tmp_path / "none.db")
    monkeypatch.setattr("paraplan.cost_models.profiles.profile_file._LOCK_WAIT_S", 0.01)
    holder = sqlite3.connect(tmp_path / "p.db")
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(ProfileError, match="is locked: another process writes it"):
        read_profiles(tmp_path / "p.db")
    with pytest.raises(ProfileError, match="is locked"), ProfileWriter(tmp_path / "p.db", HERE) as writer:
        writer.add(OP)
    holder.close()


def test_another_machine_s_times_are_taken_only_when_asked_for() -> None:
    gpu = Profile(device="H100", name="NVIDIA H100 80GB HBM3", torch="2.12.0", source="p.db")
    both = (replace(HERE, source="p.db"), gpu)
    assert choose_profile(both, "cpu", "a processor", "2.13.0") == (both[0], "")
    for device, name, torch in (("H200", None, "2.12.0"), ("H100", None, "2.13.0"), ("cpu", "another", "2.13.0")):
        with pytest.raises(ProfileError, match=r"p\.db has no times of .*--profile-any"):
            choose_profile(both, device, name, torch)
    found, said = choose_profile(both, "H100", None, "2.13.0", any_machine=True)
    assert found == gpu
    assert said == "times are those of another machine or version: H100 (NVIDIA H100 80GB HBM3), torch 2.12.0"
    found, said = choose_profile(both[1:], "A100-80", None, "2.12.0", any_machine=True)
    assert found.device == "A100-80"
    assert "H100" in said
    with pytest.raises(ProfileError, match="holds no machine's times"):
        choose_profile((), "cpu", None, "2.13.0", any_machine=True)


def test_what_few_ops_of_more_processes_lack_is_taken_from_the_rest(tmp_path: Path) -> None:
    """A recorded run of two ranks saw one op: all others are still measured, at how that one compares."""
    first, second, third = (replace(OP, target=f"aten.{name}.default") for name in ("exp", "sin", "tanh"))
    written(tmp_path / "p.db", first, second, third)
    two, other = replace(HERE, processes=2), replace(HERE, name="another processor", processes=2)
    written(tmp_path / "p.db", replace(first, seconds=3e-5), machine=two)
    written(tmp_path / "p.db", replace(OP, target="aten.neg.default"), SUM, machine=other)
    times = {op.target: op.seconds for op in _chosen(tmp_path, processes=2)}
    assert times == pytest.approx({"aten.exp.default": 3e-5, "aten.sin.default": 3e-5, "aten.tanh.default": 3e-5})
    times = {op.target: op.seconds for op in _chosen(tmp_path, processes=1)}
    assert times == dict.fromkeys(times, 1e-5) and len(times) == 3


def _chosen(folder: Path, processes: int) -> tuple[OpTime, ...]:
    profiles = read_profiles(folder / "p.db")
    return choose_profile(profiles, "cpu", "a processor", "2.13.0", processes=processes)[0].ops
