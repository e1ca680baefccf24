"""Everything a plan becomes, as text that does not depend on how names and records are represented."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence

from paraplan.codegen import build_modules
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.cost_models.simulator.rank_trace import Simulation
from paraplan.ir.execution.name import Name, Role
from paraplan.ir.execution.rank_program import Block, OuterValue, RankProgram, Step
from paraplan.ir.plan import Plan
from paraplan.ir.struct import to_json
from paraplan.lowering.evaluation import lower_evaluation
from paraplan.lowering.verification.verify_plan import verify_plan

DIGITS = 10
"""Significant digits of times: what mathematical libraries of two machines agree on."""


def texts_of(plan: Plan) -> dict[str, str]:
    """What a plan is, what ranks execute, in training and evaluation, what that is predicted to take, and its code."""
    programs = verify_plan(plan)
    distinct = list({id(program): program for program in programs}.values())
    found = {"program": _json(plan.program), "plan": _json(plan)}
    for index, program in enumerate(distinct):
        found[f"rank{index}"] = "\n".join(_program(program))
        found[f"code{index}"] = "\n".join(_code(program))
    found["prediction"] = "\n".join(_simulation(programs, simulate_plan(plan, programs)))
    for index, program in enumerate(list({id(each): each for each in lower_evaluation(plan)}.values())):
        found[f"evaluation{index}"] = "\n".join(_program(program))
    return found


def digest(text: str) -> str:
    """Enough of a text's SHA-256 to tell it from another."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _json(value: object) -> str:
    return json.dumps(_rounded(json.loads(to_json(value))), indent=1, sort_keys=True)  # type: ignore[arg-type]


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def _program(program: RankProgram) -> Iterator[str]:
    yield f"mesh {program.mesh_axes} {program.mesh_shape} microbatches {program.num_microbatches}"
    yield f"loss {program.loss} optimizer {program.optimizer_bytes} {program.update_workspace_bytes}"
    yield f"tiers {program.update_tiers} metrics {_named(program.metrics)}"
    yield f"grads {_named(program.grads)}"
    for name, output in program.outputs.items():
        yield f"output {name}: {_names(output.names)} {output.spec} {output.layout}"
    for key, transfer in program.transfers.items():
        yield f"transfer {key}: {_fields(transfer)}"
    for name, outer in program.outer.items():
        yield f"outer {name}: {_outer(outer)}"
    for name, block in program.blocks.items():
        yield f"block {name}"
        yield from _block(block)
    for step in program.steps:
        yield _step(step)


def _outer(value: OuterValue) -> str:
    role = "grad" if value.role is Role.WAITING else value.role.value
    return f"role={role} {_fields(value, 'role')}"


def _block(block: Block) -> Iterator[str]:
    yield f"  in {_names(block.inputs)} out {_names(block.outputs)} saved {_names(block.saved)}"
    for name, value in block.values.items():
        yield f"  value {name}: {_fields(value)}"
    for instr in block.instrs:
        yield f"  {_fields(instr)}"


def _step(step: Step) -> str:
    staged = "" if step.staged is None else f" staged {_fields(step.staged)}"
    late = " late" if step.late else ""
    return (
        f"step {step.kind.value} {step.action} m{step.microbatch} s{step.segment} {step.block} {step.transfer} "
        f"{_names(step.args)} -> {_names(step.outs)} drop {_names(step.drops)}{staged}{late}"
    )


def _names(names: Sequence[object]) -> str:
    return " ".join("-" if name is None else str(name) for name in names)


def _named(names: dict[str, Name]) -> str:
    return " ".join(f"{key}={name}" for key, name in names.items())


def _fields(value: object, but: str = "") -> str:
    names = value.__struct_fields__  # type: ignore[attr-defined]
    return " ".join(f"{name}={getattr(value, name)}" for name in names if name != but)


def _code(program: RankProgram) -> Iterator[str]:
    for name, module in build_modules(program).items():
        yield f"# {name}"
        yield module.code


def _simulation(programs: Sequence[RankProgram], simulation: Simulation) -> Iterator[str]:
    for index, trace in enumerate(simulation.traces):
        yield f"class {index}: {trace.step_s:.{DIGITS}g} s, {trace.peak_bytes} B, {trace.tier_peak_bytes}"
        for span in trace.spans:
            yield (
                f"  {span.stream} {span.start_s:.{DIGITS}g} {span.end_s:.{DIGITS}g} {span.label} {span.action} "
                f"{span.segment} {span.microbatch} {span.phase} {span.busy_s:.{DIGITS}g}"
            )
        yield from (f"  {entry.key}" for entry in entries(programs[index]))
