"""A published row's plan: what it states pinned, the fastest of what it leaves open, and what that predicts.

A model is captured from meta at three layers, once per architecture and batch, and made as deep as it is (`deepen`); a
pipeline of many microbatches is priced by few (`steady`). Of what a row leaves open the fastest that fits counts, never
the best match; choices are made one after another, and a pipeline's products go in pieces at the end.
"""

from __future__ import annotations

import json
import math
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from unittest.mock import patch

import msgspec
from torch import nn

from benchmarks.deepen import CAPTURED, deepen
from benchmarks.kept_outputs import with_last_products_kept, with_logits_kept, with_messages_kept
from benchmarks.megatron_gpt import GPTSettings, gpt_batch, gpt_model
from benchmarks.published_rows import DEPTH, Case, Pins, Row, cluster_of
from benchmarks.steady import Carried, again, carried_on, few_microbatches
from benchmarks.torchtitan_llama import TorchtitanLlama
from paraplan.api import versions
from paraplan.capture import capture
from paraplan.capture.substituting import substitute
from paraplan.cost_models.predict import predict as predict_plan
from paraplan.cost_models.predict import simulate_plan, with_reserved
from paraplan.ir.errors import InfeasibleError, ParaplanError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.jobs.files import write_plan
from paraplan.jobs.inputs import hf_batch
from paraplan.jobs.models import hf_model, model_ref
from paraplan.lowering import lower
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.passes.overlap_products import in_pieces, piece_counts
from paraplan.planner.recompute.presets import layered
from paraplan.planner.search import search

RATE_STEP = 1.05
"""By how much products go faster where it is asked what that changes."""


@lru_cache(maxsize=2)
def captured(family: str, settings: str, batch: int, seq: int, precision: str, eager: bool) -> tuple[Program, ModelRef]:
    """A model by its settings as JSON, so that equal ones are captured once; `eager`: as in `Case`."""
    if family == "megatron_gpt":
        model: nn.Module = gpt_model(GPTSettings(**json.loads(settings)))
        inputs = gpt_batch(batch, seq)
    elif family == "torchtitan_llama":
        chosen = json.loads(settings)
        model = TorchtitanLlama(chosen, chosen.pop("loss_parallel"))
        inputs = gpt_batch(batch, seq)
    else:
        model = hf_model(family, json.loads(settings), meta=True)
        inputs = hf_batch(model, batch, seq)
    with ExitStack() as stack:
        for name in ("recognise", "recognise_elementwise") if eager else ():
            stack.enter_context(patch.object(substitute, name, lambda *_: None))
        program = capture(model, inputs, precision=precision)
    return program, model_ref(model, program, made_here=True)


def program_of(case: Case) -> tuple[Program, ModelRef]:
    """The row's model, whole."""
    settings = json.dumps({**case.settings, DEPTH[case.family]: min(case.layers, CAPTURED)})
    program, reference = captured(case.family, settings, case.batch, case.seq, case.precision, case.eager)
    return deepen(program, case.layers) if case.layers > CAPTURED else program, reference


def predict(case: Case, time_limit_s: float, plans: Path | None = None) -> Row:
    """The row's plan and what it says of it.

    Args:
        case: the row.
        time_limit_s: of a search.
        plans: folder the plan is written to, if any.
    """
    started = time.process_time()
    row: Row = {
        "file": case.file,
        "row": case.name,
        "unit": case.unit,
        "published": case.published,
        "pins": " ".join(f"{key}={value}" for key, value in case.pins.items()),
    }
    tried: dict[str, str] = {}
    best: Carried | None = None
    chosen = [group[0] for group in case.free]
    for place, group in enumerate(case.free or (({},),)):
        for option in group:
            trial = [*chosen[:place], option, *chosen[place + 1 :]]
            pins = {key: value for each in trial for key, value in each.items()}
            if _text(pins) in tried:
                continue
            try:
                found = _fastest(case, case.pins | pins, time_limit_s, _step_s(best))
                refuse_overfull(found)
            except ParaplanError as fault:
                tried[_text(pins)] = f"{type(fault).__name__}: {str(fault)[:200]}"
                continue
            tried[_text(pins)] = f"{_step_s(found):.4g} s"
            if _step_s(found) < _step_s(best):
                best, chosen = found, trial
    said = [f"{text}: {found}" for text, found in tried.items()]
    row |= {"tried": said, "chosen": said[0]}
    if best is not None:
        best = _in_pieces(case, best) if "pp" in case.pins else best
        row |= _said(case, best)
        if plans is not None:
            write_plan(best.plan, plan_path(plans, case))
    return row | {"cpu_s": time.process_time() - started}


