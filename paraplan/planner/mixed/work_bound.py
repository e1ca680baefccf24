"""A bound on the step of any plan over differing devices: all products of the model at their peak rates, at once.

Of products in dtype d the model has F_d flops, forward and backward, and whoever computes them, all are computed. With
R_gd the rate of a device of group g, n_g devices and prices y_d of a flop,

    step >= sum_d y_d F_d   for every y with   sum_g n_g max_d (y_d R_gd) <= 1

(weak duality: of the devices' seconds, which no order and no sharding makes more). y_d = c / R_gd of one group at a
time is tried. Nothing else is counted, so it holds for one stage, for pipelines and with groups idle alike.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from paraplan.cost_models.ops.roofline import op_cost, rate_of
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.plan import Certificate, Plan
from paraplan.planner.certificate import FAULT

PRODUCTS = frozenset({"paraplan.linear", "paraplan.linear_grad_input", "paraplan.linear_grad_weight"})
"""Ops that are counted: whatever the sharding, ranks together make all of each."""
SCOPE = "any plan over these groups of devices: the model's products at the peak rates of all"


def product_flops(program: Program) -> dict[str, int]:
    """Flops of a step's products with weights, forward and backward, by dtype of operands."""
    total: Counter[str] = Counter()
    for segment in program.segments:
        graph = program.kinds[segment.kind].graph
        for op in graph.ops:
            if op.target in PRODUCTS:
                inputs = tuple(graph.values[name] for name in op.tensors)
                outputs = tuple(None if name is None else graph.values[name] for name in op.outs)
                work = op_cost(op.target, op.args, op.kwargs, inputs, outputs)
                total[work.dtype] += program.apart * int(work.flops)
    return {dtype: flops for dtype, flops in sorted(total.items()) if flops}


def work_bound_s(program: Program, cluster: ClusterSpec) -> float:
    """Seconds that no plan on these devices undercuts."""
    flops, best = product_flops(program), 0.0
    rates = [{dtype: rate_of(group.device, dtype) for dtype in flops} for group in cluster.groups]
    for like in rates:
        shares = sum(
            group.nodes * group.devices_per_node * max((rate[d] / like[d] for d in flops), default=0.0)
            for group, rate in zip(cluster.groups, rates, strict=True)
        )
        best = max(best, sum(each / like[d] for d, each in flops.items()) / shares if shares else 0.0)
    return best


def certified_by_work(plan: Plan) -> Plan:
    """A priced plan with this bound; one above its step is our fault, withdrawn and told."""
    assert plan.prediction is not None
    step_s, bound_s = plan.prediction.step_s, work_bound_s(plan.program, plan.cluster)
    notes = plan.notes
    if bound_s > step_s * (1 + 1e-6):
        notes = (*notes, f"no bound is certified: {bound_s:.6g} s was found, above the simulated step; {FAULT}")
        bound_s = 0.0
    bound_s = min(bound_s, step_s)
    certificate = Certificate(
        status="feasible", objective_s=step_s, bound_s=bound_s, bound_scope=SCOPE, gap=(step_s - bound_s) / step_s
    )
    return msgspec.structs.replace(plan, certificate=certificate, notes=notes)
