"""Every op torch tests, under all its placements: values, entries and memory against eager in float64.

Each op is called in a small model with torch's own sample inputs (`op_samples`): every float input is a parameter plus
a batch input, and the loss adds up every result times fixed random weights, so that forward and backward run. The
model is captured once a sample. On two ranks plan i takes the i-th strategy of every op of the joint graph, so that
every legal placement of every op runs (up to `PLANS`), and a random plan runs on four; layouts of parameters, gradients
and batch, recomputation and chunks are drawn. The loss and every gradient are held against eager autograd (where the
op draws random numbers, or is a cast to fewer bits, which capture in float64 widens, against the captured program on
one device), what each rank did against the prediction, entry by entry, peaks against predicted ones, and what each
instruction was seen to make and drop inside against its predicted workspace, which may not be less.

    right      every plan gave eager's numbers, entries and memory
    wrong      one did not: named under `failures`, as are errors that are not the package's own (crashed)
    refused    capture names why it cannot
    none       torch has no finite sample for it, or none of a size that is tried, or what it makes is not
               initialised

    python -m benchmarks.ops [--only PATTERN] [--json FILE [--resume]] [--limit N] [--minutes M] [--part 1/4]
"""

from __future__ import annotations

import multiprocessing
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.op_samples import OpSample, op_infos, samples
from benchmarks.table import Row, main
from paraplan.capture import capture
from paraplan.capture.reference import run_program
from paraplan.codegen import build_modules
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.errors import CaptureError, ParaplanError, UnsupportedOpError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.jobs.checking.check import max_error, relative
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.sampling import random_plan
from paraplan.rules.graph_strategies import GraphKey, graph_strategies
from paraplan.rules.strategies import kept_whole
from paraplan.runtime.in_process import InProcessTrainer

MAX_SECONDS = 150
PLANS = (8, 3)
"""Of an op's first and second sample on two ranks, and one more on four; the second number is that of rows, too."""

TOLERANCE, PEAK_RATIO, FEW_BYTES = 1e-9, 1.02, 256
"""A prediction a few bytes above a peak counts as equal: peaks here are of a few kilobytes."""

ROWS = 4
"""Of the batch; inputs whose first dim is so long are split with it."""

COLUMNS = (
    *("case", "status", "samples", "plans", "worst", "entries_equal", "peak_ratio_min", "peak_ratio_max"),
    *("replicated", "failures", "reason"),
)


