"""`paraplan.fit`: a model that trains as before, within a memory budget on the device it is on.

The model is captured, lowered for one device, and its step planned op by op: what is freed and executed again, and
when. What counts towards the budget: parameters, gradients, the optimizer's states and what its update allocates one
parameter at a time, buffers, one batch, activations, and what ops allocate inside. What does not: what the caller holds
besides, the allocator's rounding, and the device's own context.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from paraplan.api import Plan, as_cluster
from paraplan.api import compile as compile_plan
from paraplan.capture.exporting.fake import name_inputs, refuse_kinds_held
from paraplan.capture.python_state.autocast import ambient_autocast, forward_under
from paraplan.capture.python_state.returned import Returned, returned_by
from paraplan.codegen import build_modules
from paraplan.cost_models.predict import predict, with_reserved
from paraplan.ir import plan as ir_plan
from paraplan.ir.errors import ConstraintError, InvalidPlanError, NoPlanError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.options import check_keywords, fields_of, from_keywords, takes_options
from paraplan.ir.sizes import parse_bytes
from paraplan.ir.struct import from_json
from paraplan.jobs.checking.eager import ModelCall
from paraplan.jobs.checking.first_steps import FirstSteps
from paraplan.jobs.measuring.detect import detect
from paraplan.jobs.models import Made
from paraplan.kernels.dtypes import dtype_name
from paraplan.lowering import lower
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.plan_options import CaptureOptions, FitKeywords, FitOptions
from paraplan.planner.memory.plan_memory import MemoryLimits
from paraplan.planner.memory.problem import Tier
from paraplan.planner.memory.single_device import least_words, memory_problem, memory_tiers, schedule_memory
from paraplan.runtime.fitted import FittedModule
from paraplan.runtime.fitted_step import FittedStep, held_bytes, refuse_gradients

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_LOSS_BYTES = 8
"""The gradient of the loss, which autograd makes."""


@takes_options(FitKeywords, FitOptions)
def fit(
    model: nn.Module,
    example_inputs: Mapping[str, Any] | Sequence[object] | Tensor,
    memory: int | str,
    **options: Unpack[FitKeywords],
) -> FittedModule:
    """The model, trained within a memory budget.

        model = paraplan.fit(model, example_inputs, memory="8GiB")
        loss = model(**batch).loss; loss.backward(); optimizer.step(); optimizer.zero_grad()

    It returns what the model returns, with the loss alone in it: other tensors are None, since they would have to be
    held through the backward (under `no_grad` or in `eval()` the model itself runs, and returns all).
    It shares the model's parameters, buffers and names, so any torch optimizer takes its `parameters()`, and
    checkpoints are the model's. `plan` of the result says what is executed again and what that costs. Called under
    `torch.autocast`, it plans the model as it runs there, and is to be called there.

    A step is captured with the modes of its modules, their hooks, options, arguments that are no tensors and whatever
    Python values forward reads as they are now; where one differs later, an error says so (see `dynamic`). Inputs get
    no gradients, and gradients have none themselves. What forward does besides (prints, lists it appends to) it does
    while it is captured. Fitting what was fitted plans anew.

    With `loss_fn`, the fitted module returns the loss in training, and the model's own output under `no_grad` or in
    `eval()`. `loss` may also be a place in a tuple (`loss="1"` of `logits, loss`); the sum of several is returned
    alone. Of the optimizer, states and update count towards the budget; adamw takes no more with weight_decay.

    Args:
        model: any nn.Module in training mode, float32 or float64, on one device; it is not modified.
        example_inputs: one batch, as the model is called with it: by name, or in order.
        memory: the budget, bytes or text such as "8GiB".
        options: how a step is captured and planned, see `FitOptions`.
    Raises:
        CaptureError: the model is outside what can be captured; names the user's line.
        ConstraintError: the budget is no size, or the model is not one for this.
        InfeasibleError: proved that the budget is too small; names the op that needs most and what would do.
        SolverLimitError: nothing was found in time.
    """
    started = time.perf_counter()
    check_keywords("fit", options, FitOptions)
    asked = from_keywords(FitOptions, options)
    budget = parse_bytes(memory)
    model = model.unfitted if isinstance(model, FittedModule) else model
    inputs = _inputs(example_inputs)
    _, device = _precision(model)
    spec = as_cluster(asked.cluster) if asked.cluster is not None else _here(device)
    casts = ambient_autocast(device)
    tensors, fixed = name_inputs(model, inputs)
    refuse_gradients(tensors)
    with forward_under(model, device, casts):
        whole, returns = _captured(model, inputs, spec, asked)
    plan = _scheduled(whole, budget, asked, memory_tiers(spec) if asked.offload else ())
    plan = replace(plan, data=msgspec.structs.replace(plan.data, cluster=spec), total_s=time.perf_counter() - started)
    plan = replace(plan, reads=whole.reads)
    fitted = _fitted(model, plan, fixed, returns, casts, asked.seed)
    if asked.check:
        call = ModelCall.of(Made(model, inputs, asked.loss_fn), plan.data.program, asked.loss, casts)
        fitted.check_first(FirstSteps(call, int(asked.check), asked.progress or (lambda text: None)))
    return fitted


def _captured(model: nn.Module, inputs: Any, spec: ClusterSpec, asked: FitOptions) -> tuple[Plan, Returned]:
    """The plan that makes nothing again, whatever memory it takes, and what the model returns."""
    precision, _ = _precision(model)
    named = asked.loss_fn is None
    returns = returned_by(model, inputs, precision, asked.loss) if named else Returned(for_loss=True)
    whole = compile_plan(
        model,
        _roomy(spec),
        example_inputs=inputs,
        precision=precision,
        recompute="none",
        microbatches=asked.microbatches,
        **{word: getattr(asked, word) for word in fields_of(CaptureOptions)},
    )
    return _unfused(whole), returns


def _fitted(
    model: nn.Module,
    plan: Plan,
    fixed: Mapping[str, Any],
    returns: Returned,
    casts: torch.dtype | None,
    seed: int | None,
    steps_done: int = 0,
) -> FittedModule:
    (program,) = plan.programs
    modules = build_modules(program, device=plan.data.cluster.backend)
    step = FittedStep(model, plan.data, program, modules, seed, steps_done)
    return FittedModule(model, plan, step, fixed, returns, casts, _remade, plan.reads)


def _remade(
    model: nn.Module,
    fixed: Mapping[str, Any],
    returns: Returned,
    casts: torch.dtype | None,
    plan: bytes,
    seed: int | None,
    steps_done: int,
) -> FittedModule:
    data = from_json(plan, ir_plan.Plan, "the plan", InvalidPlanError)
    return _fitted(model, Plan(data, verify_plan(data)), fixed, returns, casts, seed, steps_done)


def _scheduled(whole: Plan, budget: int, asked: FitOptions, tiers: tuple[Tier, ...]) -> Plan:
    """The plan within a budget, of which what is held beside the step takes a part; an error says what would do."""
    started, program = time.perf_counter(), whole.programs[0]
    beside = _LOSS_BYTES + held_bytes(program)
    try:
        made = schedule_memory(whole.data, budget, MemoryLimits(time_s=asked.time_limit_s), tiers, beside)
    except NoPlanError as fault:
        problem = memory_problem(whole.data, tiers, beside)
        would_do = least_words(problem, budget, asked.time_limit_s)
        raise type(fault)(f"{fault}. {would_do}. {_ways_out(whole, tiers)}") from None
    again = 100 * made.answer.evaluation.recomputed_s / made.simulation.step_s
    note = (
        f"memory schedule within {budget} bytes: {again:.1f} % of the step executes ops again, at most "
        f"{100 * (made.answer.gap or 0.0):.2f} % more than the fastest in this order of ops"
    )
    prediction = predict(made.plan, made.programs, made.simulation)
    data = msgspec.structs.replace(made.plan, prediction=prediction, notes=(*made.plan.notes, note))
    data = with_reserved(data, made.programs)
    return Plan(data, made.programs, solve_s=time.perf_counter() - started)


def _ways_out(whole: Plan, tiers: tuple[Tier, ...]) -> str:
    """What would lower the memory of a step, of what its caller does not do yet."""
    states = whole.data.optimizer.state_slots
    ways = ["a smaller batch", f"microbatches={2 * whole.data.num_microbatches} or more"]
    ways += [] if tiers else ["offload=True"]
    fewer = [repr(name) for name, slots in (("sgd", 0), ("momentum", 1)) if slots < states]
    ways += [f"an optimizer of fewer states (optimizer={' or '.join(fewer)})"] if fewer else []
    return f"Less is needed with {', or with '.join((', with '.join(ways[:-1]), ways[-1]))}"


def _unfused(whole: Plan) -> Plan:
    """The plan with the update that a user's own optimizer makes by itself."""
    optimizer = msgspec.structs.replace(whole.data.optimizer, fused=False)
    data = msgspec.structs.replace(whole.data, optimizer=optimizer)
    return replace(whole, data=data, given=lower(data))


