"""Products in pieces beside their collectives: the same numbers, predicted entries and peaks, less exposed."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.megatron_gpt import GPTSettings, MegatronGPT, gpt_batch, gpt_model
from paraplan.capture import capture
from paraplan.capture.reference import run_step
from paraplan.codegen import build_modules
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.execution.rank_program import PIECES, is_compiled
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.lowering import lower
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.passes import overlap_products
from paraplan.planner.passes.overlap_products import _groups, best_pieces, in_pieces, piece_counts
from paraplan.planner.pipeline.prices.shorten import runs_of, shortened
from paraplan.planner.pipeline.prices.stage_timing import microbatch_s
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer
from tests.numerics import relative_error
from tests.told import assert_told

NEARLY = 2e-3
"""How much slower products may be than in the best pieces there are."""


def keys_of(plan: Plan) -> set[str]:
    return {part for stage in plan.stages for choice in stage.choices for key in choice.ops for part in key.split("|")}


def models() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return {
        "sequence first": MegatronGPT(GPTSettings(32, 2, 4, 64, 16, tied=True, flash=True)),
        "batch first": GPT2LMHeadModel(config),
    }


@pytest.mark.parametrize("name", ["sequence first", "batch first"])
@pytest.mark.parametrize(
    ("degrees", "count", "microbatches"),
    [({"dp": 1, "tp": 4}, 2, 1), ({"dp": 2, "tp": 2}, 4, 2), ({"pp": 2, "tp": 2}, 2, 4)],
)
def test_pieces_give_the_single_devices_numbers(
    name: str, degrees: dict[str, int], count: int, microbatches: int
) -> None:
    model = models()[name].double()
    batch = {key: torch.randint(64, (8, 16)) for key in ("input_ids", "labels")}
    program = capture(model, batch, precision="fp64")
    job = Job(program, ClusterSpec.local(4), OPTIMIZERS["adamw"], ModelRef(display=name), {})
    pins = Constraints(**degrees, sp=True, microbatches=microbatches, overlap=1)  # type: ignore[arg-type]
    plan = in_pieces(search(job, pins, 20.0, certify=False).plan, count)
    found = {key.split(".")[0] for key in keys_of(plan) if "." in key}
    assert found == {"gather", "scatter"}
    programs = verify_plan(plan)
    assert_told(plan, programs)
    blocks = [block for program in programs for block in program.blocks.values()]
    pieced = [block for block in blocks if any(instr.target in PIECES for instr in block.instrs)]
    assert pieced and not any(map(is_compiled, pieced)) and any(map(is_compiled, blocks))
    trainer = InProcessTrainer(plan, programs, [build_modules(each) for each in programs], model)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    params = {key: tensors[key].detach().clone() for key in program.params}
    buffers = dict(model.named_buffers())
    loss, grads, _ = run_step(program, params, buffers, batch, 0)
    assert float(abs(trainer.step(batch) - loss) / abs(loss)) <= 1e-9
    assert relative_error(trainer.grads(), grads) <= 1e-9
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3)
    trainer.step(batch)
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3)
    peaks = simulate_plan(plan, programs).peak_bytes
    for rank in range(4):
        of = plan.schedule.rank_class[rank]
        assert [entry.key for entry in trainer.entries(rank)] == [entry.key for entry in entries(programs[of])]
        assert 1.0 <= peaks[of] / trainer.peak_bytes(rank) <= 1.02


def gpt_job(cluster: str) -> Job:
    model = gpt_model(GPTSettings(4096, 2, 32, 32000, 4096, tied=False, flash=True))
    program = capture(model, gpt_batch(8, 4096), precision="bf16")
    return Job(program, parse_cluster(cluster), OPTIMIZERS["adamw"], ModelRef(display="gpt"), {})


def test_the_planner_takes_pieces_where_they_are_faster() -> None:
    job = gpt_job("8xH100")
    plans = {
        most: search(job, Constraints(dp=1, tp=8, sp=True, microbatches=1, overlap=most), 20.0, certify=False).plan
        for most in (1, None)
    }
    assert not any("." in key for key in keys_of(plans[1]))
    assert any("." in key for key in keys_of(plans[None]))
    plain, pieces = (plan.prediction for plan in plans.values())
    assert plain is not None and pieces is not None
    assert pieces.step_s < plain.step_s and pieces.exposed_comm_s < 0.8 * plain.exposed_comm_s
    tried = [simulate_plan(plan, lower(plan)).step_s for plan in (in_pieces(plans[1], count) for count in (2, 4))]
    assert pieces.step_s <= (1 + NEARLY) * min(tried)


def test_pieces_are_nearly_the_best_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every way to put groups of products in one, two or four pieces."""
    monkeypatch.setattr(overlap_products, "GROUPS", 4)
    pins = Constraints(dp=1, tp=8, sp=True, microbatches=1, overlap=1)
    plan = search(gpt_job("8xH100"), pins, 20.0, certify=False).plan
    short = shortened(plan, runs_of(plan))
    groups = _groups(short.plan, 2)
    assert len(groups) == 4

    def taken_s(counts: dict[tuple[int, int], int]) -> float:
        return microbatch_s(replace(short, plan=in_pieces(short.plan, counts)))

    least_s = min(
        taken_s({product: count for group, count in zip(groups, counts, strict=True) for product in group})
        for counts in itertools.product((1, 2, 4), repeat=len(groups))
    )
    best = best_pieces(plan, 4)
    assert microbatch_s(shortened(best, runs_of(best))) <= (1 + NEARLY) * least_s < microbatch_s(short)


def test_products_that_move_little_are_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = Constraints(dp=1, tp=8, sp=True, microbatches=1, overlap=1)
    plan = search(gpt_job("8xH100"), pins, 20.0, certify=False).plan
    every = _groups(plan, 2)
    monkeypatch.setattr(overlap_products, "GROUPS", 2)
    first, others = _groups(plan, 2)
    assert first == every[0] and others == frozenset().union(*every[1:])


def test_a_pipeline_goes_in_the_pieces_that_its_whole_plan_is_fastest_in() -> None:
    job, steps = gpt_job("8xH100"), list[float]()
    for most in (1, None):
        plan = search(job, Constraints(pp=2, tp=4, sp=True, overlap=most), 20.0, certify=False).plan
        assert plan.prediction is not None and any("." in key for key in keys_of(plan)) == (most is None)
        steps.append(plan.prediction.step_s)
        if most == 1:
            tried = [simulate_plan(each, lower(each)).step_s for each in (in_pieces(plan, n) for n in (2, 4))]
    assert steps[1] < steps[0] and steps[1] <= (1 + NEARLY) * min(tried)


def test_nothing_is_in_pieces_where_nothing_is_waited_for() -> None:
    plan = search(gpt_job("8xH100"), Constraints(dp=8), 20.0, certify=False).plan
    assert not any("." in key for key in keys_of(plan))


def test_what_cannot_go_in_pieces_stays_whole() -> None:
    model = MegatronGPT(GPTSettings(32, 1, 4, 64, 12, tied=True, flash=True))
    program = capture(model, gpt_batch(4, 12), precision="fp32")
    job = Job(program, ClusterSpec.local(4), OPTIMIZERS["adamw"], ModelRef(display="gpt"), {})
    plan = search(job, Constraints(dp=1, tp=4, sp=True, microbatches=1), 20.0, certify=False).plan
    assert in_pieces(plan, 2) == plan  # 12 rows over 4 ranks are 3 each
    assert in_pieces(plan, 3) != plan
    assert list(piece_counts(1)) == [] and list(piece_counts(9)) == [2, 4, 8]
