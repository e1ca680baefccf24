"""Plans at the edge of memory, run in processes that may have no more than the predicted peak and the stated reserve.

A random network is planned with less memory than its fastest plan takes, for one process or two, and trained for some
steps by ranks whose private memory is limited (RLIMIT_DATA) to that plan's peak and what the cluster's device keeps
from a plan (`Device.reserves`): imports, kernels' scratch, malloc's pieces, and everything else is in it. `died` says
of which case a rank ended otherwise than well; `used_mib` is the most private memory it had, `spare_mib` what of the
limit it left. With SHARE below 1 only so much of the reserve is given, which shows whether the limit bites.

    python -m benchmarks.hard_limit [--only PATTERN] [--json FILE]      COUNT=20 plans, SHARE=1.0 (environment)
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import paraplan as pp
from benchmarks.table import Row, main
from paraplan.ir.errors import NoPlanError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.runtime.transport.launch import spawn_local

COLUMNS = (
    *("case", "ranks", "options", "keeping_mib", "peak_mib", "reserve_mib", "limit_mib", "used_mib", "spare_mib"),
    *("died", "plans", "failures"),
)
SHARES = (0.5, 0.7, 0.9, 1.0)
"""Of what the fastest plan takes: the least that a plan is found for counts."""


class Block(nn.Module):
    """A residual block: attention or not, then a wide product and a narrow one."""

    def __init__(self, width: int, factor: int, attends: bool) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, factor * width)
        self.narrow = nn.Linear(factor * width, width)
        self.mix = nn.Linear(width, 3 * width) if attends else None
        self.heads = max(1, width // 64)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, width]."""
        if self.mix is not None:
            q, k, v = (
                each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.mix(self.norm(x)).chunk(3, -1)
            )
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + mixed.transpose(1, 2).flatten(-2)
        hidden: Tensor = self.narrow(nn.functional.gelu(self.wide(self.norm(x))))
        return x + hidden


class Net(nn.Module):
    """Blocks under a classifier of every position."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        width = rng.choice((256, 512, 768))
        self.shape = (rng.choice((4, 8)), rng.choice((128, 256)), width)
        self.blocks = nn.Sequential(
            *(Block(width, rng.choice((2, 4)), rng.random() < 0.5) for _ in range(rng.randint(3, 6)))
        )
        self.head = nn.Linear(width, rng.choice((512, 4096)))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """x: [batch, seq, width], labels: [batch, seq]."""
        return nn.functional.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), labels.flatten())


def network(seed: int) -> tuple[Net, dict[str, Tensor]]:
    """A network on meta and a batch, the same in every process."""
    with torch.device("meta"):
        net = Net(random.Random(f"net {seed}"))
    generator = torch.Generator().manual_seed(seed)
    batch, seq, _ = net.shape
    labels = torch.randint(net.head.out_features, (batch, seq), generator=generator)
    return net, {"x": torch.randn(net.shape, generator=generator), "labels": labels}


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 1e-3}),
    "momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-4}),
}


def tight_plan(seed: int) -> tuple[pp.Plan, int, str]:
    """A plan for less memory than the fastest one takes, how much that is, and what was drawn."""
    rng = random.Random(f"plan {seed}")
    ranks = rng.choice((1, 1, 2))
    options: dict[str, Any] = {"optimizer": rng.choice(list(OPTIMIZERS))}
    options["precision"] = rng.choice(("fp32", "fp32", "bf16"))
    if ranks > 1:
        options |= rng.choice(({"dp": 2, "zero": 0}, {"dp": 2, "zero": 3}, {"tp": 2}))
    said = " ".join(f"{key}={value}" for key, value in options.items())
    net, batch = network(seed)
    make = partial(pp.compile, net, example_inputs=batch, time_limit_s=5.0, **options)
    keeping = max(make(cluster=ClusterSpec.local(ranks)).prediction.peak_bytes)
    for share in SHARES:
        with suppress(NoPlanError):
            return make(cluster=ClusterSpec.local(ranks, int(share * keeping))), keeping, said
    raise AssertionError("the fastest plan fits what it takes")


def limited(seed: int, share: float) -> Row:
    """A case: planned, and run under its limit.

    Args:
        seed: of network and plan.
        share: of the reserve that is given.
    """
    plan, keeping, said = tight_plan(seed)
    (group,) = plan.data.cluster.groups
    reserve = int(share * sum(each.nbytes for each in plan.data.cluster.reserves_of(group.device)))
    peak = max(plan.prediction.peak_bytes)
    code, used = run_within(plan, seed, peak + reserve)
    row: Row = {"options": said, "ranks": plan.data.cluster.num_devices, "died": bool(code), "failures": []}
    sizes = {"keeping": keeping, "peak": peak, "reserve": reserve, "limit": peak + reserve}
    if code:
        row["failures"] = [f"a rank ended with code {code}"]
    else:
        sizes |= {"used": used, "spare": peak + reserve - used}
    return row | {f"{key}_mib": size / 2**20 for key, size in sizes.items()}


def run_within(plan: pp.Plan, seed: int, limit_bytes: int) -> tuple[int, int]:
    """Train under a limit of private memory: the job's exit code, and the most that a rank had, 0 where one died."""
    with tempfile.TemporaryDirectory() as folder:
        file, found = Path(folder) / "plan.json", Path(folder) / "used.json"
        plan.save(file)
        args = (str(seed), str(file), str(limit_bytes), str(found))
        code = spawn_local(plan.data.cluster.num_devices, "benchmarks.hard_limit_rank", args)
        return code, json.loads(found.read_text()) if found.exists() else 0


def summary(rows: Sequence[Row]) -> Row:
    """All plans."""
    spare = [row["spare_mib"] for row in rows if "spare_mib" in row]
    return {"plans": len(rows), "died": sum(row["died"] for row in rows), "spare_mib": min(spare, default=0.0)}


if __name__ == "__main__":
    SHARE, COUNT = float(os.environ.get("SHARE", "1")), int(os.environ.get("COUNT", "20"))
    CASES = {f"plan {seed}": partial(limited, seed, SHARE) for seed in range(COUNT)}
    raise SystemExit(main("hard_limit", CASES, COLUMNS, summary=summary))
