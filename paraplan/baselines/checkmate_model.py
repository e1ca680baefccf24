"""Checkmate's program of a step: which ops run and which tensors are held in each stage.

Stage t (0 … n − 1) executes op t for the first time, before it any of ops 0 … t − 1 again, in order, each once.

    R[t, i] = 1  op i is executed in stage t         (R[t, t] = 1; 0 for i > t)
    S[t, v] = 1  tensor v is held when stage t begins
    FREE[t, v, k] = 1  v is freed in stage t right after op k, which reads or makes it
    U[t, k]      bytes held in stage t when op k has run

    minimise Σ time_i R[t, i]  subject to
    R[t, j] ≤ R[t, maker(v)] + S[t, v]                    for v read by j                              (dependencies)
    S[t+1, v] ≤ S[t, v] + R[t, maker(v)]                                                               (nothing from
    nothing) 1 − FREE[t, v, k] ≤ hazards ≤ κ (1 − FREE[t, v, k]),  hazards = (1 − R[t, k]) + S[t+1, v] + Σ_{later
    readers j} R[t, j] U[t, k] = U[t, k−1] − Σ freed after k − 1 + Σ bytes · A[t, v]          with A[t, v] ≥ R[t, maker]
    − S[t, v]   (arrivals) U before k + bytes made by k + workspace_k ≤ budget   where R[t, k]

S after the last stage is what is kept. Beyond the paper: several results per op (A; with one result R + S ≤ 1 and A =
R), workspaces, tensors given with the step, and ops that must not be executed twice.

Source: Jain, Jain, Nrusimha, Gholami, Abbeel, Keutzer, Stoica & Gonzalez 2020 (Checkmate), section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paraplan.baselines.common import Clock
from paraplan.planner.memory.problem import GIVEN, MemoryProblem
from paraplan.planner.solvers.milp import Milp, MilpBuilder


@dataclass(frozen=True)
class Model:
    """The program, and where its columns are.

    Attributes:
        milp: the program; seconds.
        executed: R's column by (stage, op).
        held: S's column by (stage, tensor).
    """

    milp: Milp
    executed: dict[tuple[int, int], int]
    held: dict[tuple[int, int], int]


class _Writer:
    def __init__(self, problem: MemoryProblem, budget_bytes: int) -> None:
        self.problem, self.budget = problem, budget_bytes
        self.count = len(problem.ops)
        self.builder = MilpBuilder()
        self.size = np.array([tensor.nbytes for tensor in problem.tensors], float)
        self.executed: dict[tuple[int, int], int] = {}
        self.held: dict[tuple[int, int], int] = {}
        self.arrived: dict[tuple[int, int], int] = {}

    def columns(self) -> None:
        problem, builder = self.problem, self.builder
        for stage in range(self.count):
            for index in range(stage + 1):
                op, first = problem.ops[index], index == stage
                upper = 1.0 if first or op.repeatable else 0.0
                self.executed[stage, index] = builder.add_columns(
                    1, lower=float(first), upper=upper, integer=True, objective=op.time_s
                )
        for stage in range(self.count + 1):
            for index, tensor in enumerate(problem.tensors):
                if tensor.maker < stage:
                    must = (stage == 0 and tensor.maker == GIVEN) or (stage == self.count and tensor.kept)
                    upper = 0.0 if stage == self.count and not tensor.kept else 1.0
                    self.held[stage, index] = builder.add_columns(1, lower=float(must), upper=upper, integer=True)
        for stage in range(self.count):
            for index in range(stage + 1):
                several = len(problem.ops[index].makes) > 1
                for made in problem.ops[index].makes:
                    own = builder.add_columns(1, upper=1.0) if several else self.executed[stage, index]
                    self.arrived[stage, made] = own

    def dependencies(self) -> None:
        problem, row = self.problem, self.builder.add_row
        for (stage, index), run in self.executed.items():
            for tensor in problem.ops[index].reads:
                sources = [x for x in (self._made(stage, tensor), self.held.get((stage, tensor))) if x is not None]
                row([run, *sources], [1.0] + [-1.0] * len(sources), upper=0.0)
            for tensor in problem.ops[index].makes:
                there = self.held.get((stage, tensor))
                if there is None:
                    continue
                if len(problem.ops[index].makes) == 1:
                    row([run, there], [1.0, 1.0], upper=1.0)
                else:
                    row([run, there, self.arrived[stage, tensor]], [1.0, -1.0, -1.0], upper=0.0)
        for (stage, tensor), here in self.held.items():
            if stage:
                before = (self._made(stage - 1, tensor), self.held.get((stage - 1, tensor)))
                sources = [x for x in before if x is not None]
                row([here, *sources], [1.0] + [-1.0] * len(sources), upper=0.0)

    def memory(self, stage: int) -> None:
        held = {self.held[stage, t]: self.size[t] for t in range(len(self.size)) if (stage, t) in self.held}
        first = self.builder.add_columns(stage + 1, upper=float(self.budget))
        self.builder.add_row(
            [first, *held],
            [1.0, *(-x for x in held.values())],
            lower=self.problem.base_bytes,
            upper=self.problem.base_bytes,
        )
        for index in range(stage + 1):
            before = first + index
            op, run = self.problem.ops[index], self.executed[stage, index]
            need = float(sum(self.size[t] for t in op.makes) + op.workspace_bytes)
            self.builder.add_row([before, run], [1.0, need], upper=float(self.budget))
            freed = [(self._free(stage, tensor, index), tensor) for tensor in (*op.reads, *op.makes)]
            if index == stage:
                continue
            terms = {before: -1.0, before + 1: 1.0}
            for tensor in op.makes:
                arrival = self.arrived[stage, tensor]
                terms[arrival] = terms.get(arrival, 0.0) - self.size[tensor]
            for column, tensor in freed:
                terms[column] = terms.get(column, 0.0) + self.size[tensor]
            self.builder.add_row(list(terms), list(terms.values()), lower=0.0, upper=0.0)

    def _free(self, stage: int, tensor: int, index: int) -> int:
        """FREE's column, with the rows that define it."""
        column = self.builder.add_columns(1, upper=1.0, integer=True)
        later = [self.executed[stage, j] for j in self.problem.readers[tensor] if index < j <= stage]
        next_held = self.held.get((stage + 1, tensor))
        hazards = later + ([] if next_held is None else [next_held])
        most = float(len(hazards) + 1)
        run = self.executed[stage, index]
        # hazards = 1 − R + Σ: 1 − FREE ≤ hazards and hazards ≤ most (1 − FREE)
        self.builder.add_row([column, run, *hazards], [1.0, -1.0] + [1.0] * len(hazards), lower=0.0)
        self.builder.add_row([column, run, *hazards], [most, -1.0] + [1.0] * len(hazards), upper=most - 1.0)
        return column

    def _made(self, stage: int, tensor: int) -> int | None:
        return self.executed.get((stage, self.problem.tensors[tensor].maker))


def checkmate_model(problem: MemoryProblem, budget_bytes: int, clock: Clock) -> Model | None:
    """The program of a step within a budget; None where writing it took all the time.

    Args:
        problem: ops and tensors.
        budget_bytes: that may be held.
        clock: time that is left.
    """
    writer = _Writer(problem, budget_bytes)
    writer.columns()
    for stage in range(writer.count):
        if clock.over:
            return None
        writer.memory(stage)
    writer.dependencies()
    return Model(writer.builder.build(), writer.executed, writer.held)