def plan_path(plans: Path, case: Case) -> Path:
    """Where the plan of a row is written."""
    return plans / f"{case.file} {case.name}.json".replace(" ", "_")


def _fastest(case: Case, pins: Pins, time_limit_s: float, than_s: float) -> Carried:
    """The fastest plan of these pins that fits.

    Of a pipeline whose activations nobody pins, first the plan there would be with memory for anything: where that
    fits it is the one, and where it is not faster than another choice it is left at that.
    """
    if "pp" not in pins:
        return Carried(searched(case, pins, case.batch, cluster_of(case), time_limit_s), 1)
    pins = {key: value for key, value in pins.items() if key != "overlap"}
    if "recompute" not in pins:
        roomy = _pipeline(case, pins, _roomy(cluster_of(case)), time_limit_s)
        if max(roomy.said.peak_bytes) <= cluster_of(case).plan_bytes():
            return roomy._replace(plan=msgspec.structs.replace(roomy.plan, cluster=_as_large(roomy, cluster_of(case))))
        if roomy.said.step_s >= than_s:
            raise InfeasibleError(f"does not fit as it is, and is no faster with memory for anything: {than_s:.4g} s")
    return _pipeline(case, pins, cluster_of(case), time_limit_s)


def refuse_overfull(found: Carried) -> None:
    """A row is no prediction where its plan peaks above what its devices have.

    Raises:
        InfeasibleError: with both sizes.
    """
    peak = max(found.said.peak_bytes)
    least = min(group.device.memory_bytes for group in found.plan.cluster.groups)
    if peak > least:
        raise InfeasibleError(f"the plan returned peaks at {peak / 2**30:.1f} GiB of a device's {least / 2**30:.1f}")