class OpModel(nn.Module):
    """One call of an op between parameters and a loss.

    Args:
        sample: the call.
        by_rows: whether inputs with `ROWS` rows are rows of the batch: their values come in as `x<i>`, `p<i>` is a
            bias of zeros, one for all rows. All other floats are parameters `p<i>` plus zeros `x<i>` of the batch, so
            that every element has a gradient; what is no float comes in as `x<i>`.
    """

    def __init__(self, sample: OpSample, by_rows: bool) -> None:
        super().__init__()
        self.sample = sample
        self.rows = [by_rows and x.dim() > 0 and x.shape[0] == ROWS for x in sample.tensors]
        generator = torch.Generator().manual_seed(7)
        for index, x in enumerate(sample.tensors):
            if x.is_complex():
                x = torch.view_as_real(x)
            if x.is_floating_point():
                value = torch.zeros_like(x[:1]) if self.rows[index] else x
                self.register_parameter(f"p{index}", nn.Parameter(value.double().clone().contiguous()))
        torch.manual_seed(3)
        for index, out in enumerate(sample.call([x.clone() for x in sample.tensors])):
            shape = (*out.shape, 2) if out.is_complex() else out.shape
            self.register_buffer(f"w{index}", torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5)
        self.scale = nn.Parameter(torch.tensor(1.25, dtype=torch.float64))
        self.head = nn.Parameter(torch.rand(6, generator=generator, dtype=torch.float64))

    @property
    def is_narrow(self) -> bool:
        """Whether the op computes in less than float64, which the captured program does not."""
        outs = self.sample.call([x.clone() for x in self.sample.tensors])
        narrow = (torch.float32, torch.float16, torch.bfloat16, torch.complex64)
        return any(out.dtype in narrow for out in outs)

    def batch(self) -> tuple[dict[str, Tensor], dict[str, int | None]]:
        """The inputs and their batch dims."""
        found: dict[str, Tensor] = {"rows": torch.linspace(-1, 1, ROWS * 6, dtype=torch.float64).view(ROWS, 6)}
        for index, x in enumerate(self.sample.tensors):
            if x.is_complex():
                x = torch.view_as_real(x)
            is_parameter = x.is_floating_point() and not self.rows[index]
            x = x.double() if x.is_floating_point() else x
            found[f"x{index}"] = torch.zeros_like(x) if is_parameter else x.clone()
        return found, {"rows": 0} | {f"x{index}": 0 if rows else None for index, rows in enumerate(self.rows)}

    def forward(
        self,
        rows: Tensor,
        x0: Tensor | None = None,
        x1: Tensor | None = None,
        x2: Tensor | None = None,
        x3: Tensor | None = None,
        x4: Tensor | None = None,
        x5: Tensor | None = None,
        x6: Tensor | None = None,
        x7: Tensor | None = None,
    ) -> Tensor:
        given = []
        for index, (like, x) in enumerate(zip(self.sample.tensors, (x0, x1, x2, x3, x4, x5, x6, x7), strict=False)):
            assert x is not None
            x = x + getattr(self, f"p{index}") if x.is_floating_point() else x
            given.append(torch.view_as_complex(x) if like.is_complex() else x)
        loss = ((rows * self.head) ** 2).sum()
        for index, out in enumerate(self.sample.call(given)):
            out = torch.view_as_real(out.to(torch.complex128)) if out.is_complex() else out
            kept = out if out.is_floating_point() else out.double() * self.scale
            loss = loss + (kept.double() * getattr(self, f"w{index}")).sum()
        return loss


@dataclass
class Seen:
    """What the plans of one op did."""

    samples: int = 0
    plans: int = 0
    worst: float = 0.0
    equal: int = 0
    least: float = float("inf")
    most: float = 0.0
    replicated: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def row(self) -> Row:
        """As a row of the table."""
        wrong = "crashed" if any(text.startswith("crash") for text in self.failures) else "wrong"
        status = wrong if self.failures else "right" if self.plans else "refused" if self.refusals else "none"
        return {
            "status": status,
            "samples": self.samples,
            "plans": self.plans,
            "worst": self.worst,
            "entries_equal": f"{self.equal}/{self.plans}",
            "peak_ratio_min": self.least if self.plans else None,
            "peak_ratio_max": self.most if self.plans else None,
            "replicated": "; ".join(f"{op}: {why}" for op, why in self.replicated.items()),
            "failures": self.failures,
            "reason": "; ".join(dict.fromkeys(self.refusals)),
        }


@dataclass(frozen=True)
class Wanted:
    """What plans are held against."""

    loss: float
    grads: dict[str, Tensor]


def eager(model: OpModel, batch: dict[str, Tensor]) -> Wanted | None:
    """Eager's loss and gradients; None where they are not finite."""
    torch.manual_seed(3)
    model.zero_grad()
    loss = model(**{name: x.clone() for name, x in batch.items()})
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    finite = all(bool(torch.isfinite(x).all()) for x in (loss.detach(), *grads.values()))
    return Wanted(float(loss), grads) if finite else None


def is_right(model: OpModel, batch: dict[str, Tensor], grads: dict[str, Tensor], step: float = 1e-5) -> bool:
    """Whether gradients are those of finite differences along a random direction of each parameter."""
    generator = torch.Generator().manual_seed(5)

    def loss_at(param: Tensor, shift: Tensor) -> float:
        kept = param.detach().clone()
        param.data = kept + shift
        torch.manual_seed(3)
        found = float(model(**{name: x.clone() for name, x in batch.items()}))
        param.data = kept
        return found

    for name, param in model.named_parameters():
        way = torch.randn(param.shape, dtype=param.dtype, generator=generator)
        slope = (loss_at(param, step * way) - loss_at(param, -step * way)) / (2 * step)
        if abs(slope - float((grads[name] * way).sum() if name in grads else 0.0)) > 1e-5 * max(1.0, abs(slope)):
            return False
    return True


