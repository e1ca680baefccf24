"""Whether a memory schedule may be: every action possible, and what is written in place seen as the program has it.

Possible: an op finds what it reads, a free finds what it frees, what must not be executed twice is not, every op runs
and what the step leaves behind is there in the end. In place: whoever touches a storage before it is written (in the
program's order) also does so before in the schedule, whenever it is executed, and the others after.
"""

from __future__ import annotations

from collections.abc import Sequence

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.memory_actions import Act, MemAction
from paraplan.ir.machine.tiers import TIERS
from paraplan.lowering.flat import GIVEN, FlatProgram


def check_actions(flat: FlatProgram, actions: Sequence[MemAction]) -> None:
    """Replays a schedule.

    Raises:
        InvalidPlanError: names the action and what it lacks.
    """
    resident = {number for number, storage in enumerate(flat.storages) if storage.maker == GIVEN}
    touches: dict[int, list[tuple[int, int]]] = {}
    done: set[int] = set()
    stored: dict[int, str] = {}
    for position, action in enumerate(actions):
        where = f"memory schedule, action {position} ({action})"
        many, what = (len(flat.ops), "ops") if action.act is Act.RUN else (len(flat.tensors), "tensors")
        if action.index >= many:
            raise InvalidPlanError(f"{where}: the step has {many} {what}; the plan was made for another lowering of it")
        if action.act is Act.RUN:
            op = flat.ops[action.index]
            missing = [_name(flat, storage) for storage in op.reads if storage not in resident]
            if missing:
                raise InvalidPlanError(f"{where}: {op.name} reads {', '.join(missing[:3])}, which is not there")
            if action.index in done and not op.repeatable:
                raise InvalidPlanError(f"{where}: {op.name} must not be executed twice")
            held = [_name(flat, storage) for storage in op.makes if storage in resident]
            if held:
                raise InvalidPlanError(f"{where}: {op.name} makes {held[0]}, which is there still; free it first")
            done.add(action.index)
            resident.update(op.makes)
            for storage in op.writes:
                stored.pop(storage, None)
            for storage in dict.fromkeys((*op.reads, *op.writes)):
                touches.setdefault(storage, []).append((position, action.index))
        elif action.act is Act.FREE:
            storage = flat.tensors[action.index]
            if storage not in resident:
                raise InvalidPlanError(f"{where}: {_name(flat, storage)} is not there")
            resident.remove(storage)
        else:
            _copy(flat, action, where, resident, stored)
    _check_end(flat, done, resident)
    _check_writes(flat, touches)


def _copy(flat: FlatProgram, action: MemAction, where: str, resident: set[int], stored: dict[int, str]) -> None:
    storage = flat.tensors[action.index]
    if action.tier not in TIERS:
        raise InvalidPlanError(f"{where}: there is no tier {action.tier!r} (have {', '.join(TIERS)})")
    if action.act is Act.OUT:
        if storage not in resident:
            raise InvalidPlanError(f"{where}: {_name(flat, storage)} is not there")
        stored[storage] = action.tier
    elif storage in resident:
        raise InvalidPlanError(f"{where}: {_name(flat, storage)} is there still; free it first")
    elif stored.get(storage) != action.tier:
        raise InvalidPlanError(
            f"{where}: {_name(flat, storage)} is not on {action.tier}, or what is there was written over since"
        )
    else:
        resident.add(storage)


def _check_end(flat: FlatProgram, done: set[int], resident: set[int]) -> None:
    missed = [index for index in range(len(flat.ops)) if index not in done]
    if missed:
        raise InvalidPlanError(
            f"memory schedule: op {missed[0]} ({flat.ops[missed[0]].name}) never runs, {len(missed)} in all"
        )
    lost = [number for number, s in enumerate(flat.storages) if s.kept and number not in resident]
    if lost:
        raise InvalidPlanError(f"memory schedule: {_name(flat, lost[0])} must be there in the end and is not")


def _check_writes(flat: FlatProgram, touches: dict[int, list[tuple[int, int]]]) -> None:
    for storage, found in touches.items():
        for position, writer in found:
            if storage not in flat.ops[writer].writes:
                continue
            for other, op in found:
                if op != writer and (other < position) != (op < writer):
                    raise InvalidPlanError(
                        f"memory schedule, action {other} (R{op}): {flat.ops[op].name} touches {_name(flat, storage)} "
                        f"{'before' if other < position else 'after'} it is overwritten by op {writer} "
                        f"({flat.ops[writer].name}), in the program it does so "
                        f"{'after' if other < position else 'before'}"
                    )


def _name(flat: FlatProgram, storage: int) -> str:
    """A storage by the label of the first value in it."""
    number = flat.storages[storage].tensor
    label = next(value.label for value in flat.values if value.storage == storage)
    return f"tensor {number} ({label})" if number >= 0 else str(label)