def _pipeline(case: Case, pins: Pins, cluster: ClusterSpec, time_limit_s: float) -> Carried:
    """The plan of a pipeline, of few microbatches where these stand for many."""
    count = pins["microbatches"]
    few = few_microbatches(pins.get("schedule", "1f1b"), count, pins["pp"])
    plan = searched(case, pins | {"microbatches": few}, case.batch // count * few, cluster, time_limit_s)
    return carried_on(plan, count, partial(_program_at, case, count, plan))


def searched(case: Case, pins: Pins, batch: int, cluster: ClusterSpec, time_limit_s: float) -> Plan:
    """The planner's answer."""
    program, reference = program_of(replace(case, batch=batch))
    job = Job(
        program=program,
        cluster=cluster,
        optimizer=OPTIMIZERS["adamw"],
        model=reference,
        versions=versions(),
        sum_products=case.sums,
    )
    return search(job, Constraints(**{"overlap": 1, **pins}), time_limit_s, certify=False).plan


def _program_at(case: Case, count: int, plan: Plan, microbatches: int) -> Program:
    """The row's model for so many of its microbatches, in the segments its plan has."""
    program = program_of(replace(case, batch=case.batch // count * microbatches))[0]
    return program if len(program.segments) == len(plan.program.segments) else layered(program)[0]


def _in_pieces(case: Case, best: Carried) -> Carried:
    """The pipeline with its products in the pieces that make it fastest."""
    plain, budget = best.plan, best.plan.cluster.plan_bytes()
    for pieces in piece_counts(case.pins.get("overlap", 1)):
        found = again(best, in_pieces(plain, pieces), partial(_program_at, case, best.count, plain))
        if found.said.step_s < best.said.step_s and max(found.said.peak_bytes) <= budget:
            best = found
    return best


def _roomy(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with memory for anything."""
    groups = tuple(
        msgspec.structs.replace(group, device=msgspec.structs.replace(group.device, memory_bytes=1 << 60))
        for group in cluster.groups
    )
    return msgspec.structs.replace(cluster, groups=groups)


def _as_large(roomy: Carried, cluster: ClusterSpec) -> ClusterSpec:
    """A plan's cluster, clocks and all, with the memory there is."""
    groups = tuple(
        msgspec.structs.replace(
            group, device=msgspec.structs.replace(group.device, memory_bytes=there.device.memory_bytes)
        )
        for group, there in zip(roomy.plan.cluster.groups, cluster.groups, strict=True)
    )
    return msgspec.structs.replace(roomy.plan.cluster, groups=groups)


def _text(free: Row) -> str:
    """Free choices, short."""
    return " ".join(f"{key}={len(value) if key == 'stages' else value}" for key, value in free.items()) or "as pinned"


def _step_s(found: Carried | None) -> float:
    """A plan's step; infinite where there is none."""
    return math.inf if found is None else found.said.step_s


def _said(case: Case, found: Carried) -> Row:
    """What a plan predicts of a row."""
    plan, said = found.plan, found.said
    predicted = case.work / said.step_s / case.gpus
    remade = any(choice.activations for stage in plan.stages for choice in stage.choices)
    idle = said.step_s - said.compute_s - said.exposed_comm_s - said.exposed_copy_s
    memory: Row = {"peak_gib": max(said.peak_bytes) / 2**30}
    if case.memory_gib:
        programs = lower(plan)
        if case.keeps_logits:
            programs = tuple(with_logits_kept(each, case.settings["vocab_size"]) for each in programs)
            programs = tuple(with_messages_kept(each) for each in programs)
        if case.eager and case.pins.get("recompute") == "alternate":
            programs = tuple(with_last_products_kept(each) for each in programs)
        said = predict_plan(plan, programs)
        told = with_reserved(plan, programs).prediction
        assert told is not None
        reserved = max(told.reserved_bytes) / 2**30
        memory = {
            "peak_gib": max(said.peak_bytes) / 2**30,
            "memory_published_gib": case.memory_gib,
            "memory_gib": reserved,
            "memory_error_percent": 100 * (reserved / case.memory_gib - 1),
        }
    return memory | {
        "predicted": predicted,
        "error_percent": 100 * (predicted / case.published - 1),
        "step_s": said.step_s,
        "compute_s": said.compute_s,
        "exposed": said.exposed_comm_s / said.step_s,
        "bubble": idle / said.step_s,
        "drift": found.drift,
        "rate_slope": _rate_slope(found),
        "device": plan.cluster.groups[0].device.kind.split("-")[0],
        "chosen": f"{plan.schedule.name} stages={len(plan.stages)} microbatches={found.count}"
        + (" recomputing" if remade else ""),
    }


def _rate_slope(found: Carried) -> float:
    """By what share of one percent the step is shorter where every product goes one percent faster."""
    plan = found.plan
    groups = tuple(
        msgspec.structs.replace(
            group,
            device=msgspec.structs.replace(
                group.device, flops_per_s={dtype: RATE_STEP * rate for dtype, rate in group.device.flops_per_s.items()}
            ),
        )
        for group in plan.cluster.groups
    )
    faster = msgspec.structs.replace(plan, cluster=msgspec.structs.replace(plan.cluster, groups=groups))
    programs = lower(plan)
    whole = plan.num_microbatches == found.count
    step_s = found.said.step_s if whole else simulate_plan(plan, programs).step_s
    return math.log(step_s / simulate_plan(faster, programs).step_s) / math.log(RATE_STEP)
