"""The planners by name."""

from __future__ import annotations

from paraplan.baselines.planners import fixed
from paraplan.baselines.planners.alpa import alpa
from paraplan.baselines.planners.dapple import dapple
from paraplan.baselines.planners.galvatron import galvatron
from paraplan.baselines.planners.pipedream import pipedream, pipedream_2bw
from paraplan.baselines.planners.piper import piper
from paraplan.baselines.planners.task import NamedPlanner
from paraplan.baselines.planners.whole_pipelines import chimera, varuna

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
}
"""By name; `paraplan` is the search itself."""
NAMES = (OURS, *PLANNERS)
