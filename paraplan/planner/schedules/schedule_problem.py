"""What a pipeline schedule is made for: what stages cost, and the orders of computations it consists of.

An order is what one position of the pipeline computes, in order: F, and B or I and W, of its stages' microbatches.
A position stands for a group of equal ranks (`ir.execution.schedule.spread`).
"""

from __future__ import annotations

from paraplan.ir.errors import ConstraintError
from paraplan.ir.execution.schedule import Action, ActionKind
from paraplan.ir.struct import Value

Orders = tuple[tuple[Action, ...], ...]
"""Per position, its computations in order."""

COMPUTE = frozenset({ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W})
BACKWARD = frozenset({ActionKind.B, ActionKind.I})


class StageCosts(Value, frozen=True, kw_only=True):
    """What one microbatch of a stage takes.

    Attributes:
        forward_s: F.
        backward_s: B, the whole backward.
        input_grad_s, weight_grad_s: I and W, where the backward is split.
        send_forward_s: its output's way to the next stage, where that is on another position.
        send_backward_s: its input gradient's way to the stage before.
        activation_bytes: held from the start of F to the end of B or I.
        weight_grad_bytes: held from the end of I to that of W.
        fixed_bytes: held always (parameters, gradients, optimizer states).
        grad_bytes: of these, gradients, which are there from the end of the first B or W on only.
        reduced_bytes: of these, what the end of the last gives up: they are reduced then.
        gathered_bytes: of fixed_bytes, copies of parameters that are there from the first F to the end of the last B or
            I.
    """

    forward_s: float = 1.0
    backward_s: float = 2.0
    input_grad_s: float = 1.0
    weight_grad_s: float = 1.0
    send_forward_s: float = 0.0
    send_backward_s: float = 0.0
    activation_bytes: int = 1
    weight_grad_bytes: int = 1
    fixed_bytes: int = 0
    grad_bytes: int = 0
    reduced_bytes: int = 0
    gathered_bytes: int = 0

    def seconds(self, kind: ActionKind) -> float:
        """What one of its computations takes."""
        return {
            ActionKind.F: self.forward_s,
            ActionKind.B: self.backward_s,
            ActionKind.I: self.input_grad_s,
            ActionKind.W: self.weight_grad_s,
        }[kind]


class PipelineProblem(Value, frozen=True, kw_only=True):
    """What a schedule is searched for.

    Attributes:
        stages: costs per stage.
        num_positions, num_microbatches: sizes.
        placement: per stage, its position; () to try the usual ones (`shop.placements`).
        memory_bytes: per position, what it holds at most; () for no limit.
        split_backward: whether I and W may be apart.
        replicas: whether a position may hold a stage of a second copy of the model (GEMS, Chimera).
    """

    stages: tuple[StageCosts, ...]
    num_positions: int
    num_microbatches: int
    placement: tuple[int, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    split_backward: bool = True
    replicas: bool = False


def check_costs(stages: tuple[StageCosts, ...]) -> None:
    """Refuse costs that mean nothing.

    Raises:
        ConstraintError: no stage, or a negative or infinite number; names stage and field.
    """
    if not stages:
        raise ConstraintError("a pipeline has at least one stage; none was given")
    for index, stage in enumerate(stages):
        for name in stage.__struct_fields__:
            value = getattr(stage, name)
            if not 0 <= value < float("inf"):
                raise ConstraintError(f"stage {index}: {name} is {value}; give a finite number of at least 0")


def check_sizes(name: str, num_positions: int, num_microbatches: int) -> None:
    """Refuse an empty pipeline or step.

    Args:
        name: of the schedule.
        num_positions: of the pipeline.
        num_microbatches: of a step.
    Raises:
        ConstraintError: fewer than one position or microbatch.
    """
    if num_positions < 1 or num_microbatches < 1:
        raise ConstraintError(
            f"schedule {name}: {num_positions} positions and {num_microbatches} microbatches; both are at least 1"
        )


def at(stage: int, kind: ActionKind, microbatch: int) -> Action:
    """An action, briefly.

    Args:
        stage, kind, microbatch: its parts.
    """
    return Action(stage=stage, kind=kind, microbatch=microbatch)


def runner_of(orders: Orders) -> dict[tuple[int, int], int]:
    """Per (stage, microbatch), the position that has its F."""
    return {
        (action.stage, action.microbatch): position
        for position, order in enumerate(orders)
        for action in order
        if action.kind is ActionKind.F
    }


def holders_of(orders: Orders) -> tuple[tuple[int, ...], ...]:
    """Per stage, the positions that compute it; that of its lowest microbatch first."""
    found: dict[int, dict[int, None]] = {}
    for (stage, _), position in sorted(runner_of(orders).items()):
        found.setdefault(stage, {})[position] = None
    return tuple(tuple(found[stage]) for stage in range(len(found)))


def stages_of(orders: Orders) -> tuple[tuple[int, ...], ...]:
    """Per position, the stages it computes, ascending."""
    return tuple(tuple(sorted({action.stage for action in order})) for order in orders)
