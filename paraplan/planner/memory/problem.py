"""One training step as ops that make and read tensors: what planners of memory decide over.

A tensor here is a storage: views of it are it. Ops come in an order that runs. Executing one needs what it reads
resident, then holds what it reads, what it makes and its workspace at once. A tensor may be freed and made again by
executing its op again, or be copied to a slower tier and back. What is always there (parameters, optimizer states) is
`base_bytes`. Minimise the seconds of the step such that the most bytes resident at once are within a budget.

Source: the formulation is Checkmate's (Jain et al. 2020, section 4) with workspaces, several results per op, and tiers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from paraplan.ir.errors import InvalidPlanError

GIVEN = -1
"""The maker of a tensor that is there before the first op."""


@dataclass(frozen=True)
class MemTensor:
    """A storage.

    Attributes:
        nbytes: its size.
        maker: index of the op that makes it, or `GIVEN`.
        kept: whether it must be resident after the last op (a gradient, the loss).
        rewritten: whether an op writes it in place after it was made: no copy of it stays true.
    """

    nbytes: int
    maker: int
    kept: bool = False
    rewritten: bool = False


@dataclass(frozen=True)
class MemOp:
    """Something executed on the device.

    Attributes:
        name: what people call it.
        time_s: seconds of one execution.
        reads, makes: tensor indices, each once.
        workspace_bytes: the most it allocates and drops inside.
        repeatable: whether it may be executed more than once (an update of running statistics may not).
        backward: whether it belongs to the backward.
        source: the user's line it comes from; "" where that is not known.
    """

    name: str
    time_s: float
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    workspace_bytes: int = 0
    repeatable: bool = True
    backward: bool = False
    source: str = ""

    @property
    def label(self) -> str:
        """Its name, and where it comes from."""
        return f"{self.name}, {self.source}" if self.source else self.name


@dataclass(frozen=True)
class Tier:
    """Slower memory that tensors can be copied to; copies run beside the ops, one at a time each way.

    Attributes:
        name: of the tier.
        capacity_bytes: what it holds.
        out_bytes_per_s, back_bytes_per_s: rates of copies to it and from it.
        latency_s: of each copy.
    """

    name: str
    capacity_bytes: int
    out_bytes_per_s: float
    back_bytes_per_s: float
    latency_s: float = 0.0

    def out_s(self, nbytes: int) -> float:
        """Seconds of one copy to the tier."""
        return self.latency_s + nbytes / self.out_bytes_per_s

    def back_s(self, nbytes: int) -> float:
        """Seconds of one copy back."""
        return self.latency_s + nbytes / self.back_bytes_per_s


@dataclass(frozen=True)
class MemoryProblem:
    """A step.

    Attributes:
        ops: in the given order, in which they run.
        tensors: all storages.
        base_bytes: always resident beside them.
        tiers: where tensors may be copied to.
        in_order: whether first executions must keep the given order (ops that write in place tell nobody so).
    """

    ops: tuple[MemOp, ...]
    tensors: tuple[MemTensor, ...]
    base_bytes: int = 0
    tiers: tuple[Tier, ...] = ()
    in_order: bool = False

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Per tensor, the ops that read it, in order."""
        found: list[list[int]] = [[] for _ in self.tensors]
        for index, op in enumerate(self.ops):
            for tensor in op.reads:
                found[tensor].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def compute_s(self) -> float:
        """Seconds of every op once."""
        return sum(op.time_s for op in self.ops)

    def working_bytes(self, op: int) -> int:
        """What must be resident while an op executes, `base_bytes` included: no budget can be less."""
        it = self.ops[op]
        held = sum(self.tensors[tensor].nbytes for tensor in (*it.reads, *it.makes))
        return self.base_bytes + held + it.workspace_bytes


def verify_problem(problem: MemoryProblem) -> None:
    """Checks that the ops run in the order given.

    Raises:
        InvalidPlanError: an op reads what was not made before it, or a tensor's maker does not make it.
    """
    made = {index for index, tensor in enumerate(problem.tensors) if tensor.maker == GIVEN}
    for index, op in enumerate(problem.ops):
        missing = [tensor for tensor in op.reads if tensor not in made]
        if missing:
            raise InvalidPlanError(f"op {index} ({op.name}) reads tensors {missing}, which no earlier op makes")
        wrong = [tensor for tensor in op.makes if problem.tensors[tensor].maker != index]
        if wrong:
            raise InvalidPlanError(f"op {index} ({op.name}) makes tensors {wrong}, whose maker is another")
        made.update(op.makes)
    if len(made) < len(problem.tensors):
        raise InvalidPlanError(f"tensors {sorted(set(range(len(problem.tensors))) - made)} are made by no op")
