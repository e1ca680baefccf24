"""Predicted against measured steps of plans that offload, with copies at the pace of a link of the cluster's.

One CPU process trains GPT-2 (small widths), under a plan that keeps everything and one that offloads to fit 70 % of its
memory, whose copies are given the pace at which those away take a third of, as long as, and three times as long as the
forward's compute. Steps of both plans alternate. The cluster's rates are scaled by the one factor that makes the kept
plan's predicted step its median measured one, which takes the cost model's error about this machine's kernels, and
others' work on it, out of what is compared; the link keeps its pace. A row has the predicted step up to the update, the
median measured one, their quotient, both over the kept plan's, and peaks on the device and on the host.
Kernels are small: what a step of this size says is whether streams and waits are as simulated.

    python -m benchmarks.offload [--only PATTERN] [--json FILE]      STEPS=7 pairs of steps, LAYERS=6 (environment)
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import cache, partial

import msgspec
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import paraplan as pp
from benchmarks.table import Row, main
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.runtime.trainer import Trainer

STEPS, LAYERS = (int(os.environ.get(name, usual)) for name, usual in (("STEPS", "7"), ("LAYERS", "6")))
COLUMNS = (
    *("case", "predicted_s", "measured_s", "ratio", "predicted_over_kept", "measured_over_kept", "device_bytes"),
    "host_bytes",
)
RATIOS = {"copies 1/3 of the forward": 1 / 3, "copies as long as the forward": 1.0, "copies 3 times the forward": 3.0}


def model() -> torch.nn.Module:
    """GPT-2 of small widths, without dropout."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=LAYERS,
        n_embd=256,
        n_head=4,
        vocab_size=1024,
        n_positions=128,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return GPT2LMHeadModel(config).train()


def scaled(cluster: ClusterSpec, factor: float, host_bytes_per_s: float) -> ClusterSpec:
    """The cluster with a device so many times slower, and a host's link."""
    (group,) = cluster.groups
    device = msgspec.structs.replace(
        group.device,
        flops_per_s={dtype: rate / factor for dtype, rate in group.device.flops_per_s.items()},
        memory_bytes_per_s=group.device.memory_bytes_per_s / factor,
        launch_s=group.device.launch_s * factor,
    )
    host = msgspec.structs.replace(group.host, bytes_per_s=host_bytes_per_s)
    return msgspec.structs.replace(cluster, groups=(msgspec.structs.replace(group, device=device, host=host),))


@cache
def kept() -> tuple[pp.Plan, Trainer, dict[str, torch.Tensor]]:
    """The plan that keeps everything, its trainer and the batch."""
    torch.set_num_threads(1)
    ids = torch.randint(0, 1024, (8, 128))
    batch = {"input_ids": ids, "labels": ids}
    plan = pp.compile(model(), ClusterSpec.local(1), example_inputs=batch, optimizer="sgd", microbatches=1)
    return plan, plan.executable(model()), batch


def raced(ratio: float) -> Row:
    """The plan that offloads beside the one that keeps, its copies taking so much of the forward's time."""
    plan, runner, batch = kept()
    factor = statistics.median(timed(runner, batch) for _ in range(STEPS)) / forward_and_backward(plan)
    made = pp.compile(
        model(),
        scaled(plan.data.cluster, factor, 1e15),
        example_inputs=batch,
        optimizer="sgd",
        microbatches=1,
        memory=int(max(plan.prediction.peak_bytes) * 0.7),
        recompute="none",
        offload="host",
    )
    spans = made.simulate().traces[0].spans
    forward = sum(span.busy_s for span in spans if span.stream == "compute" and span.phase == "F")
    moved = made.prediction.tier_peak_bytes["host"]
    there = made.on(scaled(plan.data.cluster, factor, moved / (ratio * forward)))
    trainer = there.executable(model(), paced=True)
    timed(trainer, batch)
    pairs = [(timed(runner, batch), timed(trainer, batch)) for _ in range(STEPS)]
    usual, measured = (statistics.median(each) for each in zip(*pairs, strict=True))
    now = usual / forward_and_backward(plan)
    predicted = forward_and_backward(made.on(scaled(plan.data.cluster, now, moved / (ratio * forward))))
    return {
        "predicted_s": predicted,
        "measured_s": measured,
        "ratio": predicted / measured,
        "predicted_over_kept": predicted / usual,
        "measured_over_kept": measured / usual,
        "device_bytes": max(there.prediction.peak_bytes),
        "host_bytes": moved,
        "kept_bytes": max(plan.prediction.peak_bytes),
    }


def timed(trainer: Trainer, batch: dict[str, torch.Tensor]) -> float:
    """Seconds of a step up to the update."""
    started = time.perf_counter()
    trainer.step(batch)
    taken = time.perf_counter() - started
    trainer.zero_grad()
    return taken


def forward_and_backward(plan: pp.Plan) -> float:
    """Predicted seconds of a step up to the update."""
    spans = [span for span in plan.simulate().traces[0].spans if span.phase != "UPDATE"]
    return max(span.end_s for span in spans)


CASES: dict[str, Callable[[], Row]] = {name: partial(raced, ratio) for name, ratio in RATIOS.items()}


if __name__ == "__main__":
    raise SystemExit(main("offload", CASES, COLUMNS))