def _inputs(example_inputs: Any) -> dict[str, Any] | tuple[object, ...]:
    if isinstance(example_inputs, Mapping):
        return dict(example_inputs)
    return tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)


def _precision(model: nn.Module) -> tuple[str, str]:
    """What the model computes in, and the kind of device it is on."""
    if isinstance(model, type):
        raise ConstraintError(f"fit takes an nn.Module, not the class {model.__name__}; give one that is made")
    if not hasattr(model, "named_parameters"):
        raise ConstraintError(f"fit takes an nn.Module, not a {type(model).__name__}")
    if "torch.jit" in type(model).__module__:
        raise ConstraintError("fit captures Python modules; give it the module that was scripted or traced")
    params = dict(model.named_parameters())
    numbers = [param for param in params.values() if param.is_floating_point() or param.is_complex()]
    kinds = {dtype_name(param.dtype.to_real()) for param in numbers}
    if kinds not in ({"float32"}, {"float64"}):
        raise ConstraintError(
            f"the parameters are {', '.join(sorted(kinds)) or 'none'}: fit trains models whose parameters are all "
            "float32 (complex64), or all float64 (complex128)"
        )
    devices = {param.device.type for param in params.values()}
    if devices not in ({"cpu"}, {"cuda"}):
        raise ConstraintError(f"the parameters are on {', '.join(sorted(devices))}: put the model on one cpu or cuda")
    refuse_kinds_held(model)
    for name, tensor in (*params.items(), *model.named_buffers()):
        if not tensor.is_contiguous():
            raise ConstraintError(
                f"{name} is not contiguous (channels_last, transposed, or a view); before fit, for all of them: "
                "for x in (*model.parameters(), *model.buffers()): x.data = x.data.contiguous()"
            )
    if not model.training:
        raise ConstraintError(f"{type(model).__name__} is in evaluation mode; fit plans training: call model.train()")
    return ("fp64" if kinds == {"float64"} else "fp32"), devices.pop()


def _here(device: str) -> ClusterSpec:
    """One device like the model's."""
    if device == "cpu":
        return ClusterSpec.local(1)
    found = detect()
    return msgspec.structs.replace(
        found, groups=(msgspec.structs.replace(found.groups[0], nodes=1, devices_per_node=1),)
    )


def _roomy(cluster: ClusterSpec) -> ClusterSpec:
    """The device with memory for anything: the budget is met by the schedule, not by the layouts."""
    if cluster.num_devices != 1:
        raise ConstraintError(f"{cluster.name} has {cluster.num_devices} devices; fit is for one: local:1, 1xH100")
    group = cluster.groups[0]
    device = msgspec.structs.replace(group.device, memory_bytes=1 << 59)
    return msgspec.structs.replace(cluster, groups=(msgspec.structs.replace(group, device=device),))
