"""A small model, and random memory schedules of its step."""

from __future__ import annotations

import functools
import itertools
import random

import torch
from msgspec.structs import replace
from torch import nn
from torch.nn import functional as F

from paraplan.capture import capture
from paraplan.capture.reference import run_step
from paraplan.cost_models.predict import plan_costs
from paraplan.ir.execution.memory_actions import Act, Actions, format_actions, free, parse_actions
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.lowering import lower
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.memory.flatten import Flattened, flatten
from paraplan.planner.memory.memory_schedule import freeing
from paraplan.planner.search import search


class Net(nn.Module):
    """Dropout, a tied weight (an accumulator that grows), a buffer that is written, and views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.gelu(self.first(x)), 0.3, self.training)
        x = self.norm(x)
        x = F.dropout(torch.tanh(F.linear(x, self.first.weight.T.reshape(6, 8)[:, :8])), 0.2, self.training)
        x = F.relu(self.first(x)).transpose(0, 1).reshape(8, -1).T
        return F.cross_entropy(self.last(x), y)


BATCH = {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), "y": torch.tensor([0, 2, -100, 4])}


@functools.cache
def planned() -> tuple[nn.Module, Plan, Flattened, object]:
    torch.manual_seed(0)
    model = Net().train()
    program = capture(model, BATCH, precision="fp64")
    job = Job(program, ClusterSpec.local(1), OPTIMIZERS["sgd"], ModelRef(display="net"), {})
    plan = search(job, Constraints(mesh=(1,), microbatches=1)).plan
    params = {name: p.detach().double() for name, p in model.named_parameters()}
    buffers = {name: b.double() if b.is_floating_point() else b for name, b in model.named_buffers()}
    return (
        model,
        plan,
        flatten(lower(plan)[0], plan_costs(plan)[0]),
        run_step(program, params, buffers, {**BATCH, "x": BATCH["x"].double()}, 0),
    )


def ordered(actions: Actions) -> Plan:
    return replace(planned()[1], memory_actions=format_actions(actions), prediction=None, certificate=None)


def random_schedule(draw: random.Random) -> Actions:
    """First executions in order, random ops again between them, and some frees put off."""
    problem, ops = planned()[2].problem, planned()[2].flat.ops
    order: list[int] = []
    for op in range(len(problem.ops)):
        written = {storage for done in ops[:op] for storage in done.writes}
        earlier = [a for a in range(op) if problem.ops[a].repeatable and written.isdisjoint(ops[a].reads)]
        order += sorted(draw.sample(earlier, min(len(earlier), draw.choice((0, 0, 1, 3)))))
        order.append(op)
    actions = list(freeing(problem, tuple(order)))
    for position in reversed(range(len(actions))):
        if actions[position].act is Act.FREE and draw.random() < 0.3:
            tensor = actions.pop(position).index
            again = next(
                (
                    at
                    for at in range(position, len(actions))
                    if actions[at].act is Act.RUN and tensor in problem.ops[actions[at].index].makes
                ),
                len(actions),
            )
            actions.insert(draw.randint(position, again), free(tensor))
    return tuple(actions)


def with_copies(draw: random.Random) -> Actions:
    """First executions in order; some tensors are away between two of their readers, often without time to be so."""
    problem, ops = planned()[2].problem, planned()[2].flat.ops
    written = {storage for op in ops for storage in op.writes}
    tensors = [t for t, storage in enumerate(planned()[2].flat.tensors) if storage not in written]
    actions = list(freeing(problem, tuple(range(len(problem.ops)))))
    for tensor in draw.sample(tensors, len(tensors) // 3):
        at = [
            place
            for place, action in enumerate(actions)
            if action.act is Act.RUN and tensor in (*problem.ops[action.index].reads, *problem.ops[action.index].makes)
        ]
        gaps = [(a, b) for a, b in itertools.pairwise(at) if b - a > 2]
        if not gaps:
            continue
        first, reader = draw.choice(gaps)
        out, leaves, back = sorted(draw.sample(range(first + 1, reader + 3), 3))
        for place, text in (
            (min(back, reader), f"B{tensor}:host"),
            (min(leaves, reader), f"F{tensor}"),
            (min(out, reader), f"O{tensor}:host"),
        ):
            actions[place:place] = parse_actions(text)
    return tuple(actions)