def captured(model: OpModel, batch: dict[str, Tensor], dims: dict[str, int | None]) -> Program:
    """The model's program."""
    return capture(model, batch, precision="fp64", batch_dims=dims)


def plans(program: Program, count: int) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Plans in which every strategy of every op on two ranks is taken, and random ones on four."""
    two, four = (
        Job(program, ClusterSpec.local(ranks), OPTIMIZERS["sgd"], ModelRef(display="op"), {}) for ranks in (2, 4)
    )
    counts = [len(each) for kind in program.kinds for each in graph_strategies(GraphKey(kind.graph, (2,)))]
    for number in range(min(max(counts), count)):
        taken = partial(_nth, number)
        yield f"two {number}", partial(random_plan, two, number, max_microbatches=1 + number % 2, pick=taken)
    if count > 2:
        yield "four 0", partial(random_plan, four, 0)


def _nth(number: int, keys: Sequence[str]) -> str:
    """The plain strategies first, then those that reduce a partial result at once."""
    return sorted(keys, key=lambda key: ">" in key)[number % len(keys)]


def run_plan(plan: Plan, model: OpModel, batch: dict[str, Tensor], wanted: Wanted, seen: Seen) -> str:
    """Run a plan; what is wrong with it, "" if nothing is."""
    programs = verify_plan(plan)
    trainer = InProcessTrainer(plan, programs, [build_modules(each) for each in programs], model)
    error = relative(float(trainer.step(batch)), wanted.loss)
    grads = trainer.grads()
    trainer.apply_optimizer(torch.optim.SGD, lr=0.0)
    where = "loss"
    missing = {name: torch.zeros_like(x) for name, x in wanted.grads.items() if name not in grads}
    off, name = max_error({**grads, **missing}, wanted.grads)
    if off > error:
        error, where = off, f"gradient of {name}"
    if error > TOLERANCE and is_right(model, batch, grads) and not is_right(model, batch, wanted.grads):
        seen.refusals.append("eager: torch's own gradients are not those of finite differences, the plans' are")
        error = 0.0
    seen.worst = max(seen.worst, error)
    faults = [] if error <= TOLERANCE else [f"{where} {error:.1e}"]
    traces, equal = simulate_plan(plan, programs).traces, True
    predicted = [[entry.key for entry in entries(program)] for program in programs]
    for rank, index in enumerate(plan.schedule.rank_class):
        found = [entry.key for entry in trainer.entries(rank)]
        if found != predicted[index] and equal:
            equal = False
            differ = next((pair for pair in zip(found, predicted[index], strict=False) if pair[0] != pair[1]), None)
            faults.append(f"entries differ: recorded and predicted {differ}")
        peak, measured = traces[index].peak_bytes, trainer.peak_bytes(rank)
        ratio = peak / measured if not 0 < peak - measured <= FEW_BYTES else 1.0
        seen.least, seen.most = min(seen.least, ratio), max(seen.most, ratio)
        if not 1.0 <= ratio <= PEAK_RATIO and not any("peak" in fault for fault in faults):
            faults.append(f"peak {ratio:.4f}")
        for (block, at), nbytes in trainer.ranks[rank].executor.account.workspaces.items():
            instr = programs[index].blocks[block].instrs[at]
            if instr.workspace_bytes < nbytes and not any("workspace" in fault for fault in faults):
                faults.append(f"workspace of {instr.target}: {nbytes} B for {instr.workspace_bytes}")
    seen.equal += equal
    return ", ".join(faults)


def try_sample(sample: OpSample, by_rows: bool, count: int, seen: Seen) -> None:
    """So many plans of one sample."""
    try:
        model = OpModel(sample, by_rows)
        batch, dims = model.batch()
        wanted = eager(model, batch)
        again = eager(model, batch) if wanted is not None else None
    except Exception as fault:  # noqa: BLE001  (eager refuses: no sample)
        seen.refusals.append(f"eager: {_first_line(fault)}")
        return
    if wanted is None or again is None or again.loss != wanted.loss:
        return
    seen.samples += 1
    try:
        program = captured(model, batch, dims)
    except (CaptureError, UnsupportedOpError) as fault:
        seen.refusals.append(_first_line(fault))
        return
    except Exception as fault:  # noqa: BLE001  (a finding)
        seen.failures.append(f"crash in capture: {type(fault).__name__}: {_first_line(fault)}")
        return
    for kind in program.kinds:
        for op in kind.graph.ops:
            if kept_whole(op):
                seen.replicated[op.target] = op.rule.reason if op.rule is not None else "no rule"
    if model.is_narrow or any(
        op.target in ("paraplan.dropout", "paraplan.uniform") or op.target.startswith("paraplan.rand")
        for kind in program.kinds
        for op in kind.graph.ops
    ):
        params = {name: p.detach() for name, p in model.named_parameters()}
        loss, grads = run_program(program, params, dict(model.named_buffers()), batch, 0)
        wanted = Wanted(float(loss), {name: x for name, x in grads.items() if x is not None})
    for name, make in plans(program, count):
        seen.plans += 1
        try:
            fault = run_plan(make(), model, batch, wanted, seen)
        except ParaplanError as error:
            fault = f"crash: {type(error).__name__}: {_first_line(error)}"
        except Exception as error:  # noqa: BLE001  (a finding)
            fault = f"crash: {type(error).__name__}: {_first_line(error)}"
        if fault:
            prefix = "crash: " if fault.startswith("crash: ") else ""
            seen.failures.append(f"{prefix}sample {seen.samples} plan {name}: {fault.removeprefix('crash: ')}")


def _first_line(fault: Exception) -> str:
    lines = [line for line in str(fault).strip().splitlines() if line.strip()] or [""]
    return re.sub(r"/\S+/", "", lines[0])[:300]


def try_op(name: str) -> Row:
    """One op, all its samples and plans."""
    torch.set_num_threads(1)
    seen = Seen()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = samples(name, len(PLANS))
        except Exception as fault:  # noqa: BLE001  (torch's own generator)
            found = []
            seen.refusals.append(f"no samples: {_first_line(fault)}")
        found = [sample for sample in found if len(sample.tensors) <= 8 and "empty" not in name]
        for sample, number in zip(found, PLANS, strict=False):
            try_sample(sample, False, number, seen)
        by_rows = next((x for x in found if any(t.dim() and t.shape[0] == ROWS for t in x.tensors)), None)
        if by_rows is not None and len(PLANS) > 1:
            try_sample(by_rows, True, PLANS[-1], seen)
    return seen.row()


def apart(name: str) -> Row:
    """`try_op` in a fork: a kernel that ends its process takes one op with it."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=lambda: there.send(try_op(name)), daemon=True)
    child.start()
    there.close()
    why = f"it took more than {MAX_SECONDS} s"
    try:
        if here.poll(MAX_SECONDS):
            return here.recv()  # type: ignore[no-any-return]
    except EOFError:
        child.join()
        why = f"its process ended with exit code {child.exitcode}"
    finally:
        child.kill()
        child.join()
    seen = Seen(failures=[f"crash: {why}"])
    return seen.row()


def summary(rows: Sequence[Row]) -> Row:
    """Of all ops: how many of each status, and the bounds."""
    by_status: dict[str, int] = {}
    for row in rows:
        by_status[row["status"]] = by_status.get(row["status"], 0) + 1
    tried = [row for row in rows if row["plans"]]
    return {
        "status": ", ".join(f"{count} {status}" for status, count in sorted(by_status.items())),
        "samples": sum(row["samples"] for row in rows),
        "plans": sum(row["plans"] for row in rows),
        "worst": max((row["worst"] for row in tried), default=None),
        "entries_equal": f"{sum(int(row['entries_equal'].split('/')[0]) for row in tried)}/"
        f"{sum(row['plans'] for row in tried)}",
        "peak_ratio_min": min((row["peak_ratio_min"] for row in tried), default=None),
        "peak_ratio_max": max((row["peak_ratio_max"] for row in tried), default=None),
        "replicated": f"{sum(bool(row['replicated']) for row in tried)} ops",
    }


if __name__ == "__main__":
    raise SystemExit(main("ops", {name: partial(apart, name) for name in op_infos()}, COLUMNS, summary=summary))
