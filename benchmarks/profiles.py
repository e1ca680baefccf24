"""Whether costs from profiles hold: predicted against measured, on this machine.

`step <model>`: one CPU thread, float32, AdamW; the model's local ops are measured three times over, a plan for one
device is made with them, and its steps are run before and after each time, so that both see the same machine. Steps and
ops are timed by processor time, which other processes do not stretch (but they do take cache and memory bandwidth).
`error_percent` is predicted over the median measured step, less one.

`collectives`: Gloo between two processes. Curves are fitted to the sizes that `profile-links` takes and foretell sizes
between, measured by jobs in between; those of 64 KiB and more count. Wall clock: on a busy machine these say little.

`layer`: all local shapes of a Llama layer on meshes of up to 8 devices, and then a model of three such layers.
`cpu_s` is of measuring alone, as is `wall_s`; interpolation errors are by cross-validation.

    python -m benchmarks.profiles [--only "step gpt2"] [--json FILE]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import paraplan as pp
from benchmarks.table import main
from examples.models.resnet import ResNet, images
from paraplan.capture import capture
from paraplan.cost_models.profiles.curves import fit_curve
from paraplan.jobs.data import RandomBatches
from paraplan.jobs.measuring.measure_links import link_times
from paraplan.jobs.measuring.profile_ops import MeasuringRun, profile_program
from paraplan.jobs.models import Made, hf_batch, hf_model

COLUMNS = (
    *("case", "predicted_ms", "measured_ms", "error_percent", "median_error_percent", "worst_error_percent", "points"),
    *("shapes", "cpu_s", "wall_s", "interpolation_median_percent", "interpolation_9_of_10_percent"),
)
Row = dict[str, Any]

BATCH, SEQ, ROUNDS, PASSES = 4, 64, 5, 3
LLAMA: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "vocab_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
}
_QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_WIDTHS = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6, "num_hidden_layers": 3}
LANGUAGE: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 3, "n_embd": 384, "n_head": 6, "vocab_size": 2048, "n_positions": 128, **_QUIET},
    "bert": {**_WIDTHS, **_STILL, "vocab_size": 2048, "max_position_embeddings": 128},
    "llama": {**LLAMA, "num_hidden_layers": 2},
    "vit": {**_WIDTHS, **_STILL, "image_size": 64, "patch_size": 8, "num_labels": 16},
}
SMALLEST_COUNTED = 64 << 10
LARGEST = 64 << 20
BETWEEN = LARGEST * 2 // 3


def made(name: str) -> Made:
    """A small model with weights, and for images its batch."""
    torch.manual_seed(0)
    if name == "resnet50":
        return Made(ResNet((3, 4, 6, 3), 32, 16), images(4, 64, 16))
    return Made(hf_model(name, LANGUAGE[name], meta=False))


def step(name: str) -> Row:
    """One device's step, predicted from its ops and measured."""
    torch.set_num_threads(1)
    model = made(name)
    inputs = model.example_inputs if model.example_inputs is not None else hf_batch(model.model, BATCH, SEQ)
    program = capture(model.model, inputs)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.db"
        given = {"example_inputs": model.example_inputs} if model.example_inputs else {"batch": BATCH, "seq": SEQ}
        bare = pp.compile(model.model, "local:1", microbatches=1, recompute="none", **given)
        trainer = bare.executable(model.model)
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=1e-4)
        batch = RandomBatches(bare.data, model, 0)(0)

        def steps() -> list[float]:
            found = []
            for _ in range(ROUNDS + 1):
                started = time.process_time()
                trainer.step(batch)
                optimizer.step()
                optimizer.zero_grad()
                found.append(time.process_time() - started)
            return found[1:]

        taken, shapes = steps(), 0
        for again in range(PASSES):
            shapes += profile_program(program, path, ways=1, again=bool(again)).measured
            taken += steps()
        plan = pp.compile(model.model, "local:1", microbatches=1, recompute="none", profile=path, **given)
        measured = statistics.median(taken)
    predicted = plan.prediction.step_s
    return {
        "predicted_ms": 1e3 * predicted,
        "measured_ms": 1e3 * measured,
        "shapes": shapes // PASSES,
        "error_percent": 100 * (predicted / measured - 1),
        "notes": list(plan.data.notes),
    }


def collectives() -> list[Row]:
    """Every collective of two processes at sizes between those its curve was fitted to."""
    knots, between = link_times(2, LARGEST, BETWEEN)
    rows = []
    for target in dict.fromkeys(each.target for each in knots.times):
        curve = fit_curve((each.input_bytes, each.seconds) for each in knots.times if each.target == target)
        assert curve is not None
        errors = [
            abs(curve.at(each.input_bytes) / each.seconds - 1)
            for each in between.times
            if each.target == target and each.input_bytes >= SMALLEST_COUNTED
        ]
        rows.append(
            {
                "collective": target,
                "points": len(errors),
                "median_error_percent": 100 * statistics.median(errors),
                "worst_error_percent": 100 * max(errors),
            }
        )
    return [{"target": row.pop("collective"), **row} for row in rows]


def layer() -> list[Row]:
    """All local shapes of one layer, then a deeper model of the same sizes."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for layers in (1, 3):
            settings = {**LLAMA, "num_hidden_layers": layers}
            model = hf_model("llama", settings, meta=True)
            wall, busy = time.perf_counter(), time.process_time()
            program = capture(model, hf_batch(model, 8, 64))
            done: MeasuringRun = profile_program(program, Path(folder) / "profile.db")
            errors = done.errors["all"]
            rows.append(
                {
                    "layers": layers,
                    "shapes": done.measured,
                    "cpu_s": time.process_time() - busy,
                    "wall_s": time.perf_counter() - wall,
                    "points": errors.points,
                    "failed": done.failed,
                    "interpolation_median_percent": 100 * errors.median,
                    "interpolation_9_of_10_percent": 100 * errors.ninth_decile,
                    "interpolation": {kind: [e.points, e.median, e.ninth_decile] for kind, e in done.errors.items()},
                }
            )
    return rows


def cases() -> dict[str, Callable[[], Row | list[Row]]]:
    """Steps of five models, collectives, a layer."""
    found: dict[str, Callable[[], Row | list[Row]]] = {
        f"step {name}": lambda name=name: step(name) for name in ("gpt2", "bert", "resnet50", "vit", "llama")
    }
    return {**found, "collectives": collectives, "layer": layer}


if __name__ == "__main__":
    raise SystemExit(main("profiles", cases(), COLUMNS))
