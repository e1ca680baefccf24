"""The planners by name."""

from __future__ import annotations

from paraplan.baselines.planners import fixed
from paraplan.baselines.planners.searching.aceso import aceso
from paraplan.baselines.planners.searching.alpa import alpa
from paraplan.baselines.planners.searching.dapple import dapple
from paraplan.baselines.planners.searching.flexflow import flexflow
from paraplan.baselines.planners.searching.galvatron import galvatron
from paraplan.baselines.planners.searching.mist import mist
from paraplan.baselines.planners.searching.nnscaler import nnscaler
from paraplan.baselines.planners.searching.pipedream import pipedream, pipedream_2bw
from paraplan.baselines.planners.searching.piper import piper
from paraplan.baselines.planners.searching.whole_pipelines import chimera, varuna
from paraplan.baselines.planners.searching.workers import hetpipe, pipe_torch
from paraplan.baselines.planners.task import NamedPlanner

OURS = "paraplan"

PLANNERS: dict[str, NamedPlanner] = {
    "ddp": NamedPlanner(fixed.data_parallel(0), "data parallel, everything replicated"),
    "zero1": NamedPlanner(fixed.data_parallel(1), "data parallel, optimizer states sharded"),
    "zero2": NamedPlanner(fixed.data_parallel(2), "data parallel, states and gradients sharded"),
    "fsdp": NamedPlanner(fixed.data_parallel(3), "data parallel, parameters sharded too"),
    "gpipe": NamedPlanner(fixed.gpipe, "a pipeline over all devices, every layer recomputed"),
    "megatron": NamedPlanner(
        fixed.megatron, "tensor parallel up to a node, then stages, least first", fastest=True, degrees=("tp", "pp")
    ),
    "megatron-grid": NamedPlanner(fixed.megatron_grid, "the fastest of every point of Megatron's grid", fastest=True),
    "pipedream": NamedPlanner(
        pipedream, "stages whose slowest takes least, replicated alike (its own unlike), under 1F1B instead of stashing"
    ),
    "pipedream-2bw": NamedPlanner(
        pipedream_2bw, "equal stages of the width, depth and microbatch of most throughput, under 1F1B instead of 2BW"
    ),
    "dapple": NamedPlanner(dapple, "stages of least latency around a pivot, replicated alike (its own unlike)"),
    "piper": NamedPlanner(
        piper,
        "stages whose slowest takes least, with degrees, alike for all (its own unlike), and recomputation",
    ),
    "alpa": NamedPlanner(
        alpa, "an integer program in every submesh, a dynamic program over stages; submeshes alike (its own unlike)"
    ),
    "galvatron": NamedPlanner(
        galvatron,
        "a decision tree over degrees, alike for all layers (its own unlike), and recomputation by layer",
    ),
    "chimera": NamedPlanner(chimera, "two pipelines in opposite directions, of the depth its model says is fastest"),
    "varuna": NamedPlanner(varuna, "the fastest simulated depth of pipelines that recompute all, data parallel beside"),
    "flexflow": NamedPlanner(
        flexflow, "Monte Carlo over shardings of ops on one stage, a simulated task graph as cost; equal layers alike"
    ),
    "aceso": NamedPlanner(
        aceso, "configurations improved where their bottleneck is; degrees alike for all stages (its own unlike)"
    ),
    "mist": NamedPlanner(
        mist,
        "recomputation, ZeRO and offload with degrees, imbalance of microbatches counted; ZeRO alike in all stages",
    ),
    "nnscaler": NamedPlanner(
        nnscaler, "a space of shardings inside a stage, stages and replicas pruned by constraints; without its co-shard"
    ),
    "hetpipe": NamedPlanner(
        hetpipe, "virtual workers of one device a stage, their slowest least, under 1F1B instead of stale parameters"
    ),
    "pipe-torch": NamedPlanner(
        pipe_torch, "stages and devices by overlapped computation, reduction and messages; replicated alike, under 1F1B"
    ),
}
"""By name; `paraplan` is the search itself."""
NAMES = (OURS, *PLANNERS)
