"""Compiled blocks are used where they equal eager, and refused, with the reason, where they do not."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import paraplan as pp
from paraplan.codegen import EmitContext, build_block
from paraplan.ir.errors import CodegenError, ConstraintError
from paraplan.ir.execution.rank_program import Block, BlockRole, Instr
from paraplan.ir.machine.mesh import make_mesh
from paraplan.runtime.executing.compiled import CheckedBlock, _on_host, written_inputs
from paraplan.runtime.executing.torch_private import find_backend
from paraplan.runtime.transport.distributed import DistributedTransport
from paraplan.runtime.transport.launch import spawn_local
from tests.runtime.programs import op, own

WORKER = str(Path(__file__).with_name("compile_worker.py"))
AFFINE = (
    op("aten.mul.Tensor", ("%x", 2.0), ("y",), frees="x"),
    op("aten.add.Tensor", ("%y", 1.0), ("z",), frees="y"),
)


def checked(backend: Any, instrs: tuple[Instr, ...] = AFFINE, strict: bool = False) -> CheckedBlock:
    """2x + 1, compiled."""
    values = {name: own(name, (4,)) for name in ("x", "y", "z")}
    made = Block(
        name="k0.0.F", role=BlockRole.FORWARD, inputs=("x",), outputs=("z",), saved=(), values=values, instrs=instrs
    )
    transport = DistributedTransport(make_mesh((1,), ("dp",)))
    block = CheckedBlock(made, build_block(made, EmitContext(mesh_shape=(1,))), transport, backend, strict)
    assert block.compile(iter([[torch.empty(4, dtype=torch.float64)]])) == ""
    return block


def ones() -> list[Any]:
    return [torch.ones(4, dtype=torch.float64)]


def wrong(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """A compiler that adds one."""
    return lambda *args: tuple(result + 1 for result in module(*args))


def test_equal_code_is_used_and_not_run_before() -> None:
    calls: list[int] = []

    def counting(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        return lambda *args: calls.append(1) or module(*args)

    block = checked(counting)
    assert not calls
    for expected in (1, 2):
        boxed = ones()
        assert block(boxed)[0].tolist() == [3.0] * 4
        assert boxed == [] and len(calls) == expected
    assert block.chosen is not block.eager


def test_a_miscompiled_block_stays_eager() -> None:
    block = checked(wrong)
    with pytest.warns(UserWarning, match=r"block k0.0.F stays eager: result 0 differs by 3.3e-01"):
        assert block(ones())[0].tolist() == [3.0] * 4
    assert block.chosen is block.eager
    assert block(ones())[0].tolist() == [3.0] * 4
    with pytest.raises(CodegenError, match=r"block k0.0.F: result 0 differs"):
        checked(wrong, strict=True)(ones())


def test_any_number_of_blocks_is_compiled() -> None:
    blocks = [checked("eager") for _ in range(2 * torch._dynamo.config.recompile_limit)]
    for block in blocks:
        assert block(ones())[0].tolist() == [3.0] * 4
    assert [block.calls for block in blocks] == [1] * len(blocks)


def test_nothing_is_compiled_during_a_step() -> None:
    compiled: list[int] = []

    def counting(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append(1)
        return module.forward

    block = checked(counting)
    with pytest.warns(UserWarning, match="are not those it was compiled for"):
        assert block([torch.ones(2, dtype=torch.float64)])[0].tolist() == [3.0] * 2
    assert compiled == [1] and block.chosen is block.eager


def test_what_a_block_writes_into_its_inputs_is_written_once() -> None:
    grown = (op("paraplan.grow_", ("%x", "%x"), ()), op("aten.add.Tensor", ("%x", 1.0), ("z",), frees="x"))
    block, given = checked("eager", grown), ones()
    assert written_inputs(block.block) == {0} and not written_inputs(checked("eager").block)
    x = given[0]
    assert block(given)[0].tolist() == [3.0] * 4
    assert x.tolist() == [2.0] * 4 and not block.reason


def test_the_first_run_holds_no_more_than_others() -> None:
    """While the eager block runs, what the compiled one took and made is gone from the device."""
    alive: list[weakref.ref[Tensor]] = []

    def noting(module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        def run(*args: Tensor) -> Any:
            results = module(*args)
            alive.extend(map(weakref.ref, (*args, *results)))
            return results

        return run

    block = checked(noting)
    eager, seen = block.eager, []

    def watched(boxed: list[Any]) -> Any:
        seen.extend(ref() for ref in alive)
        return eager(boxed)

    block.eager = watched  # type: ignore[assignment]
    assert block(ones())[0].tolist() == [3.0] * 4 and block.reason == ""
    assert seen == [None, None]


@pytest.mark.parametrize("x", [torch.ones(2, 1).expand(2, 3), torch.ones(3, 2).t(), torch.ones(())])
def test_what_waits_on_the_host_keeps_its_strides(x: Tensor) -> None:
    found = _on_host(x)
    assert found.stride() == x.stride() and torch.equal(found, x) and found.data_ptr() != x.data_ptr()


class Reader(nn.Module):
    """Layer norm, attention with dropout, dropout, cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.ids, self.norm, self.drop = nn.Embedding(16, 8), nn.LayerNorm(8), nn.Dropout(0.2)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.ids(x)
        q, k, v = self.qkv(self.norm(h)).view(*x.shape, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1).transpose(1, 2)
        h = h + self.drop(mixed.reshape(h.shape))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def reader() -> Reader:
    torch.manual_seed(3)
    return Reader().train()


