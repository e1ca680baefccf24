"""Host time of a training step, ours beside eager PyTorch's, of models so small that little else is measured.

    python -m benchmarks.host [--only PATTERN] [--json FILE]

Both take their steps in turn in one thread, whose processor time is counted: the parts of a step that both have
(forward and backward; the optimizer), what only a plan has (the batch checked and cut, the model compared with the
captured one, gradients handed over), and the whole. Medians of 200 steps each, after 20.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import paraplan as pp
from benchmarks.gpu.training import RATE, decoder
from benchmarks.table import Row, main

Parts = Mapping[str, Callable[[], object]]


def medians_us(whole: Parts, parts: Parts, steps: int, warm: int) -> dict[str, float]:
    """Median microseconds of this thread's processor time that each call takes, all called in turn."""
    found = defaultdict(list)
    for _ in range(warm + steps):
        for name, call in (*whole.items(), *parts.items()):
            started = time.thread_time()
            call()
            found[name].append(1e6 * (time.thread_time() - started))
    return {name: statistics.median(each[warm:]) for name, each in found.items()}


def step_times(model: nn.Module, batch: Mapping[str, Tensor], steps: int = 200, warm: int = 20) -> Row:
    """Of a model on CPU, under the plan of one device and eagerly.

    Args:
        model: as it is to train; not modified.
        batch: a global batch by name.
        steps, warm: counted, and taken before.
    """
    plan = pp.compile(model, "local:1", example_inputs=batch, mesh=(1,), microbatches=1)
    eager = copy.deepcopy(model)
    trainers = [plan.executable(model) for _ in range(2)]
    optimizers = [trainer.optimizer(torch.optim.AdamW, lr=RATE) for trainer in trainers]
    theirs = torch.optim.AdamW(eager.parameters(), lr=RATE)

    def forward_backward() -> None:
        found: Any = eager(**batch)
        (found if isinstance(found, Tensor) else found["loss"]).backward()

    def eager_update() -> None:
        theirs.step()
        theirs.zero_grad()

    def eager_step() -> None:
        forward_backward()
        eager_update()

    def step() -> None:
        trainers[0].step(batch)
        optimizers[0].step()
        optimizers[0].zero_grad()

    apart, state = trainers[1], trainers[1].state

    def update() -> None:
        optimizers[1].step()
        optimizers[1].zero_grad()

    found = medians_us(
        {"step_us": step, "eager_us": eager_step},
        {
            "check_us": apart.attributes.check,
            "batch_us": lambda: state.start(apart.cut(batch)),
            "blocks_us": lambda: state.executor.run(state.before),
            "grads_us": state.take_grads,
            "update_us": update,
            "eager_blocks_us": forward_backward,
            "eager_update_us": eager_update,
        },
        steps,
        warm,
    )
    instrs = sum(len(plan.programs[0].blocks[each.block].instrs) for each in plan.programs[0].steps if each.block)
    found = {name: round(each, 1) for name, each in found.items()}
    return {
        **found,
        "instructions": instrs,
        "ratio": round(found["step_us"] / found["eager_us"], 3),
        "blocks_ratio": round(found["blocks_us"] / found["eager_blocks_us"], 3),
    }


def _case(kind: str, layers: int) -> Row:
    torch.manual_seed(0)
    model, batch = decoder(kind, layers, 32, 4, 512, torch.randint(0, 512, (2, 16)))
    for module in model.modules():  # drawn on a CPU by many ops of integers, which a device has one kernel for
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attn_dropout") and isinstance(module.attn_dropout, nn.Dropout):
            module.attn_dropout.p = 0.0
    return step_times(model.train(), batch)


CASES = {f"{kind}, {layers} layers": partial(_case, kind, layers) for kind in ("gpt2", "llama") for layers in (2, 8)}
COLUMNS = (
    "case",
    "instructions",
    "step_us",
    "eager_us",
    "ratio",
    "blocks_us",
    "eager_blocks_us",
    "blocks_ratio",
    "update_us",
    "eager_update_us",
    "check_us",
    "batch_us",
    "grads_us",
)


if __name__ == "__main__":
    raise SystemExit(main("host", CASES, COLUMNS))
