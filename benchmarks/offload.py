"""Predicted against measured steps of plans that offload, with copies at the pace of a link of the cluster's.

    python -m benchmarks.offload [--steps 7] [--layers 6]

One CPU process trains GPT-2 (small widths), under a plan that keeps everything and one that offloads to fit 70 % of its
memory, whose copies are given the pace at which those away take a third of, as long as, and three times as long as the
forward's compute. Steps of both plans alternate. The cluster's rates are scaled by the one factor that makes the kept
plan's predicted step its median measured one, which takes the cost model's error about this machine's kernels, and
others' work on it, out of what is compared; the link keeps its pace. Columns: the predicted step up to the update, the
median measured one, their quotient, both over the kept plan's, and peaks on the device and on the host.
Kernels are small: what a step of this size says is whether streams and waits are as simulated.
"""

from __future__ import annotations

import argparse
import statistics
import time

import msgspec
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import paraplan as pp
from paraplan.ir.cluster import ClusterSpec
from paraplan.report.units import show_bytes

torch.set_num_threads(1)


def model(layers: int) -> torch.nn.Module:
    """GPT-2 of small widths, without dropout."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers, n_embd=256, n_head=4, vocab_size=1024, n_positions=128, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def scaled(cluster: ClusterSpec, factor: float, host_bytes_per_s: float) -> ClusterSpec:
    """The cluster with a device so many times slower, and a host's link."""
    (group,) = cluster.groups
    device = msgspec.structs.replace(
        group.device, flops_per_s={dtype: rate / factor for dtype, rate in group.device.flops_per_s.items()},
        memory_bytes_per_s=group.device.memory_bytes_per_s / factor, launch_s=group.device.launch_s * factor,
    )  # fmt: skip
    host = msgspec.structs.replace(group.host, bytes_per_s=host_bytes_per_s)
    return msgspec.structs.replace(cluster, groups=(msgspec.structs.replace(group, device=device, host=host),))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()
    ids = torch.randint(0, 1024, (8, 128))
    batch = {"input_ids": ids, "labels": ids}
    local = ClusterSpec.local(1)
    kept = pp.compile(model(options.layers), local, example_inputs=batch, optimizer="sgd", microbatches=1)
    budget = int(max(kept.prediction.peak_bytes) * 0.7)
    runner = kept.executable(model(options.layers))
    factor = statistics.median(timed(runner, batch) for _ in range(options.steps)) / forward_and_backward(kept)
    print(f"kept: {show_bytes(max(kept.prediction.peak_bytes))}; rates divided by {factor:.2f}")
    print("copies/forward  predicted  measured  predicted/measured  predicted/kept  measured/kept  device  host")
    for ratio in (1 / 3, 1.0, 3.0):
        row(kept, runner, batch, budget, factor, ratio, options)


def row(kept, runner, batch, budget: int, factor: float, ratio: float, options) -> None:  # type: ignore[no-untyped-def]
    """One line of the table."""
    fast = scaled(kept.data.cluster, factor, 1e15)
    made = pp.compile(
        model(options.layers), fast, example_inputs=batch, optimizer="sgd", microbatches=1, memory=budget,
        recompute="none", offload="host",
    )  # fmt: skip
    spans = made.simulate().traces[0].spans
    forward = sum(span.busy_s for span in spans if span.stream == "compute" and span.phase == "F")
    moved = made.prediction.tier_peak_bytes["host"]
    there = made.on(scaled(kept.data.cluster, factor, moved / (ratio * forward)))
    trainer = there.executable(model(options.layers), paced=True)
    timed(trainer, batch)
    pairs = [(timed(runner, batch), timed(trainer, batch)) for _ in range(options.steps)]
    usual, measured = (statistics.median(each) for each in zip(*pairs, strict=True))
    now = usual / forward_and_backward(kept)
    predicted = forward_and_backward(made.on(scaled(kept.data.cluster, now, moved / (ratio * forward))))
    print(
        f"{ratio:14.2f}  {predicted:9.3f}  {measured:8.3f}  {predicted / measured:18.2f}  {predicted / usual:14.2f}  "
        f"{measured / usual:13.2f}  {show_bytes(max(there.prediction.peak_bytes))}  {show_bytes(moved)}"
    )


def timed(trainer, batch) -> float:  # type: ignore[no-untyped-def]
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


if __name__ == "__main__":
    main()
