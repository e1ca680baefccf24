"""Captured programs of whole models against the models themselves."""

from __future__ import annotations

import copy

import pytest
import torch

from paraplan.capture import capture, fingerprint
from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.model.graph import Graph, Phase
from paraplan.ir.model.program import Program
from paraplan.ir.struct import from_json, to_json
from tests.capture.models import batch_of, build, captured, eager, run, worst_error

MODELS = ("mlp", "gpt2", "llama", "bert", "t5")


@pytest.mark.parametrize("kind", MODELS)
def test_loss_and_gradients_equal_eager_in_fp64(kind: str) -> None:
    model, batch = build(kind), batch_of(kind)
    program = captured(kind, precision="fp64")
    loss, grads = run(program, model, batch)
    wanted_loss, wanted = eager(model, batch, "fp64")
    bound = 1e-9 if kind == "mlp" else 1e-5  # Hugging Face computes its loss and norms in float32
    assert abs(float(loss - wanted_loss)) <= bound * abs(float(wanted_loss))
    assert worst_error(grads, wanted) <= bound


@pytest.mark.parametrize("kind", ("gpt2", "llama", "bert"))
def test_fp32_equals_eager_within_rounding(kind: str) -> None:
    model, batch = build(kind), batch_of(kind)
    loss, grads = run(captured(kind), model, batch)
    wanted_loss, wanted = eager(model, batch, "fp32")
    assert float(loss) == pytest.approx(float(wanted_loss), rel=1e-5)
    big = max(float(g.abs().max()) for g in wanted.values() if g is not None)
    assert all(float((grads[name] - g).abs().max()) < 1e-5 * big for name, g in wanted.items() if g is not None)


def test_bf16_is_as_close_to_fp32_as_eager_bf16() -> None:
    model, batch = build("llama"), batch_of("llama")
    program = capture(model, batch, precision="bf16")
    assert program.buffers["model.rotary_emb.inv_freq"].dtype == "float32"
    assert program.params["lm_head.weight"].spec.dtype == "bfloat16"
    _, grads = run(program, model, batch)
    _, exact = eager(model, batch, "fp32")
    _, narrow = eager(model, batch, "bf16")
    big = max(float(g.abs().max()) for g in exact.values())

    def error(found: dict[str, torch.Tensor]) -> float:
        return max(float((found[name].float() - g).abs().max()) / big for name, g in exact.items())

    assert error(grads) < 1.5 * error(narrow) + 1e-3


@pytest.mark.parametrize("kind", MODELS)
def test_kinds_do_not_grow_with_depth(kind: str) -> None:
    shallow, deep = captured(kind, 2, 0.1), captured(kind, 4, 0.1)
    assert len(shallow.kinds) == len(deep.kinds) <= (11 if kind == "t5" else 5)
    assert len(deep.segments) > len(shallow.segments)


def test_transformers_are_cut_twice_a_layer() -> None:
    for kind in ("gpt2", "llama"):
        program = captured(kind, 4, 0.1)
        assert [s.kind for s in program.segments] == [0, *[1, 2] * 4, 3]
    bert = captured("bert", 4, 0.1)
    assert [s.kind for s in bert.segments][:9] == [0, *[1, 2] * 4]


@pytest.mark.parametrize("kind", ("gpt2", "llama", "bert"))
def test_meta_and_real_models_give_the_same_bytes(kind: str) -> None:
    real = build(kind, 2, 0.1)
    with torch.device("meta"):
        meta = build(kind, 2, 0.1)
    batch = batch_of(kind)
    program = captured(kind, 2, 0.1)
    assert to_json(program) == to_json(capture(meta, batch)) == to_json(capture(real.bfloat16(), batch))
    assert to_json(from_json(to_json(program), Program, "program", InvalidPlanError)) == to_json(program)


def test_capture_leaves_the_model_alone() -> None:
    model, batch = build("gpt2", 2, 0.1), batch_of("gpt2")
    before = copy.deepcopy(model.state_dict())
    ids = [id(p) for p in model.parameters()]
    capture(model, batch)
    assert model.training and model.config.use_cache and ids == [id(p) for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_no_attention_mask_means_no_mask_and_causal() -> None:
    for kind, causal in (("gpt2", True), ("llama", True), ("bert", False)):
        program = captured(kind)
        ops = [op for k in program.kinds for op in k.graph.ops if op.target == "paraplan.attention"]
        assert ops and all(op.args[3] is None and op.args[7] is causal for op in ops)


@pytest.mark.parametrize("kind", ("gpt2", "bert", "llama"))
def test_an_attention_mask_is_data(kind: str) -> None:
    model, batch = build(kind), batch_of(kind)
    mask = torch.ones(4, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    batch["attention_mask"] = mask
    loss, grads = run(capture(model, batch, precision="fp64"), model, batch)
    wanted_loss, wanted = eager(model, batch, "fp64")
    assert float(loss) == pytest.approx(float(wanted_loss), rel=1e-6)
    assert worst_error(grads, wanted) < 1e-5


def _graphs(program: Program) -> list[Graph]:
    return [k.graph for k in program.kinds] + [d.graph for d in program.denominators]


@pytest.mark.parametrize("kind", MODELS)
def test_graphs_are_in_order_device_free_and_fp64_throughout(kind: str) -> None:
    program = captured(kind, 2, 0.1, "fp64")
    for graph in _graphs(program):
        known, backward = set(graph.inputs), False
        for op in graph.ops:
            assert set(op.tensors) <= known
            known |= {name for name in op.outs if name}
            assert not (backward and op.phase is Phase.FORWARD)
            backward = backward or op.phase is Phase.BACKWARD
            assert "device" not in op.kwargs and "meta" not in repr(op.args)
        assert set(graph.values) == known
        assert not {spec.dtype for spec in graph.values.values()} & {"float32", "float16", "bfloat16"}


def test_ops_point_to_source_lines() -> None:
    program = captured("llama")
    linears = [(g, op) for g in _graphs(program) for op in g.ops if op.target.startswith("paraplan.linear")]
    assert all("modeling_llama.py:" in g.source_of(op) for g, op in linears)
    assert any(op.phase is Phase.BACKWARD and "down_proj" in g.source_of(op) for g, op in linears)


def test_fingerprints_tell_models_apart() -> None:
    model = build("gpt2")
    same = fingerprint(model, "fp32")
    with torch.device("meta"):
        assert fingerprint(build("gpt2"), "fp32") == same
    assert fingerprint(build("gpt2").bfloat16(), "fp32") == same
    assert fingerprint(model, "fp64") != same
    assert fingerprint(build("gpt2", 3), "fp32") != same
    model.transformer.wte.weight.requires_grad_(False)
    assert fingerprint(model, "fp32") != same
