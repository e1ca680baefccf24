"""What a run goes on from: parameters, written buffers, optimizer states and groups, schedules, scaler, steps, seed.

    trainer.save("checkpoint", optimizer, scheduler)                # all ranks; torch.distributed.checkpoint's files
    trainer.resume("checkpoint", optimizer, scheduler)              # under this or another plan

`training_state` is the same as a dict of DTensors, for savers of one's own; `full_training_state` has whole tensors,
for `torch.save` and for `fit`. Between an optimizer's step and the next training step; gradients are no part of it.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from paraplan.ir.errors import PlanMismatchError, RuntimeFailure
from paraplan.ir.execution import names as outer_names
from paraplan.ir.model.program import Program
from paraplan.kernels.dtypes import dtype_name
from paraplan.runtime.state import progress
from paraplan.runtime.state.checkpoint import Checkpointing, is_like
from paraplan.runtime.state.params import cut, pad
from paraplan.runtime.state.progress import (
    Optimizers,
    check_header,
    check_mapping,
    header,
    optimizers_in,
    pack,
    schedulers_in,
    unpack,
)

ABOUT = "about"
"""Where a checkpoint has what is no tensor."""


class TrainingStates(Checkpointing):
    """The part of `Trainer` that saves runs and resumes them."""

    def training_state(
        self, optimizer: Optimizers = None, scheduler: Any = None, scaler: Any = None, create: bool = False
    ) -> dict[str, Any]:
        """Everything this run goes on from, as DTensors that share storage and one leaf of numbers; all ranks call.

        Args:
            optimizer: of this trainer, or several.
            scheduler: torch's, or several.
            scaler: of this trainer.
            create: make optimizer states where there are none yet, to have a checkpoint loaded into them.
        Raises:
            PlanMismatchError: an optimizer has parameters of somebody else's, or ranks have other groups.
        """
        optimizers = optimizers_in(optimizer)
        found = {"model": self.state_dict(), "optimizer": {}, ABOUT: b""}
        for each in optimizers:
            found["optimizer"] |= self.slots(each, create)
        about = about_run(
            self.plan.program,
            optimizers,
            self.state.params,
            scheduler,
            scaler,
            self.steps_done,
            self.state.seed,
            self.transport.everyones,
        )
        found[ABOUT] = pack(about)
        unpack(found[ABOUT])  # what cannot be read again is told now
        return found

    def load_training_state(
        self, state: Mapping[str, Any], optimizer: Optimizers = None, scheduler: Any = None, scaler: Any = None
    ) -> None:
        """The inverse, from DTensors laid out as `training_state` gives them; all ranks call.

        Args:
            state: as `training_state` gave it, loaded into, or of this plan.
            optimizer, scheduler, scaler: as many as it was saved with; schedulers made on the optimizers before.
        Raises:
            PlanMismatchError: it is of another model, or its groups, schedules or scaler are not those given.
        """
        numbers = self._numbers(state, optimizer, scheduler, scaler)
        self.load_state_dict(state["model"])
        for each in optimizers_in(optimizer):
            self.load_slots(each, state["optimizer"])
        self._take_numbers(numbers, optimizer, scheduler, scaler)

    def full_training_state(
        self, optimizer: Optimizers = None, scheduler: Any = None, scaler: Any = None, rank0_only: bool = False
    ) -> dict[str, Any]:
        """`training_state` with whole tensors on cpu, gathered one by one, for `torch.save`; all ranks call.

        Its "optimizer" has the form of torch.distributed.checkpoint.state_dict.get_optimizer_state_dict.

        Args:
            optimizer, scheduler, scaler: as for `training_state`.
            rank0_only: only rank 0 keeps it; the others return {}.
        """
        about = unpack(self.training_state(optimizer, scheduler, scaler)[ABOUT])
        slots: dict[str, dict[str, Any]] = {}
        for each in optimizers_in(optimizer):
            slots |= self._full_slots(each)
        model = self.full_training_tensors(rank0_only)
        if rank0_only and self.transport.rank != 0:
            return {}
        return {"model": model, "optimizer": {"state": slots, "param_groups": about.pop("groups")}, ABOUT: about}

    def load_full_training_state(
        self, full: Mapping[str, Any], optimizer: Optimizers = None, scheduler: Any = None, scaler: Any = None
    ) -> None:
        """Take in what `full_training_state` gave, the same on every rank; each keeps its shards.

        Args:
            full: the state, whole tensors.
            optimizer, scheduler, scaler: as of `load_training_state`.
        Raises:
            PlanMismatchError: as `load_training_state`.
        """
        numbers = self._numbers(full, optimizer, scheduler, scaler)
        self.load_full_state_dict(full["model"])
        program, here = self.state.program, self.state.executor.coordinates
        for each in optimizers_in(optimizer):
            mine: dict[str, dict[str, Any]] = {}
            for name, layout in self.state.layouts.items():
                shape = self.plan.program.params[name].spec.shape
                mine[name] = {
                    slot: cut(x, layout, program.mesh_shape, here) if is_like(x, shape) else x
                    for slot, x in full["optimizer"]["state"].get(name, {}).items()
                }
            self.load_slots(each, {name: slots for name, slots in mine.items() if slots})
        self._take_numbers(numbers, optimizer, scheduler, scaler)

    def save(self, folder: str | Path, optimizer: Optimizers = None, scheduler: Any = None, scaler: Any = None) -> None:
        """Write `training_state` as a checkpoint of torch.distributed.checkpoint's; all ranks call.

        Args:
            folder: of the checkpoint.
            optimizer, scheduler, scaler: as of `training_state`.
        Raises:
            RuntimeFailure: it cannot be written there.
        """
        state = self.training_state(optimizer, scheduler, scaler)
        try:
            dcp.save(state, checkpoint_id=folder)
        except (CheckpointException, OSError) as fault:
            raise RuntimeFailure(
                f"the checkpoint cannot be written to {folder} ({_reason(fault)}); give a folder that can be made or "
                "written"
            ) from None

    def resume(
        self, folder: str | Path, optimizer: Optimizers = None, scheduler: Any = None, scaler: Any = None
    ) -> None:
        """Go on from what `save` wrote, under any plan of the model; all ranks call.

        Args:
            folder: of the checkpoint.
            optimizer, scheduler, scaler: as of `load_training_state`.
        Raises:
            PlanMismatchError: there is no such checkpoint, or as `load_training_state`.
        """
        metadata = checkpoint_metadata(folder)
        about: dict[str, Any] = {ABOUT: b""}
        _load(about, folder)
        self._numbers(about, optimizer, scheduler, scaler)
        self.flush()
        there, unread = metadata.state_dict_metadata, self.unread.tensors  # earlier checkpoints have no unread ones
        own = {name: x for name, x in self.state_dict().items() if name not in unread or f"model.{name}" in there}
        state = {"model": own, "optimizer": self._blank_slots(metadata), ABOUT: b""}
        _load(state, folder)
        self.load_training_state(state, optimizer, scheduler, scaler)

    def _blank_slots(self, metadata: Metadata) -> dict[str, dict[str, Any]]:
        """Room for this rank's part of the optimizer states that a checkpoint has."""
        found: dict[str, dict[str, Any]] = {}
        for key, path in (metadata.planner_data or {}).items():
            if path[0] != "optimizer" or path[1] not in self.state.params:
                continue
            name, slot, kept = path[1], path[2], metadata.state_dict_metadata[key]
            param = self.state.params[name]
            value: Any = None
            if isinstance(kept, TensorStorageMetadata):
                value = torch.empty(kept.size, dtype=kept.properties.dtype)
                if is_like(value, self.plan.program.params[name].spec.shape):
                    blank = torch.empty(param.shape, dtype=value.dtype, device=self.slots_device(name))
                    value = self._dtensor(name, blank, self.state.layouts[name])
            found.setdefault(name, {})[slot] = value
        return found

    def _full_slots(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """Optimizer states whole on every rank, in one order on all of them."""
        self.state.executor.copier.settle()
        own: dict[str, dict[str, Any]] = {}
        for name, param in self.state.params.items():
            slots = optimizer.state.get(param, {})
            own[name] = {key: x.dtype if is_like(x, param.shape) else x for key, x in slots.items()}
        told: dict[str, dict[str, Any]] = {}
        for ranks in self.transport.everyones(own):
            told |= {name: slots for name, slots in ranks.items() if slots and name not in told}
        return {name: {key: self._full_slot(optimizer, name, key, x) for key, x in told[name].items()} for name in told}

    def _full_slot(self, optimizer: torch.optim.Optimizer, name: str, key: str, told: Any) -> Any:
        """One of them, of which the ranks that have it told the dtype where it has its parameter's shape."""
        if not isinstance(told, torch.dtype):
            return copy.deepcopy(told.cpu() if isinstance(told, Tensor) else told)
        spec = self.plan.program.params[name].spec
        spec = type(spec)(dtype_name(told), spec.shape)

        def held(of: str) -> Any:
            outer = self.state.program.outer[outer_names.state(of)]
            return pad(optimizer.state[self.state.params[of]][key].detach(), outer.shape), self.state.layouts[of]

        return self.whole(name, spec, held).cpu().clone()

    def _numbers(self, state: Mapping[str, Any], optimizer: Optimizers, scheduler: Any, scaler: Any) -> dict[str, Any]:
        """What a state has beside tensors, having refused what does not belong to what is given."""
        optimizers = optimizers_in(optimizer)
        groups = progress.groups_of(optimizers, self.state.params, self.transport.everyones)
        return read_numbers(self.plan.program, state, optimizers, groups, scheduler, scaler)

    def _take_numbers(self, numbers: Mapping[str, Any], optimizer: Optimizers, scheduler: Any, scaler: Any) -> None:
        give_numbers(numbers, optimizers_in(optimizer), scheduler, scaler)
        self.steps_done = numbers["steps_done"]
        self.state.seed = self.state.seed if numbers["seed"] is None else numbers["seed"]


def about_run(
    program: Program,
    optimizers: list[torch.optim.Optimizer],
    params: Mapping[str, nn.Parameter],
    scheduler: Any,
    scaler: Any,
    steps_done: int,
    seed: int | None,
    everyones: Callable[[Any], list[Any]] = lambda own: [own],
) -> dict[str, Any]:
    """What a training state has beside tensors.

    Args:
        program: that is trained.
        optimizers, scheduler, scaler: that train it.
        params: the model's names -> what optimizers have.
        steps_done: so far.
        seed: of the run.
        everyones: a value of this rank -> those of all.
    """
    progress.check_scaler(scaler)
    return {
        "header": header(program),
        "groups": progress.groups_of(optimizers, params, everyones),
        "others": [progress.others_of(each) for each in optimizers],
        "schedules": progress.schedules_of(schedulers_in(scheduler)),
        "scaler": None if scaler is None else scaler.state_dict(),
        "steps_done": steps_done,
        "seed": seed,
    }


def read_numbers(
    program: Program,
    state: Mapping[str, Any],
    optimizers: list[torch.optim.Optimizer],
    groups: progress.Groups,
    scheduler: Any,
    scaler: Any,
) -> dict[str, Any]:
    """What a training state has beside tensors, and which saved group each group takes its options from.

    Args:
        program: that is trained.
        state: the saved one.
        optimizers, scheduler, scaler: that train it.
        groups: of the optimizers, by names of their parameters.
    Raises:
        PlanMismatchError: it is of another model, or not of what is given.
    """
    check_mapping(state, "a training state", "training_state or full_training_state")
    progress.check_scaler(scaler)
    about = state.get(ABOUT)
    numbers = unpack(about) if isinstance(about, bytes) and about else dict(about or {})
    check_header(program, numbers.get("header"))
    saved = numbers.get("groups", (state.get("optimizer") or {}).get("param_groups", []))
    if bool(saved) != bool(optimizers):
        there, given = ("an", "none was") if saved else ("no", "one was")
        raise PlanMismatchError(
            f"the training state has {there} optimizer's groups and states, and {given} given; give the optimizers it "
            "was saved with, or load parameters alone with load_state_dict"
        )
    if (numbers["scaler"] is None) != (scaler is None) and program.precision == numbers["header"]["precision"]:
        raise PlanMismatchError("the training state was saved with a scaler, or this is; give both one, or neither")
    if len(schedulers_in(scheduler)) != len(numbers["schedules"]):
        progress.take_schedules(schedulers_in(scheduler), numbers["schedules"], optimizers, [])
    read = {name for segment in program.segments for name in segment.params}
    known = read.union(*(group["params"] for group in saved))
    groups = [{**group, "params": [name for name in group["params"] if name in known]} for group in groups]
    return {**numbers, "groups": saved, "match": progress.matched(groups, saved)}


def give_numbers(
    numbers: Mapping[str, Any], optimizers: list[torch.optim.Optimizer], scheduler: Any, scaler: Any
) -> None:
    """Options of groups, states of schedules and of the scaler.

    Args:
        numbers: of `read_numbers`.
        optimizers, scheduler, scaler: that train the model.
    """
    progress.take_groups(optimizers, numbers["groups"], numbers["match"])
    progress.take_schedules(schedulers_in(scheduler), numbers["schedules"], optimizers, numbers["match"])
    for optimizer, others in zip(optimizers, numbers["others"], strict=False):
        optimizer.state.update(others)
    if scaler is not None and numbers["scaler"] is not None:
        scaler.load_state_dict(numbers["scaler"])


_UNREADABLE = (OSError, ValueError, EOFError, pickle.UnpicklingError)


def _reason(fault: BaseException) -> str:
    """The first fault of the ranks'."""
    failures = getattr(fault, "failures", None) or {0: (fault, None)}
    cause = next(iter(failures.values()))[0]
    return f"{type(cause).__name__}: {cause}"


def _load(state: dict[str, Any], folder: str | Path) -> None:
    try:
        dcp.load(state, checkpoint_id=folder)
    except (CheckpointException, *_UNREADABLE) as fault:
        raise PlanMismatchError(
            f"the checkpoint in {folder} cannot be read ({_reason(fault)}); give a folder that trainer.save wrote "
            "whole, of this model"
        ) from fault


def checkpoint_metadata(folder: str | Path) -> Metadata:
    """What a checkpoint says it has.

    Raises:
        PlanMismatchError: there is none, or none that `save` wrote.
    """
    try:
        metadata = dcp.FileSystemReader(folder).read_metadata()
    except (*_UNREADABLE, AttributeError, ImportError, LookupError, TypeError) as fault:
        raise PlanMismatchError(
            f"{folder} has no checkpoint that can be read ({type(fault).__name__}: {fault}); give the folder that "
            "trainer.save wrote"
        ) from None
    if ABOUT not in metadata.state_dict_metadata:
        raise PlanMismatchError(
            f"the checkpoint in {folder} has parameters and states without steps, groups and seed: it was not written "
            "by trainer.save. Load it with torch.distributed.checkpoint into trainer.state_dict()"
        )
    return metadata
