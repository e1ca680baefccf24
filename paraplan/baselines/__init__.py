"""The field's own algorithms by name, run inside our types, to be set beside ours.

    MEMORY[name](problem, budget_bytes, limits) -> MemoryAnswer

Each is true to its paper, named in its file's head with its recurrence and limits. An answer's schedule is legal and
its cost is the evaluation's; one within the budget, or an error of our tree, with these exceptions that have a single
plan whatever the budget: chen-sqrt, vdnn-all, vdnn-conv.
"""

from __future__ import annotations

from paraplan.baselines.chains.chen import chen_greedy, chen_sqrt, divide_conquer
from paraplan.baselines.chains.pofo import pofo
from paraplan.baselines.chains.revolve import revolve
from paraplan.baselines.chains.rotor import rotor
from paraplan.baselines.checkmate import checkmate_ilp, checkmate_lp
from paraplan.baselines.common import Limits, MemoryStrategy
from paraplan.baselines.kusumoto import kusumoto_approx, kusumoto_exact
from paraplan.baselines.moccasin import moccasin
from paraplan.baselines.policies.coop import coop
from paraplan.baselines.policies.dtr import dtr
from paraplan.baselines.swapping.capuchin import capuchin
from paraplan.baselines.swapping.superneurons import superneurons
from paraplan.baselines.swapping.swapadvisor import swapadvisor
from paraplan.baselines.swapping.vdnn import vdnn_all, vdnn_conv
from paraplan.baselines.treewidth import treewidth

__all__ = ["MEMORY", "OFFLOADING", "UNBUDGETED", "Limits"]

MEMORY: dict[str, MemoryStrategy] = {
    "chen-sqrt": chen_sqrt,
    "chen-greedy": chen_greedy,
    "revolve": revolve,
    "divide-conquer": divide_conquer,
    "rotor": rotor,
    "checkmate-ilp": checkmate_ilp,
    "checkmate-lp": checkmate_lp,
    "kusumoto-exact": kusumoto_exact,
    "kusumoto-approx": kusumoto_approx,
    "treewidth": treewidth,
    "moccasin": moccasin,
    "dtr": dtr,
    "coop": coop,
    "vdnn-all": vdnn_all,
    "vdnn-conv": vdnn_conv,
    "capuchin": capuchin,
    "superneurons": superneurons,
    "swapadvisor": swapadvisor,
    "pofo": pofo,
}

UNBUDGETED = frozenset({"chen-sqrt", "vdnn-all", "vdnn-conv"})
"""Those with one plan, whatever the budget: whether it fits is its evaluation's peak."""

OFFLOADING = frozenset({"vdnn-all", "vdnn-conv", "capuchin", "superneurons", "swapadvisor", "pofo"})
"""Those that copy to a tier; capuchin and superneurons do without one too."""
