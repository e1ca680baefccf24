"""How long planning takes, and that it does not grow with depth after capture.

Llama-3.1-8B's sizes (dim 4096, vocabulary 128256, sequence 8192, bf16) on a logical (8, 8) mesh of 8 nodes of 8 H100,
at 4, 16 and 32 layers: capture from the meta device, option space and ILP, solver, and everything up to the priced and
certified plan.

    python -m benchmarks.planning [--only 32] [--json FILE]
"""

from __future__ import annotations

import resource
import time

import torch

from benchmarks.table import main
from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.ir.struct import to_json
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search

COLUMNS = (
    *("case", "kinds", "capture_s", "solve_s", "plan_s", "step_s", "bound_s", "gap", "status", "peak_gib"),
    *("plan_kb", "rss_gib"),
)


def llama_8b(layers: int) -> torch.nn.Module:
    """Llama-3.1-8B's sizes with some number of layers, on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  (optional extra)

    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).train()


def plan_llama(layers: int) -> dict[str, object]:
    """Capture and plan once."""
    tokens = torch.zeros(64, 8192, dtype=torch.long, device="meta")
    started = time.perf_counter()
    program = capture(llama_8b(layers), {"input_ids": tokens, "labels": tokens}, precision="bf16")
    captured = time.perf_counter()
    job = Job(program, parse_cluster("8xH100:8"), OPTIMIZERS["adamw"], ModelRef(display=f"llama-{layers}"), {})
    found = search(job, Constraints(mesh=(8, 8)))
    plan = found.plan
    assert plan.prediction is not None and plan.certificate is not None
    return {
        "kinds": len(program.kinds),
        "capture_s": captured - started,
        "solve_s": found.solve_s,
        "plan_s": found.total_s,
        "step_s": plan.prediction.step_s,
        "bound_s": plan.certificate.bound_s,
        "gap": plan.certificate.gap,
        "status": plan.certificate.status,
        "peak_gib": max(plan.prediction.peak_bytes) / 2**30,
        "plan_kb": len(to_json(plan)) / 1e3,
        "rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


if __name__ == "__main__":
    cases = {f"llama-8b {layers} layers": lambda layers=layers: plan_llama(layers) for layers in (4, 16, 32)}
    raise SystemExit(main("planning", cases, COLUMNS))
