"""Copies to the host and to disk: values, the account, order beside the program, and failures."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from paraplan.codegen import build_modules
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.cost_models.simulator.simulate import simulate_rank
from paraplan.ir.errors import RuntimeFailure
from paraplan.ir.execution.name import Role
from paraplan.ir.execution.rank_program import (
    Block,
    BlockRole,
    Instr,
    InstrKind,
    LocalValue,
    OuterValue,
    RankProgram,
    Step,
    StepKind,
)
from paraplan.ir.machine.mesh import make_mesh
from paraplan.runtime.executing.executor import Executor
from paraplan.runtime.executing.stepping import step_together
from paraplan.runtime.transport.folders import TensorFolder, sweep
from paraplan.runtime.transport.tier_copies import Copier
from paraplan.runtime.transport.transport import InProcessTransport
from tests.cost_models.rank_programs import toy_costs
from tests.named import all_named

Dims = tuple[int, ...]
X, H, Y, Z = all_named("x@0 h@0 y@0 z@0")


def value(base: str, strides: Dims, tier: str = "", owns: bool = True) -> LocalValue:
    return LocalValue(
        dtype="float64", shape=(4, 6), strides=strides, base=base, storage_bytes=192 if owns else 0, tier=tier
    )


def copy(target: str, source: str, out: str, tier: str) -> Instr:
    return Instr(kind=InstrKind.COPY, target=target, args=(f"%{source}", f":{tier}"), outs=(out,))


def wait(issued: str, held: str, out: str) -> Instr:
    return Instr(kind=InstrKind.WAIT, target="wait", args=(f"%{issued}", f"%{held}"), outs=(out,), frees=(issued, held))


def there_and_back(tier: str, strides: Dims = (6, 1)) -> RankProgram:
    """x + x and x · x, x being on a tier between; the copy back is waited for in another block."""
    out = Block(
        name="k.0.F",
        role=BlockRole.FORWARD,
        inputs=("x",),
        outputs=("y",),
        saved=("h'",),
        values={
            "x": value("x", strides),
            "y": value("y", strides),
            "h": value("h", strides, tier),
            "h'": value("h", strides, tier, owns=False),
        },
        instrs=(copy("offload", "x", "h", tier), op("aten.add.Tensor", "x", "y"), wait("h", "x", "h'")),
    )
    ahead = Block(
        name="k.1.P",
        role=BlockRole.PREFETCH,
        inputs=("h",),
        outputs=("p",),
        saved=(),
        values={"h": value("h", strides, tier), "p": value("p", strides)},
        instrs=(copy("prefetch", "h", "p", tier),),
    )
    back = Block(
        name="k.0.B",
        role=BlockRole.BACKWARD,
        inputs=("p", "h"),
        outputs=("z",),
        saved=(),
        values={
            "h": value("h", strides, tier),
            "p": value("p", strides),
            "x": value("p", strides, owns=False),
            "z": value("z", strides),
        },
        instrs=(wait("p", "h", "x"), op("aten.mul.Tensor", "x", "z", frees="x")),
    )

    def call(block: Block, args: str, outs: str, drops: str = "") -> Step:
        return Step(
            kind=StepKind.CALL,
            action="0F0",
            block=block.name,
            args=all_named(args),
            outs=all_named(outs),
            drops=all_named(drops),
            microbatch=0,
            segment=0,
        )

    return RankProgram(
        mesh_axes=("dp",),
        mesh_shape=(1,),
        num_microbatches=1,
        blocks={b.name: b for b in (out, ahead, back)},
        outer={X: OuterValue(role=Role.BATCH, source="x", dtype="float64", shape=(4, 6), layout="R", nbytes=192)},
        steps=(call(out, "x@0", "y@0 h@0", "x@0"), call(ahead, "h@0", "p@0"), call(back, "p@0 h@0", "z@0", "p@0 h@0")),
        loss=Z,
        grads={},
        optimizer_bytes=0,
        update_workspace_bytes=0,
    )


def op(target: str, source: str, out: str, frees: str = "") -> Instr:
    return Instr(target=target, args=(f"%{source}", f"%{source}"), outs=(out,), frees=tuple(frees.split()))


def x_of(strides: Dims) -> torch.Tensor:
    x = torch.empty_strided((4, 6), strides, dtype=torch.float64)
    return x.copy_(torch.arange(24.0).reshape(4, 6))


def executor_of(program: RankProgram, copier: Copier) -> tuple[Executor, InProcessTransport]:
    transport = InProcessTransport(make_mesh((1,), ("dp",)))
    return Executor(program, build_modules(program), (0,), transport.port(0), copier=copier), transport


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("strides", [(6, 1), (1, 4)])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_values_return_and_the_account_is_the_predicted_one(
    tier: str, strides: Dims, beside: bool, tmp_path: Path
) -> None:
    program = there_and_back(tier, strides)
    executor, transport = executor_of(program, Copier(beside=beside, folder=tmp_path))
    for _ in range(3):  # a file and a stream are used again and again
        executor.outer.clear()
        executor.bind({X: x_of(strides)})
        executor.account.ledger.register(executor.outer[X])
        executor.account.ledger.reset_peak()
        executor.account.entries.clear()
        step_together(transport, [executor], [program.steps])
        assert torch.equal(executor.outer[Z], x_of(strides) ** 2)
        assert torch.equal(executor.outer[Y], x_of(strides) * 2)
        assert [entry.key for entry in executor.account.entries] == [entry.key for entry in entries(program)]
        trace = simulate_rank(program, toy_costs(1))
        assert executor.account.ledger.tier_peak_bytes == trace.tier_peak_bytes == {tier: 192}
        assert executor.copier.files == []
        executor.outer.clear()
        executor.bind({X: x_of(strides)})
        executor.run(program.steps)
        assert torch.equal(executor.outer[Z], x_of(strides) ** 2)


def test_copies_run_beside_the_program_at_their_pace() -> None:
    copier = Copier(beside=True, pace=lambda tier, nbytes: 0.3)
    x = torch.ones(8)
    started = time.perf_counter()
    issued = [copier.offload(x, "host") for _ in range(3)]
    assert copier.under_way == 3, "issuing does not wait"
    for away in issued:
        copier.wait(away)
    assert time.perf_counter() - started >= 0.9, "copies of a stream run one after another"
    out, back = copier.offload(x, "host"), copier.prefetch(issued[0], "host")
    assert copier.under_way == 2
    copier.wait(back)
    assert torch.equal(back, x)
    copier.wait(out)
    assert copier.under_way == 0


def test_a_file_goes_with_its_value_and_the_folder_with_its_copier(tmp_path: Path) -> None:
    copier = Copier(folder=tmp_path / "new")
    first, second = (copier.wait(copier.offload(torch.ones(3), "disk")) for _ in range(2))
    assert len(copier.files) == 2 and all(file.stat().st_size == 12 for file in copier.files)
    del first
    assert len(copier.files) == 1
    del copier, second
    gc.collect()
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_one_element_of_any_stride_goes_to_disk_and_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    """torch calls it contiguous, and views bytes of stride 1 alone."""
    copier = Copier(folder=tmp_path)
    x = torch.arange(6, dtype=torch.float32).to(dtype).view(2, 3)[:1, 1:2].as_strided((1,), (3,))
    away = copier.wait(copier.offload(x, "disk"))
    back = copier.wait(copier.prefetch(away, "disk"))
    assert torch.equal(back, x)


def test_the_folder_goes_with_its_last_file_and_comes_with_the_next(tmp_path: Path) -> None:
    copier = Copier(folder=tmp_path)
    for _ in range(2):
        there = copier.wait(copier.offload(torch.ones(3), "disk"))
        (folder,) = tmp_path.iterdir()
        assert list(folder.iterdir()) == copier.files != []
        del there
        gc.collect()
        assert list(tmp_path.iterdir()) == copier.files == [], "a process may end without a word"


HOLDER = """
import sys
import tempfile
from paraplan.runtime.transport.folders import TensorFolder
folder = TensorFolder(sys.argv[1], 3)
folder.path().write_bytes(b"left")
print("made", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_rank_left_is_swept_and_what_a_live_one_has_is_not(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "made\n"
        (theirs,) = tmp_path.glob("paraplan-rank3-*")
        sweep(tmp_path)
        assert theirs.is_dir(), "it is held"
        holder.kill()
    assert theirs.is_dir(), "nothing of its own cleans up"
    (tmp_path / "paraplan-rank0-mine").write_text("a file is not of ours")
    TensorFolder(tmp_path, 0).path()
    assert not theirs.exists()
    assert [each.name for each in tmp_path.iterdir()] == ["paraplan-rank0-mine"]


@pytest.mark.parametrize("beside", [False, True])
def test_a_full_disk_fails_the_step_and_leaves_nothing(beside: bool, tmp_path: Path) -> None:
    program = there_and_back("disk")
    executor, _ = executor_of(program, Copier(beside=beside, folder=tmp_path))
    executor.bind({X: x_of((6, 1))})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # a file of 192 bytes does not fit
    try:
        with pytest.raises(RuntimeFailure, match=r"offload of 192 bytes to disk failed: OSError.*free space"):
            executor.run(program.steps)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not any(tmp_path.rglob("*"))
    assert H not in executor.outer
    executor.bind({X: x_of((6, 1))})
    executor.run(program.steps)
    assert torch.equal(executor.outer[Z], x_of((6, 1)) ** 2), "the next step has room"


def test_a_folder_that_another_rank_sweeps_before_it_is_held_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, swept = tempfile.mkdtemp, []

    def make_and_sweep(**how: Any) -> str:
        made = make(**how)
        if not swept:
            sweep(tmp_path)
            swept.append(made)
        return made

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_sweep)
    folder = TensorFolder(tmp_path, 0)
    path = folder.path()
    assert swept and not Path(swept[0]).exists()
    assert path.parent.exists() and str(path.parent) != swept[0]
    folder.clear()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeFailure, match=r"no folder for tensors on disk can be made in .*file"):
        Copier(folder=tmp_path / "file").offload(torch.ones(1), "disk")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_cuda_copies_are_ordered_by_events(tier: str, tmp_path: Path) -> None:
    copier = Copier("cuda", folder=tmp_path)
    wanted = []
    for index in range(20):
        x = torch.full((1 << 22,), float(index), device="cuda")
        away = copier.wait(copier.offload(x, tier))
        x.fill_(-1.0)  # after the wait, the source may be written again
        wanted.append(away)
    backs = [copier.prefetch(away, tier) for away in wanted]
    for index, back in enumerate(backs):
        assert bool((copier.wait(back) == index).all())
