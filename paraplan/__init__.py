"""paraplan: plans how a PyTorch model trains on a cluster, and runs the plan.

The public names, each loaded on first use, so that importing the package loads neither torch nor a solver.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "compile": "paraplan.api",
    "explain": "paraplan.explaining",
    "fit": "paraplan.fitting",
    "Plan": "paraplan.api",
    "Trainer": "paraplan.runtime.trainer",
    "ClusterSpec": "paraplan.ir.machine.cluster",
    "Constraints": "paraplan.planner.constraints",
    "ParaplanError": "paraplan.ir.errors",
    "InfeasibleError": "paraplan.ir.errors",
    "release_caches": "paraplan.ir.process.memo",
    "register_rule": "paraplan.capture.register",
    "register_cost": "paraplan.capture.register",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'paraplan' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
