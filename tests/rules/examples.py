"""Cases as graphs of one op, run sharded and held against what the op gives unsharded."""

from __future__ import annotations

from torch import Tensor

from paraplan.capture.reference import run_op
from paraplan.ir.execution.rank_program import BlockRole
from paraplan.ir.machine.mesh import R, local_shape
from paraplan.ir.model.graph import Graph, Op
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.blocks.emit import BlockEmitter
from paraplan.rules.strategies import AxisChoice, Strategy, op_strategies
from paraplan.rules.time_axis import extend
from tests.lowering.lockstep import (
    assert_close,
    everywhere,
    gather,
    local_strides,
    placed,
    run_block,
    scatter,
)

from .cases import Case


class Example:
    """A case as a one-op graph, with its unsharded results."""

    def __init__(self, target: str, case: Case) -> None:
        results = self._run(target, case)
        self.inputs = case.inputs
        self.outs = tuple(None if value is None else f"out{i}" for i, value in enumerate(results))
        self.wanted = {f"out{i}": value for i, value in enumerate(results) if value is not None}
        self.op = Op(target=target, args=case.args, kwargs=case.kwargs, outs=self.outs)
        values = {name: spec_of(value) for name, value in (case.inputs | self.wanted).items()}
        self.graph = Graph(inputs=tuple(case.inputs), outputs=self.outs, values=values, ops=(self.op,))

    @staticmethod
    def _run(target: str, case: Case) -> list[Tensor | None]:
        names = tuple(f"o{i}" for i in range(4))
        env = {name: value.clone() for name, value in case.inputs.items()}
        run_op(Op(target=target, args=case.args, kwargs=case.kwargs, outs=names), env)
        found = [env.get(name) for name in names]
        while found and found[-1] is None and target != "paraplan.attention_grad":
            found.pop()
        masks = case.args[-1] if target in ("paraplan.layer_norm_grad", "paraplan.rms_norm_grad") else ()
        wanted = len(masks) if isinstance(masks, tuple) and masks else len(found)
        return (found + [None] * wanted)[:wanted]

    def strategies(self, mesh: tuple[int, ...]) -> tuple[Strategy, ...]:
        return op_strategies(self.op, self.graph.values, mesh)

    def check(
        self,
        strategy: Strategy,
        mesh: tuple[int, ...],
        m: int = 1,
        orders: dict[str, tuple[int, ...]] | None = None,
        strict: bool = True,
    ) -> None:
        """Run it on the extended mesh (m, *mesh) and compare."""
        extended = (m, *mesh)
        emitter = BlockEmitter("block", extended, BlockRole.FORWARD)
        strides, homes = {}, {}
        for name, layout in zip(self.op.tensors, strategy.inputs, strict=True):
            if name not in homes:
                homes[name] = layout
                strides[name] = local_strides(
                    local_shape(self.graph.values[name].shape, layout, extended), (orders or {}).get(name)
                )
                emitter.give(name, self.graph.values[name], layout, strides[name])
        emitter.op(self.op, self.graph, strategy, 0)
        locals_ = {
            out: emitter.get(out, layout)
            for out, layout in zip(self.op.outs, strategy.outputs, strict=True)
            if out is not None and layout is not None
        }
        block = emitter.finish(tuple(locals_.values()), ())
        pieces = {name: scatter(self.inputs[name], homes[name], extended, seed=i) for i, name in enumerate(homes)}
        found: dict[str, dict[tuple[int, ...], Tensor]] = {out: {} for out in locals_}
        for micro in range(m):
            given = {
                coords: {name: placed(pieces[name][micro, *coords], strides[name]) for name in block.inputs}
                for coords in everywhere(mesh)
            }
            for coords, env in run_block(block, given, mesh, micro, strict).items():
                for out, local in locals_.items():
                    found[out][micro, *coords] = env[local]
        for out, layout in zip(self.op.outs, strategy.outputs, strict=True):
            if out is not None:
                assert layout is not None
                # a sum of float32 addends is rounded
                tolerance = 1e-5 if any(spec.dtype == "float32" for spec in self.graph.values.values()) else 1e-12
                assert_close(
                    gather(found[out], layout, extended, tuple(self.wanted[out].shape)),
                    self.wanted[out],
                    f"{self.op.target} {strategy.key} on {extended}",
                    tolerance,
                )


def spec_of(value: Tensor) -> TensorSpec:
    return TensorSpec(str(value.dtype).removeprefix("torch."), tuple(value.shape))


def whole_first(strategy: Strategy) -> Strategy:
    """On a mesh extended by one microbatch."""
    outs = tuple(None if out is None else R for out in strategy.outputs)
    return extend(strategy, AxisChoice("-", (R,) * len(strategy.inputs), outs))
