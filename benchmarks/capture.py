"""How long capturing Llama-3.1-405B takes, at 16 and at all 126 layers, each in a fresh process.

The model is built on the meta device with the published sizes and captured in bf16 with a batch of one sequence of 8192
tokens: no weight is ever allocated. Shown are the export alone, the whole capture (canonical ops, cutting, kinds and
their joint graphs included), its processor seconds (which a busy machine does not stretch), the most memory the process
held, and the number of kinds; the rows written with `--json` also have the seconds of every step.

    python -m benchmarks.capture [--only 126] [--json FILE]
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from benchmarks.table import Row, main

LAYERS = (16, 126)
COLUMNS = ("case", "segments", "kinds", "build_s", "trace_s", "capture_s", "cpu_s", "rss_gib")
STEPS = {
    "trace_s": "trace_model",
    "rewrite_s": "_rewrite",
    "kinds_s": "_segment",
    "loss_s": "_loss",
    "rules_s": "attach_rules",
    "outputs_s": "make_outputs",
    "fingerprint_s": "fingerprint",
}
"""Functions that `paraplan.capture.capture` calls one after another."""


def llama_405b(layers: int) -> torch.nn.Module:
    """Llama-3.1-405B's sizes with some number of layers, on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  (optional extra)

    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=16384,
        intermediate_size=53248,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_theta=5e5,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).train()


def measure(layers: int) -> Row:
    """Capture once, here."""
    module = import_module("paraplan.capture.capture")
    seconds = dict.fromkeys(STEPS, 0.0)
    for step, name in STEPS.items():
        setattr(module, name, _timed(getattr(module, name), step, seconds))
    started = time.perf_counter()
    model = llama_405b(layers)
    built = time.perf_counter()
    cpu = time.process_time()
    tokens = torch.zeros(1, 8192, dtype=torch.long, device="meta")
    program = module.capture(model, {"input_ids": tokens, "labels": tokens}, precision="bf16")
    ended = time.perf_counter()
    return {
        "segments": len(program.segments),
        "kinds": len(program.kinds),
        "build_s": built - started,
        **seconds,
        "capture_s": ended - built,
        "cpu_s": time.process_time() - cpu,
        "rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def _timed(run: Callable[..., Any], step: str, seconds: dict[str, float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return run(*args, **kwargs)
        finally:
            seconds[step] += time.perf_counter() - started

    return timed


def in_fresh_process(layers: int) -> Row:
    """`measure` where nothing was imported, compiled or cached before."""
    command = [sys.executable, "-m", "benchmarks.capture", "--layers", str(layers)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--layers"]:
        print(json.dumps(measure(int(sys.argv[2]))))
        raise SystemExit(0)
    cases = {f"llama-405b {layers} layers": lambda layers=layers: in_fresh_process(layers) for layers in LAYERS}
    raise SystemExit(main("capture", cases, COLUMNS))
