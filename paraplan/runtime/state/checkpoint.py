"""A rank's parameters as the rest of torch knows them: DTensors, full tensors, checkpoints.

What counts is the copy the optimizer updates (a float32 master under bf16, where there is one); the stored
copies follow from it. `state_dict` holds DTensors that share storage with the trainer, so
`torch.distributed.checkpoint.save` and `load` work on it as usual and a checkpoint of one plan loads into another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from paraplan.ir.errors import PlanMismatchError, RuntimeFailure
from paraplan.ir.execution import names as outer_names
from paraplan.ir.machine import mesh as ir_mesh
from paraplan.ir.machine.mesh import Layout, parse_layout
from paraplan.ir.machine.rank_groups import counted_here
from paraplan.ir.model.program import master_dtype, trained_params
from paraplan.ir.model.strides import contiguous_strides
from paraplan.ir.model.tensor import TensorSpec
from paraplan.runtime.rank import Rank
from paraplan.runtime.state.params import join_over
from paraplan.runtime.state.progress import check_mapping, groups_of, matched, pack, take_groups, unpack
from paraplan.runtime.state.unread import UnreadState
from paraplan.runtime.trainer_core import TrainerCore
from paraplan.runtime.transport.distributed import DistributedTransport


class Checkpointing(TrainerCore):
    """The part of `Trainer` that gives out and takes in parameters and optimizer states."""

    state: Rank
    transport: DistributedTransport
    frozen_dtypes: Mapping[str, torch.dtype]
    """Of parameters that are not trained, as the user's model has them."""
    unread: UnreadState

    @property
    def steps_done(self) -> int:
        """Steps taken, which the seeds of dropout and the end of `delayed_update`'s first steps follow; training states
        have it."""
        return self.state.steps_done

    @steps_done.setter
    def steps_done(self, count: int) -> None:
        self.state.steps_done = count

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The stored copies ops read, as DTensors that share their storage."""
        for name in self.state.stage.params:
            outer = outer_names.param(name)
            layout = parse_layout(self.state.program.outer[outer].layout)
            stored = self.state.without_padding(name, self.state.tensors[outer], layout)
            yield name, self._dtensor(name, stored, layout)

    def state_dict(self) -> dict[str, Tensor]:
        """DTensors by name, sharing storage with the trainer; after loading into them, `load_state_dict`.

        Parameters, and persistent buffers. What lives on the host or on disk, and what no step reads, is a DTensor on
        "cpu", which under NCCL has no `full_tensor()`: see `full_state_dict`.
        """
        self.flush()
        whole = (Replicate(),) * len(self.state.program.mesh_shape)
        found = {name: self._dtensor(name, *self.state.held_part(name)) for name in self._names()}
        return found | {name: self._dtensor(name, x, whole) for name, x in self.unread.tensors.items()}

    def buffers(self) -> dict[str, Tensor]:
        """Buffers by name, whole, as the last step left them."""
        return self.state.buffers()

    def _names(self) -> tuple[str, ...]:
        return (*self.state.stage.params, *(name for name in self.state.stage.buffers if name in self._written))

    @property
    def _written(self) -> Mapping[str, str]:
        return self.plan.program.buffer_updates

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take in DTensors laid out as `state_dict` gives them (the very ones, once loaded into, or others).

        Raises:
            PlanMismatchError: a name or a local shape is not the plan's.
        """
        check_mapping(state, "state", "state_dict")
        self._forget()
        with torch.no_grad():
            for name, value in state.items():
                unread = self.unread.tensors.get(name)
                mine = self.state.held_part(self._known(name))[0] if unread is None else unread
                local = value.to_local() if isinstance(value, DTensor) else value
                if local.shape != mine.shape:
                    raise PlanMismatchError(
                        f"{name}: a shard of shape {tuple(local.shape)} was given, this rank holds {tuple(mine.shape)}"
                    )
                if local.data_ptr() != mine.data_ptr():
                    mine.copy_(local)
        self._refresh()

    def full_state_dict(self, rank0_only: bool = False) -> dict[str, Tensor]:
        """Full tensors on cpu, gathered one by one, as in `state_dict`; tied parameters under each of their names.

        Trained parameters are float32 masters under half precisions. Frozen ones have the dtype of the user's model and
        the values the plan computes with: under half precisions it keeps none wider, so those of a float32 model are
        rounded, once, and a resume goes on exactly. The model given to `executable` still has its own. What no step
        reads (parameters of evaluation alone, constant buffers) is as it was there, so that the model's
        `load_state_dict` takes all of them.

        Args:
            rank0_only: only rank 0 keeps them; the others return {}. All ranks must call.
        """
        full = self.full_training_tensors(rank0_only)
        return {name: x for name, x in full.items() if name not in self.unread.transient}

    def full_training_tensors(self, rank0_only: bool = False) -> dict[str, Tensor]:
        """As `full_state_dict`, and buffers that training writes and the model keeps out of its state dicts."""
        self.flush()
        full = self.full_tensors(rank0_only)
        if not rank0_only or self.transport.rank == 0:
            full |= self.unread.full()
        for name, dtype in self.frozen_dtypes.items():
            if name in full:
                kept, param = full[name].to(dtype), self.plan.program.params[name]
                full |= dict.fromkeys((name, *param.aliases), kept)
        return full

    def full_tensors(self, rank0_only: bool = False) -> dict[str, Tensor]:
        """As `full_state_dict`, without gradients that wait for the next step and what no step reads, in the plan's
        dtypes."""
        if self.state.has_begun:
            self.flush()
        found: dict[str, Tensor] = {}
        program = self.plan.program
        trained = set(trained_params(program))
        for name in (*program.params, *self._written):
            if name in program.params and not any(name in holding.params for holding in self.held):
                continue  # no segment reads it
            spec = program.params[name].spec if name in program.params else program.buffers[name]
            dtype = master_dtype(program.precision, spec.dtype) if name in trained else spec.dtype
            full = self.whole(name, TensorSpec(dtype, spec.shape), self.state.held)
            if not rank0_only or self.transport.rank == 0:
                kept = full.cpu().clone()
                param = self.plan.program.params.get(name)
                found |= dict.fromkeys((name, *(param.aliases if param else ())), kept)
        return found

    def whole(self, name: str, spec: TensorSpec, held: Callable[[str], tuple[Tensor, Layout]]) -> Tensor:
        """A parameter, buffer or gradient whole on every rank, all of which must call.

        Args:
            name: of the parameter or buffer.
            spec: of the whole.
            held: gives this rank's part, padding included, and its layout, where the rank has one.
        """
        speaker = next(each for each in self.held if name in counted_here(self.plan.program, self.held, each))
        if self.transport.rank in speaker.mesh.devices:
            local, layout = held(name)
            full = join_over(spec.shape, layout, local.detach().to(self.transport.device), self.transport.gather)
        else:
            full = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self.transport.device)
        return full if len(self.held) == 1 else self.transport.spread(full.contiguous(), speaker.mesh.devices[0])

    def load_full_state_dict(self, full: Mapping[str, Tensor]) -> None:
        """Take in full tensors by name, the same on every rank; each keeps its shards. Buffers, and what no step reads,
        may be left out.

        Args:
            full: tensors of the parameters' whole shapes, or NumPy's arrays.
        Raises:
            PlanMismatchError: a parameter is missing, or a value is no tensor of its shape; nothing is loaded then.
        """
        check_mapping(full, "full", "full_state_dict")
        missing = [name for name in self.state.stage.params if name not in full]
        if missing:
            raise PlanMismatchError(f"full state dict lacks {', '.join(missing[:5])} ({len(missing)} in all)")
        program = self.plan.program
        specs = {name: param.spec for name, param in program.params.items()}
        specs |= {name: program.buffers[name] for name in (*self._written, *self.unread.tensors) if name not in specs}
        given = {name: _whole_value(name, full[name], spec) for name, spec in specs.items() if name in full}
        self._forget()
        buffers = {f"buffer:{name}": given[name] for name in self._written if name in given}
        self.state.load({f"param:{name}": given[name] for name in self.state.stage.params} | buffers)
        self.unread.load(given)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer, create: bool = False) -> dict[str, Any]:
        """What an optimizer goes on from: {"state": parameter name -> slot -> value, "about": bytes}.

        Slots of a parameter's shape are DTensors that share storage; `about` has the options of param groups by the
        names of their parameters, steps taken and the seed. Schedulers and a scaler have states of their own;
        `training_state` has everything.

        Args:
            optimizer: of this trainer.
            create: make the slots where there are none yet, so that a checkpoint can be loaded into them.
        """
        about = {
            "groups": groups_of([optimizer], self.state.params, self.transport.everyones),
            "steps_done": self.steps_done,
            "seed": self.state.seed,
        }
        return {"state": self.slots(optimizer, create), "about": pack(about)}

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """The inverse, from DTensors laid out as `optimizer_state_dict` gives them; steps taken and the seed too.

        Raises:
            PlanMismatchError: it has no groups, or not those of this optimizer.
        """
        check_mapping(state, "state", "optimizer_state_dict")
        if set(state) != {"state", "about"}:
            raise PlanMismatchError(
                "these are an optimizer's states without its groups' options (learning rate, decay) and the steps "
                "taken, as an earlier version gave them; to go on with the options it has now, give {'state': them, "
                "'about': trainer.optimizer_state_dict(optimizer)['about']}"
            )
        about = unpack(state["about"])
        groups = groups_of([optimizer], self.state.params, self.transport.everyones)
        match = matched(groups, about["groups"])
        self.load_slots(optimizer, state["state"])
        take_groups([optimizer], about["groups"], match)
        self.steps_done, self.state.seed = about["steps_done"], about["seed"]

    def slots(self, optimizer: torch.optim.Optimizer, create: bool = False) -> dict[str, dict[str, Any]]:
        """Parameter name -> slot -> value; those of a parameter's shape as DTensors that share storage."""
        self.flush()
        if create:
            self._create_slots(optimizer)
            self.flush()
        self.state.executor.copier.settle()
        return {
            name: {
                slot: self._dtensor(name, value, self.state.layouts[name]) if is_like(value, param.shape) else value
                for slot, value in optimizer.state[param].items()
            }
            for name, param in self.state.params.items()
            if param in optimizer.state
        }

    def load_slots(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Mapping[str, Any]]) -> None:
        """The inverse; parameters of no group of the optimizer are left out, and those without slots have none then."""
        self.flush()
        mine = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for name, param in self.state.params.items():
            if id(param) in mine and name not in state:
                optimizer.state.pop(param, None)
        for name, slots in state.items():
            param = self.state.params[self._known(name)]
            if id(param) not in mine:
                continue
            home = self.slots_device(name)
            kept = {slot: value.to_local() if isinstance(value, DTensor) else value for slot, value in slots.items()}
            optimizer.state[param] = {
                slot: v.to(
                    home if is_like(v, param.shape) else v.device, copy=True, memory_format=torch.contiguous_format
                )
                if isinstance(v, Tensor)
                else v
                for slot, v in kept.items()
            }

    def slots_device(self, name: str) -> torch.device:
        """Where a parameter's optimizer states are kept: where they live if they come to their update, or beside it."""
        return self.state.tensors.get(outer_names.slots(name), self.state.params[name]).device

    def _create_slots(self, optimizer: torch.optim.Optimizer) -> None:
        """One step of learning rate zero on zero gradients, for parameters without state; values and options stay."""
        mine = [param for group in optimizer.param_groups for param in group["params"]]
        before = [(group, dict(group)) for group in optimizer.param_groups]
        grads = {param: param.grad for param in mine}
        for param in grads:
            param.grad = None if param in optimizer.state else torch.zeros_like(param)
        for group in (each for each in optimizer.param_groups if "lr" in each):
            group["lr"] = group["lr"] * 0
        optimizer.step()
        for group, options in before:
            group.update({key: value for key, value in options.items() if key != "params"})
        for param, grad in grads.items():
            param.grad = grad

    def _known(self, name: str) -> str:
        if name not in self._names():
            raise PlanMismatchError(
                f"the plan has no parameter or written buffer {name!r}; "
                f"names look like {', '.join(list(self.state.stage.params)[:3])}"
            )
        return name

    def _dtensor(self, name: str, local: Tensor, layout: Layout) -> Tensor:
        if self.transport.device_mesh is None:
            if self.transport.mesh.size > 1:
                raise RuntimeFailure("DTensors need torch.distributed")
            return local.detach()
        shape = self._shape(name)
        return DTensor.from_local(
            local.detach(),
            self.transport.mesh_on(local.device.type),
            [_placement(p) for p in layout],
            run_check=False,
            shape=torch.Size(shape),
            stride=contiguous_strides(shape),
        )

    def _shape(self, name: str) -> tuple[int, ...]:
        program = self.plan.program
        return program.params[name].spec.shape if name in program.params else program.buffers[name].shape

    def _refresh(self) -> None:
        self.state.executor.copier.forget()
        self.state.executor.run(self.state.lists.restoring)
        self.state.settled()

    def _forget(self) -> None:
        """Gradients that wait are of parameters that are no more."""
        if self.state.updates is not None:
            self.state.updates.forget()


