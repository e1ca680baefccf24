"""Collectives of one layer under tensor parallelism, forward and backward, as planned.

    python -m benchmarks.layer_collectives [--only PATTERN] [--json FILE]

Megatron-LM's layouts (Narayanan et al. 2021; Korthikanti et al. 2022 for those of the sequence) have two all-reduces a
layer in each phase; with the sequence sharded two gathers and two scatters forward, and backward two gathers more, of
what the products read, for weights' gradients. Hand-written attentions (`attentions`) have several sequences a rank.
The 22B GPT is Korthikanti's: one node of eight, its attention written out, microbatches of one and of four.

Columns: `forward` and `backward` count a middle layer's collectives; `mib` is what a rank gives to them in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.attentions import ATTENTIONS, Stack
from benchmarks.megatron_gpt import GPTSettings, gpt_batch, gpt_model
from benchmarks.table import Row, main
from paraplan.api import versions
from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.execution.rank_program import Block, InstrKind, RankProgram, StepKind
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.lowering import lower
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search

COLUMNS = ("case", "forward", "backward", "mib")


def layer_blocks(program: Program, rank: RankProgram, prefix: str) -> dict[str, list[Block]]:
    """The blocks of one microbatch of a layer, by phase ("F", "B"), twice where they run twice.

    Args:
        program, rank: the model, and what one of its ranks does.
        prefix: of the names of the layer's parameters. Segments without any belong to the layer before them.
    """
    inside, here = set(), False
    for index, segment in enumerate(program.segments):
        here = any(name.startswith(prefix) for name in segment.params) if segment.params else here
        if here:
            inside.add(index)
    found: dict[str, list[Block]] = {"F": [], "B": []}
    for step in rank.steps:
        phase = step.block[-1:]
        if step.kind is StepKind.CALL and step.segment in inside and step.microbatch == 0 and phase in found:
            found[phase].append(rank.blocks[step.block])
    return found


def collectives(blocks: list[Block]) -> Counter[str]:
    """Collectives of blocks by kind."""
    return Counter(i.target for block in blocks for i in block.instrs if i.kind is InstrKind.COLLECTIVE)


def given_bytes(blocks: list[Block]) -> int:
    """Bytes that a rank gives to the collectives of blocks."""
    return sum(
        block.values[str(i.args[0])[1:]].nbytes
        for block in blocks
        for i in block.instrs
        if i.kind is InstrKind.COLLECTIVE
    )


def planned(program: Program, cluster: str, pins: Constraints) -> Plan:
    """The planner's answer."""
    job = Job(program, parse_cluster(cluster), OPTIMIZERS["adamw"], ModelRef(display="layer"), versions())
    return search(job, pins, 30.0, certify=False).plan


def _row(make: Callable[[], Program], cluster: str, pins: Constraints) -> Row:
    plan = planned(make(), cluster, pins)
    phases = layer_blocks(plan.program, lower(plan)[0], "layers.1.")
    said = {
        name: ", ".join(f"{count} {target}" for target, count in sorted(collectives(phases[phase]).items()))
        for name, phase in (("forward", "F"), ("backward", "B"))
    }
    return said | {"mib": sum(map(given_bytes, phases.values())) / 2**20}


def _gpt(microbatch: int) -> Program:
    model = gpt_model(GPTSettings(6144, 3, 64, 51200, 2048, tied=True, flash=False))
    return capture(model, gpt_batch(microbatch, 2048), precision="bf16")


def _written(name: str) -> Program:
    with torch.device("meta"):
        model = Stack(name, hidden=4096, heads=32, sequence=2048, vocab=32000)
    ids = torch.zeros((4, 2048), dtype=torch.int64, device="meta")
    return capture(model, {"ids": ids, "labels": ids}, precision="bf16")


CASES = {
    f"{name}{', sequence sharded' if sp else ''}": partial(
        _row, make, cluster, Constraints(dp=1, tp=8, sp=sp, microbatches=1, recompute="none")
    )
    for name, make, cluster in (
        *((f"gpt 22B, microbatch {size}", partial(_gpt, size), "8xA100-80") for size in (1, 4)),
        *((name, partial(_written, name), "8xH100") for name in ATTENTIONS),
    )
    for sp in (False, True)
}

if __name__ == "__main__":
    raise SystemExit(main("layer_collectives", CASES, COLUMNS))
