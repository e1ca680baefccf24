"""Pipelines against one device, in this process: models x schedules x even and uneven stages x tensor parallelism.

Float64, four microbatches, two steps of AdamW, two positions (and three for 1F1B and GEMS, four for Chimera). Per run:
the worst error of the loss (of every rank), the gradients and written buffers against the captured program on one
device, whether the recorded entries equal those predicted, measured over predicted peak (smallest and largest of the
ranks), and the share of the simulated step that the first rank stands still for messages not yet begun.

    python -m benchmarks.pipelines [--only "gpt2 tp 1"] [--json FILE [--resume]]
    SCHEDULES=1f1b,zb-v only these (environment)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial

import torch
import transformers as hf
from torch import Tensor, nn

from benchmarks.table import Row, main
from benchmarks.zoo.small import Small, doubled
from examples.models import unet
from paraplan.capture import capture
from paraplan.ir.errors import ParaplanError
from paraplan.planner.constraints import Constraints
from paraplan.planner.schedules.named import NAMED
from paraplan.planner.search import search
from tests.runtime.pipelines import account, cut, job_of, pipeline_of

Made = tuple[nn.Module, dict[str, Tensor]]
SCHEDULES = {name: schedule.stages for name, schedule in NAMED.items()}
"""Per schedule, how many stages a position holds."""

TOLERANCE = 1e-9
COLUMNS = (
    *("case", "schedule", "stages", "even", "worst_error", "entries_equal", "peak_ratio_min", "peak_ratio_max"),
    *("waits", "failures"),
)


def tokens(vocabulary: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, vocabulary, (4, 8), generator=generator)
    labels = ids.clone()
    labels[0, 3] = labels[2, 1:5] = -100
    return {"input_ids": ids, "labels": labels}


def language(kind: str) -> Made:
    sizes = {"vocab_size": 64}
    if kind == "gpt2":
        model = hf.GPT2LMHeadModel(hf.GPT2Config(n_positions=16, n_embd=16, n_layer=4, n_head=2, **sizes))
    elif kind == "llama":
        model = hf.LlamaForCausalLM(
            hf.LlamaConfig(
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=4,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=32,
                **sizes,
            )
        )
    else:
        model = hf.T5ForConditionalGeneration(
            hf.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0, **sizes)
        )
    return model, tokens(64)


def vit() -> Made:
    model = hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=16,
            num_hidden_layers=4,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=16,
            patch_size=8,
            num_labels=4,
        )
    )
    generator = torch.Generator().manual_seed(1)
    return model, {"pixel_values": torch.randn(4, 3, 16, 16, generator=generator), "labels": torch.tensor([0, 1, 2, 3])}


MODELS: dict[str, Callable[[], Made]] = {
    "gpt2": lambda: language("gpt2"),
    "llama": lambda: language("llama"),
    "t5": lambda: language("t5"),
    "unet": lambda: unet.factory(batch=4, width=4, groups=2),
    "vit": vit,
}


def small(name: str) -> Small:
    """A model in float64, the same every time, and its batch."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    return Small(name, model.train().double(), {key: doubled(value) for key, value in batch.items()})


def runs(names: list[str]) -> list[tuple[str, int, bool]]:
    """(schedule, positions, uneven) of every run."""
    found = [(name, 2, False) for name in names]
    more = [("1f1b", 2, True), ("1f1b", 3, False), ("1f1b", 3, True), ("gems", 3, True), ("chimera", 4, False)]
    return found + [run for run in more if run[0] in names]


def trained(name: str, tp: int, schedules: list[str]) -> list[Row]:
    """One model under every schedule."""
    warnings.simplefilter("ignore")
    made = small(name)
    model, batch = made.model, made.batch
    program = capture(model, batch, precision="fp64")
    one = search(job_of(program, tp), Constraints(tp=tp if tp > 1 else None, microbatches=4)).plan
    rows = []
    for schedule, positions, uneven in runs(schedules):
        stages = positions * SCHEDULES[schedule]
        row: Row = {"case": f"{name} tp {tp}", "schedule": schedule, "stages": stages, "even": not uneven}
        bounds = cut(len(program.segments), stages, uneven)
        try:
            found = account(pipeline_of(one, schedule, positions, bounds), model, batch)
        except ParaplanError as fault:
            rows.append({**row, "failures": [f"{type(fault).__name__}: {fault}"]})
            continue
        wrong = [] if found.error <= TOLERANCE else [f"error {found.error:.1e}"]
        rows.append(
            {
                **row,
                "worst_error": found.error,
                "entries_equal": found.entries_equal,
                "peak_ratio_min": min(found.peaks),
                "peak_ratio_max": max(found.peaks),
                "waits": found.bubble,
                "failures": wrong + ([] if found.entries_equal else ["entries differ"]),
            }
        )
    return rows


def cases() -> dict[str, Callable[[], list[Row]]]:
    """Every model and degree of tensor parallelism."""
    schedules = os.environ.get("SCHEDULES", ",".join(SCHEDULES)).split(",")
    return {f"{name} tp {tp}": partial(trained, name, tp, schedules) for name in MODELS for tp in (1, 2)}


if __name__ == "__main__":
    raise SystemExit(main("pipelines", cases(), COLUMNS))