def text(step: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randint(0, 16, (4, 6), generator=generator) for name in ("x", "y")}


@pytest.fixture(scope="module")
def plan() -> pp.Plan:
    return pp.compile(reader(), "local:1", example_inputs=text(), precision="fp64", microbatches=2)


@pytest.mark.parametrize(("backend", "microbatches"), [("aot_eager", 2), ("inductor", 1)])
def test_kernels_are_opaque_and_draw_the_same_numbers(plan: pp.Plan, backend: str, microbatches: int) -> None:
    if microbatches == 1:
        plan = pp.compile(reader(), "local:1", example_inputs=text(), precision="fp64", microbatches=1)
    seen: set[str] = set()

    def noting(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        seen.update(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return find_backend(backend)(module, inputs)

    trainer, eager = (plan.executable(reader(), compile=how) for how in (noting, False))
    for step in range(3):
        assert torch.allclose(trainer.step(text(step)), eager.step(text(step)), rtol=1e-12, atol=0)
        for name, param in trainer.state.params.items():
            assert torch.allclose(param.grad, eager.state.params[name].grad, rtol=1e-12, atol=1e-12), name
        trainer.zero_grad()
        eager.zero_grad()
    assert set(trainer.compiled.values()) == {""}
    kernels = {name.split(".")[1] for name in seen if name.startswith("paraplan_block.")}
    assert {"dropout", "attention", "attention_grad", "layer_norm", "layer_norm_grad", "ce_loss", "ce_grad"} <= kernels
    traced = {name for name in seen if not name.startswith("paraplan_block.")}
    assert not [name for name in traced if any(part in name for part in ("norm", "xor", "shift", "exp"))]


def test_a_step_recorded_after_a_compiled_one_is_as_predicted(plan: pp.Plan) -> None:
    found = []
    for how in ("aot_eager", False):
        trainer = plan.executable(reader(), compile=how)
        optimizer = trainer.optimizer(torch.optim.SGD, lr=0.1)
        trainer.step(text())
        optimizer.step()
        optimizer.zero_grad()
        assert set(trainer.compiled.values()) == ({""} if how else set())
        trainer.record = True
        trainer.step(text(1))
        found.append(([entry.key for entry in trainer.entries], trainer.peak_bytes))
    assert found[0] == found[1]


def test_a_plan_hands_its_options_on(plan: pp.Plan) -> None:
    def unable(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        raise ValueError("no compiler here")

    strict = plan.executable(reader(), compile=unable, compile_strict=True)
    with pytest.raises(CodegenError, match="ValueError: no compiler here"):
        strict.step(text())
    with pytest.raises(ConstraintError, match="timeout_s=0: give the seconds"):
        plan.executable(reader(), timeout_s=0)


def test_ranks_agree_before_any_collective(tmp_path: Path) -> None:
    assert spawn_local(2, WORKER, [str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("done*")} == {"done0", "done1"}