def _placement(placement: ir_mesh.Placement) -> Placement:
    return Shard(placement.dim) if isinstance(placement, ir_mesh.Shard) else Replicate()


def is_like(value: object, shape: Sequence[int]) -> bool:
    """Whether an optimizer's state has an element for each of a parameter's."""
    return isinstance(value, Tensor) and tuple(value.shape) == tuple(shape) and value.dim() > 0


def _whole_value(name: str, value: object, spec: TensorSpec) -> Tensor:
    x = torch.as_tensor(value) if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" else value
    if not isinstance(x, Tensor) or x.is_meta or x.layout != torch.strided:
        what = f"a tensor ({x.layout}, {x.device.type})" if isinstance(x, Tensor) else f"a {type(x).__qualname__}"
        raise PlanMismatchError(f"{name} is {what}; give a dense tensor with values, or a NumPy array ({spec})")
    if tuple(x.shape) != spec.shape:
        raise PlanMismatchError(
            f"{name} has shape {tuple(x.shape)}, the plan's has {spec.shape}; give the full tensor of the model the "
            "plan was made for"
        )
    if x.is_complex() and not getattr(torch, spec.dtype).is_complex:
        raise PlanMismatchError(f"{name} is {x.dtype}, the plan's is {spec.dtype}; give its real numbers")
    return x
