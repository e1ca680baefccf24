"""What every rank of `benchmarks.runtime` runs: `runtime_rank <model> <rival> <rounds> <file for rank 0's row>`."""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import paraplan as pp
from paraplan.runtime.transport.launch import init_distributed, leave_job

Step = Callable[[dict[str, Tensor]], Tensor]

GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
MODELS: dict[str, tuple[str, dict[str, object], tuple[int, int]]] = {
    "gpt2 light": (
        "gpt2", {**GPT2, "n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 512, "n_positions": 64}, (4, 32)
    ),
    "gpt2 heavy": (
        "gpt2", {**GPT2, "n_layer": 4, "n_embd": 512, "n_head": 8, "vocab_size": 2048, "n_positions": 32}, (4, 16)
    ),
    "llama light": (
        "llama",
        {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 64},
        (4, 32),
    ),
    "llama heavy": (
        "llama",
        {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8,
         "num_key_value_heads": 4, "vocab_size": 2048, "max_position_embeddings": 32},
        (4, 16),
    ),
}  # fmt: skip
"""Per model: transformers' family, its settings, and (batch, sequence) of the whole job."""

WARMUP, BATCHES = 4, 4


def build(name: str) -> nn.Module:
    """The model with seeded weights, the same on every rank."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  (optional extra)

    family, settings, _ = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **settings, use_cache=False)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()  # type: ignore[no-any-return]


def batches(name: str) -> list[dict[str, Tensor]]:
    """Global batches; every label counts, so that a mean of the ranks' means is the mean."""
    _, settings, shape = MODELS[name]
    draw = torch.Generator().manual_seed(1)
    vocabulary = settings["vocab_size"]
    assert isinstance(vocabulary, int)
    tokens = [torch.randint(0, vocabulary, shape, generator=draw) for _ in range(BATCHES)]
    return [{"input_ids": ids, "labels": ids} for ids in tokens]


def torch_step(model: nn.Module, against: str) -> Step:
    """A training step of torch's own."""
    wrapped = model
    if against == "ddp":
        wrapped = DistributedDataParallel(model)
    elif against == "fsdp2":
        for block in next(part for part in model.modules() if isinstance(part, nn.ModuleList)):
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3, foreach=True)

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = wrapped(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def our_step(model: nn.Module, name: str, ranks: int, against: str) -> tuple[Step, Callable[..., dict[str, Tensor]]]:
    """A training step of the pinned plan, and how it cuts a batch."""
    _, _, (batch, seq) = MODELS[name]
    pins = {} if ranks == 1 else {"dp": ranks, "zero": 3 if against == "fsdp2" else 0}
    plan = pp.compile(model, f"local:{ranks}", batch=batch, seq=seq, microbatches=1, **pins)
    trainer = plan.executable(model)
    optimizer = trainer.optimizer(torch.optim.AdamW, lr=1e-3, foreach=True)

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss = trainer.step(batch)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, trainer.cut


def timed(step: Step, batch: dict[str, Tensor]) -> tuple[float, float, Tensor]:
    """Seconds of one step, until the last rank has ended it; this process' seconds of processor time; the loss."""
    if dist.is_initialized():
        dist.barrier()
    started, busy = time.perf_counter(), time.process_time()
    loss = step(batch)
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - started, time.process_time() - busy, loss


def mean_over_ranks(loss: Tensor) -> float:
    """The global loss from every rank's mean."""
    if dist.is_initialized():
        loss = loss.clone()
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return float(loss)


def spread(name: str, seconds: list[float]) -> dict[str, float]:
    """min, median and max, in milliseconds."""
    return {
        f"{name}_min_ms": 1e3 * min(seconds),
        f"{name}_ms": 1e3 * statistics.median(seconds),
        f"{name}_max_ms": 1e3 * max(seconds),
    }


def race(name: str, against: str, rounds: int, rank: int, ranks: int) -> dict[str, object]:
    """Both sides' times over paired, interleaved steps."""
    model, given = build(name), batches(name)
    ours, cut = our_step(copy.deepcopy(model), name, ranks, against)
    theirs = torch_step(copy.deepcopy(model), against)
    cuts = [cut(batch) for batch in given]
    parts = [{key: value.chunk(ranks)[rank].contiguous() for key, value in batch.items()} for batch in given]
    times: tuple[list[float], list[float]] = ([], [])
    busy: tuple[list[float], list[float]] = ([], [])
    for index in range(WARMUP + rounds):
        both = ((0, ours, cuts[index % BATCHES]), (1, theirs, parts[index % BATCHES]))
        losses = [0.0, 0.0]
        for side, step, batch in both if index % 2 else both[::-1]:
            seconds, worked, loss = timed(step, batch)
            losses[side] = float(loss) if side == 0 else mean_over_ranks(loss)
            if index >= WARMUP:
                times[side].append(seconds)
                busy[side].append(worked)
        if abs(losses[0] - losses[1]) > 1e-3 * abs(losses[1]):
            raise AssertionError(f"step {index}: our loss is {losses[0]}, theirs {losses[1]}")
    quotients = statistics.quantiles([a / b for a, b in zip(*times, strict=True)], n=4)
    return {
        "ratio": statistics.median(times[0]) / statistics.median(times[1]),
        "ratio_min": quotients[0],
        "ratio_max": quotients[2],
        "cpu_ratio": statistics.median(busy[0]) / statistics.median(busy[1]),
        **spread("ours", times[0]),
        **spread("theirs", times[1]),
        "rounds": rounds,
        "parameters": sum(p.numel() for p in model.parameters()),
        "final_loss_ours": losses[0],
        "final_loss_theirs": losses[1],
    }


def main() -> None:
    """One case on this rank."""
    name, against, rounds, found = sys.argv[1:]
    torch.set_num_threads(1)
    rank, ranks = init_distributed("gloo")
    row = race(name, against, int(rounds), rank, ranks)
    if rank == 0:
        Path(found).write_text(json.dumps(row))
    leave_job()


if __name__ == "__main__":
    main()
