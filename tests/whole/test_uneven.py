"""Models none of whose dims divide: vocabulary, sequence, batch, hidden and inner sizes, image tokens.

Random plans of them give the single device's numbers and do what was predicted. The ranks with whole blocks peak where
it was predicted; those whose blocks are padded below, for the optimizer keeps no state for padding.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.zoo.small import Small
from paraplan.capture import capture
from paraplan.capture.reference import run_step
from paraplan.codegen import build_modules
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.errors import ConstraintError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.mesh import padded_dims, parse_layout
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.sampling import random_plan
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer
from tests.numerics import relative_error

torch.set_num_threads(1)


def gpt2(vocabulary: int = 107, width: int = 35, batch: int = 9, seq: int = 15, dropout: float = 0.0) -> Small:
    """GPT-2 of odd sizes."""
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415  (optional extra)

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_embd=width,
        n_head=7 if width % 7 == 0 else 4,
        n_inner=4 * width - 1,
        vocab_size=vocabulary,
        n_positions=40,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    tokens, labels = (torch.randint(0, vocabulary, (batch, seq)) for _ in range(2))
    tokens[0, 0] = labels[0, 1] = vocabulary - 1
    labels[1, : seq // 2] = -100
    return Small("gpt2", GPT2LMHeadModel(config).double().train(), {"input_ids": tokens, "labels": labels})


def vit() -> Small:
    """50 tokens and 22 classes: neither divides by 4."""
    from transformers import ViTConfig, ViTForImageClassification  # noqa: PLC0415  (optional extra)

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=36,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=71,
        image_size=28,
        patch_size=4,
        num_labels=22,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.0,
    )
    model = ViTForImageClassification(config).double().train()
    pixels, labels = torch.randn(8, 3, 28, 28, dtype=torch.float64), torch.randint(0, 22, (8,))
    return Small("vit", model, {"pixel_values": pixels, "labels": labels})


class Single:
    """A model and one step of it on one device."""

    def __init__(self, small: Small) -> None:
        self.small, self.program = small, capture(small.model, small.batch, precision="fp64")
        tensors = dict(small.model.named_parameters(remove_duplicate=False))
        buffers = {name: b.double() if b.is_floating_point() else b for name, b in small.model.named_buffers()}
        self.params = {name: tensors[name].detach() for name in self.program.params}
        self.loss, self.grads, _ = run_step(self.program, self.params, buffers, small.batch, 0)

    def job(self, ranks: int) -> Job:
        """What to plan."""
        return Job(self.program, ClusterSpec.local(ranks), OPTIMIZERS["adamw"], ModelRef(display=self.small.name), {})

    def hold(self, plan: Plan, ranks: int) -> InProcessTrainer:
        """Run a plan for two steps and compare; all its ranks in this process."""
        programs = verify_plan(plan)
        trainer = InProcessTrainer(plan, programs, [build_modules(p) for p in programs], self.small.model)
        assert float(abs(trainer.step(self.small.batch) - self.loss) / abs(self.loss)) <= 1e-9
        assert relative_error(trainer.grads(), self.grads) <= 1e-9
        trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3)
        trainer.step(self.small.batch)
        trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3)
        predicted, peak = [entry.key for entry in entries(programs[0])], max(simulate_plan(plan, programs).peak_bytes)
        for rank in range(ranks):
            assert [entry.key for entry in trainer.entries(rank)] == predicted
            assert 0 <= peak - trainer.peak_bytes(rank) <= 0.02 * peak + 2 * _padding_bytes(trainer, rank)
        assert peak <= 1.02 * max(trainer.peak_bytes(rank) for rank in range(ranks))
        return trainer


def _padding_bytes(trainer: InProcessTrainer, rank: int) -> int:
    """Of a rank's states; its optimizer keeps twice as many fewer."""
    here = trainer.ranks[rank]
    return sum(here.held(name)[0].nbytes - here.held_part(name)[0].nbytes for name in here.params)


def _is_uneven(plan: Plan) -> bool:
    stage = plan.stages[0]
    return any(
        padded_dims(plan.program.params[name].spec.shape, parse_layout(text), stage.mesh.shape)
        for name, layouts in stage.params.items()
        for text in (layouts.stored, layouts.grad, layouts.state)
    )


def test_random_plans_of_a_transformer_of_odd_sizes() -> None:
    single = Single(gpt2(dropout=0.1))
    for seed, ranks in ((1, 2), (2, 4), (3, 4)):
        plan = random_plan(single.job(ranks), seed, max_microbatches=3)
        assert _is_uneven(plan)
        single.hold(plan, ranks)


def test_random_plans_of_a_vision_transformer() -> None:
    single = Single(vit())
    for seed, ranks in ((1, 4), (2, 4)):
        plan = random_plan(single.job(ranks), seed, max_microbatches=2)
        assert _is_uneven(plan)
        single.hold(plan, ranks)


PINS = (
    {"cp": 2, "cp_mode": "gather"},
    {"cp": 2, "cp_mode": "alltoall"},
    {"tp": 2, "sp": True},
    {"dp": 2, "zero": 1, "params": {"transformer.wte.weight": "R/P/S0"}},
    {"dp": 2, "zero": 3, "params": {"transformer.wte.weight": "S0/S0/S0"}},
)


def test_pinned_plans_shard_what_does_not_divide() -> None:
    """Sequence, vocabulary and states; each plan's bound is below its price (`search` holds that)."""
    single = Single(gpt2(vocabulary=61, width=36, batch=4, seq=15))
    uneven = []
    for pins in PINS:
        constraints = Constraints(**pins)  # type: ignore[arg-type]
        plan = search(single.job(2), constraints).plan
        single.hold(plan, 2)
        uneven.append(_padded_values(plan))
    assert all(uneven), uneven


def test_rings_and_microbatches_are_not_padded() -> None:
    single = Single(gpt2(vocabulary=61, width=36, batch=4, seq=15))
    with pytest.raises(ConstraintError, match="sequence of 15 does not divide over 2 ranks, and a ring's blocks"):
        search(single.job(2), Constraints(cp=2, cp_mode="ring"), certify=False)
    with pytest.raises(ConstraintError, match="microbatches=3 does not divide a batch of 4; give 2 or 4"):
        search(single.job(2), Constraints(dp=2, microbatches=3), certify=False)


def _padded_values(plan: Plan) -> int:
    """How many values of the blocks, parameters and inputs are padded."""
    count = 0
    for program in verify_plan(plan):
        tails = [i for block in program.blocks.values() for i in block.instrs if "fill_tail" in i.target]
        count += len(tails) + _is_uneven(plan)
    return count
