"""Solver cores on problems with known or independently computed answers.

    python -m benchmarks.instances alpa FOLDER      Alpa's own instances: each as published, and with memory limited to
                                                    60 % of what its optimum uses
    python -m benchmarks.instances [models]         Llama, Mixtral and Qwen3-MoE on an (8, 8) and a (64, 8) mesh, free
                                                    and with memory limited so that it binds
    python -m benchmarks.instances (galvatron | pipedream | piper | dnn) FOLDER
                                                    what those systems solve: strategies of layers, stages, devices of
                                                    nodes (`benchmarks/partition_rows.py`); `--devices 8,64` and
                                                    `--memory-gib 2.5,8` for other limits of Piper's and PipeDream's

The sharding solver's answers are held against an independent MILP (HiGHS on the flow form, given ten times as long).
Columns: `gap` is (objective - bound) / objective; `cpu_s` the processor's seconds of our answer; `equal` whether the
objective is the known optimum's and the MILP's ("better" where the MILP ran out of time above it). The partition cores'
answers are scored afresh by the formula of their format (`rescored`) and held `against` the known value.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch

from benchmarks import partition_rows
from benchmarks.formats.alpa import Instance, limited, read_folder
from benchmarks.table import Row, main
from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.machine.mesh import make_mesh
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.sharding.formulate import network_of
from paraplan.planner.sharding.network.cost_network import Network
from paraplan.planner.sharding.network.ilp import build_ilp
from paraplan.planner.sharding.network.optimise import least_activity, optimise
from paraplan.planner.sharding.solve import problem_of
from paraplan.planner.solvers.milp import Status, solve

TIME_S = 10.0
COLUMNS = (
    *("case", "variables", "options", "status", "objective", "bound", "gap", "solve_s", "cpu_s", "via"),
    *("known", "milp", "milp_s", "equal"),
)
SIZES = {
    "llama": {
        "num_hidden_layers": 4, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "use_cache": False,
    },
    "mixtral": {
        "num_hidden_layers": 4, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 8192, "use_cache": False,
        "num_local_experts": 8,
    },
    "qwen3_moe": {
        "num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 8192, "use_cache": False, "num_experts": 128, "num_experts_per_tok": 8,
    },
}  # fmt: skip


def solved(network: Network, known: float | None = None) -> Row:
    """One problem: our answer and the MILP's."""
    started = time.process_time()
    found = optimise(network, TIME_S)
    cpu_s = time.process_time() - started
    exact = solve(build_ilp(network).problem(np.ones(network.num_streams)), time_limit_s=10 * TIME_S, relative_gap=1e-7)
    answers = [known] if known is not None else []
    if exact.status in (Status.OPTIMAL, Status.INFEASIBLE):
        answers.append(exact.objective)
    same = all(found.objective == answer or abs(found.objective - answer) <= 1e-6 * abs(answer) for answer in answers)
    better = exact.status is Status.FEASIBLE and found.objective <= exact.objective
    return {
        "variables": len(network.prices),
        "options": sum(map(len, network.prices)),
        "status": found.status.value,
        "objective": found.objective,
        "bound": found.bound,
        "solve_s": found.solve_s,
        "cpu_s": cpu_s,
        "via": found.via,
        "gap": 0.0 if found.objective == found.bound else 1 - found.bound / found.objective,
        "known": known,
        "milp": exact.objective,
        "milp_s": exact.solve_s,
        "equal": "better" if same and better else same,
    }


def tight(instance: Instance) -> Row:
    """With 60 % of the memory its optimum uses."""
    free = optimise(instance.network, TIME_S)
    assert free.choices is not None
    used = float(instance.network.activity(free.choices).max()) * instance.budget_bytes
    return solved(limited(instance, 0.6 * used))


@cache
def program(model: str) -> Program:
    """A model of four layers at its published width, captured from the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  (optional extra)

    config = AutoConfig.for_model(model, **SIZES[model])
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config).train()
    tokens = torch.zeros(512, 8192, dtype=torch.long, device="meta")
    return capture(made, {"input_ids": tokens, "labels": tokens}, precision="bf16")


def exported(model: str, shape: tuple[int, int], tightness: float | None) -> Row:
    """A model's sharding problem; memory at a mixture of what the free optimum and the leanest plan hold."""
    job = Job(
        program(model),
        parse_cluster(f"8xH100:{shape[0] * shape[1] // 8}"),
        OPTIMIZERS["adamw"],
        ModelRef(display=model),
        {},
    )
    space = problem_of(job, make_mesh(shape, ("outer", "inner")), 1, Constraints())
    network = network_of(space, 1.0)
    if tightness is None:
        return solved(Network(network.prices, network.factors))
    free = optimise(Network(network.prices, network.factors))
    assert free.choices is not None
    most = float(network.activity(free.choices).max())
    least = max(least_activity(network, row, np.inf).bound for row in range(len(network.rows)))
    return solved(network_of(space, least + tightness * (most - least)))


def cases(family: str, folder: Path | None) -> dict[str, Callable[[], Row]]:
    """The cases of a family."""
    if family == "alpa":
        assert folder is not None
        found: dict[str, Callable[[], Row]] = {}
        for instance in read_folder(folder):
            found[instance.name] = lambda i=instance: solved(i.network, i.optimum)
            found[f"{instance.name} 60 %"] = lambda i=instance: tight(i)
        return found
    return {
        f"{model} {shape[0]}x{shape[1]}{'' if tightness is None else f' memory {tightness:.0%}'}": (
            lambda m=model, s=shape, t=tightness: exported(m, s, t)
        )
        for model in SIZES
        for shape in ((8, 8), (64, 8))
        for tightness in (None, 0.6, 0.3, 0.2)
    }


def run(arguments: list[str]) -> int:
    """The command line: a family, its folder if it has one, then what every benchmark takes."""
    family = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "models"
    foldered = family != "models"
    folder = Path(arguments.pop(0)) if foldered and arguments and not arguments[0].startswith("-") else None
    if family not in ("alpa", "models", *partition_rows.FAMILIES) or (foldered and folder is None):
        families = " | ".join(f"{name} FOLDER" for name in ("alpa", *partition_rows.FAMILIES))
        usage = f"python -m benchmarks.instances ({families} | models) [--only PATTERN] [--json FILE]"
        print(f"usage: {usage}", file=sys.stderr)
        return 2
    try:
        if family not in partition_rows.FAMILIES:
            return main("instances", cases(family, folder), COLUMNS, arguments)
        assert folder is not None
        devices, memory_gib = (_numbers(arguments, option) for option in ("--devices", "--memory-gib"))
        limits = partition_rows.Limits(tuple(map(int, devices)), tuple(memory_gib))
        chosen = partition_rows.cases(family, folder, limits)
    except (FileNotFoundError, ValueError) as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    return main("instances", chosen, partition_rows.COLUMNS, arguments)


def _numbers(arguments: list[str], option: str) -> list[float]:
    """The numbers of `--option 1,2`, taken off the command line."""
    if option not in arguments:
        return []
    at = arguments.index(option)
    if at + 1 == len(arguments):
        raise ValueError(f"{option} takes numbers, as in {option} 8,64")
    text = arguments[at + 1]
    del arguments[at : at + 2]
    return [float(each) for each in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
