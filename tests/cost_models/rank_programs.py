"""Small rank programs by hand and at random, and a naive replay to hold the fast one against."""

from __future__ import annotations

from hypothesis import strategies as st

from paraplan.cost_models.costs import Costs
from paraplan.ir.execution.entry import Entry
from paraplan.ir.execution.name import Role
from paraplan.ir.execution.rank_program import (
    Block,
    BlockRole,
    Instr,
    InstrKind,
    LocalValue,
    OuterValue,
    RankProgram,
    Step,
    StepKind,
)
from paraplan.ir.machine.cluster import ClusterSpec, NodeGroup
from paraplan.ir.machine.device import Device, Link
from paraplan.ir.machine.mesh import make_mesh
from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.model.graph import refs
from tests.named import all_named, named, some_named

ADD = "aten.add.Tensor"


def toy_costs(num_devices: int = 2, issue_s: float = 0.0) -> Costs:
    """One byte of memory traffic, or of link traffic, takes one second; starting anything takes none, issuing it so
    much of the host."""
    device = Device(
        kind="toy",
        memory_bytes=1 << 40,
        memory_bytes_per_s=1.0,
        flops_per_s={"float32": 1.0},
        launch_s=0.0,
        issue_s=issue_s,
        backend="cpu",
    )
    link = Link(bytes_per_s=1.0, latency_s=0.0)
    group = NodeGroup(nodes=1, devices_per_node=num_devices, device=device, in_node=link, host=link, disk=link)
    return Costs(ClusterSpec(name="toy", groups=(group,)), make_mesh((num_devices,), ("dp",)))


def own(name: str, nbytes: int, tier: str = "") -> LocalValue:
    """A value that owns `nbytes` bytes."""
    return LocalValue(dtype="uint8", shape=(nbytes,), strides=(1,), base=name, storage_bytes=nbytes, tier=tier)


def view(base: str, nbytes: int, tier: str = "") -> LocalValue:
    """A view of `base`."""
    return LocalValue(dtype="uint8", shape=(nbytes, 1), strides=(1, 1), base=base, storage_bytes=0, tier=tier)


def op(outs: str, ins: str, frees: str = "", target: str = ADD, workspace_bytes: int = 0) -> Instr:
    """An op; names separated by blanks."""
    return Instr(
        target=target,
        args=tuple("%" + name for name in ins.split()),
        outs=tuple(outs.split()),
        frees=tuple(frees.split()),
        workspace_bytes=workspace_bytes,
    )


def issue(out: str, name: str, target: str = "all_reduce") -> Instr:
    """A collective over axis 0."""
    return Instr(kind=InstrKind.COLLECTIVE, target=target, args=("%" + name, "sum"), outs=(out,), axis=0)


def copy(out: str, name: str, target: str = "offload", tier: str = "host") -> Instr:
    """A copy to or from a tier."""
    return Instr(kind=InstrKind.COPY, target=target, args=("%" + name, ":" + tier), outs=(out,))


def wait(out: str, issued: str, frees: str = "") -> Instr:
    """A wait."""
    return Instr(kind=InstrKind.WAIT, target="wait", args=("%" + issued,), outs=(out,), frees=tuple(frees.split()))


def block(
    name: str,
    inputs: str,
    outputs: str,
    values: dict[str, LocalValue],
    *instrs: Instr,
    saved: str = "",
    role: BlockRole = BlockRole.FORWARD,
) -> Block:
    """A block; names separated by blanks."""
    return Block(
        name=name,
        role=role,
        inputs=tuple(inputs.split()),
        outputs=tuple(outputs.split()),
        saved=tuple(saved.split()),
        values=values,
        instrs=instrs,
    )


def call(name: str, args: str, outs: str, drops: str = "", action: str = "0F0", microbatch: int = 0) -> Step:
    """A CALL; "-" among the outs is None."""
    return Step(
        kind=StepKind.CALL,
        action=action,
        block=name,
        args=all_named(args),
        drops=all_named(drops),
        outs=some_named(outs),
        microbatch=microbatch,
        segment=0,
    )


def program(
    blocks: list[Block],
    outer: dict[str, int],
    steps: list[Step],
    grads: dict[str, str] | None = None,
    optimizer_bytes: int = 0,
    update_workspace_bytes: int = 0,
) -> RankProgram:
    """A rank program; `outer` gives bytes, on the tier a name begins with."""
    return RankProgram(
        mesh_axes=("dp",),
        mesh_shape=(2,),
        num_microbatches=1,
        blocks={b.name: b for b in blocks},
        outer={
            named(name): OuterValue(
                role=Role.PARAMETER,
                source=name,
                dtype="uint8",
                shape=(nbytes,),
                layout="R",
                nbytes=nbytes,
                tier=tier_of(name),
            )
            for name, nbytes in outer.items()
        },
        steps=tuple(steps),
        loss=named("loss"),
        grads={name: named(grad) for name, grad in (grads or {}).items()},
        optimizer_bytes=optimizer_bytes,
        update_workspace_bytes=update_workspace_bytes,
    )


def tier_of(name: str) -> str:
    """The tier an outer name begins with."""
    return next((tier for tier in TIERS if name.startswith(tier)), "")


class Cell:
    """A storage of the naive replay."""

    def __init__(self, nbytes: int, tier: str = "") -> None:
        self.nbytes, self.tier = nbytes, tier


class NaiveReplay:
    """Walks every instruction and asks, after each, which storages any name still reaches."""

    def __init__(self, rank_program: RankProgram) -> None:
        self.program = rank_program
        self.outer = {name: Cell(value.nbytes, value.tier) for name, value in rank_program.outer.items()}
        self.local: dict[str, Cell] = {}
        self.peak = self.alive()
        self.live: list[int] = []
        self.entries: list[tuple[str, int, int, tuple[tuple[str, int, int], ...]]] = []
        self.tier_peaks = self.away()
        self.instants: dict[tuple[int, int], tuple[int, dict[str, int]]] = {}

    def alive(self) -> int:
        """Bytes on the device reached by any name."""
        return self.program.optimizer_bytes + self.on("")

    def on(self, tier: str) -> int:
        """Bytes of a tier reached by any name."""
        cells = {id(cell): cell for cell in (*self.outer.values(), *self.local.values()) if cell.tier == tier}
        return sum(cell.nbytes for cell in cells.values())

    def away(self) -> dict[str, int]:
        """Bytes reached on every tier."""
        return {tier: self.on(tier) for tier in TIERS}

    def note(self, target: str, before: int, allocated: int, tiers: dict[str, int], more: dict[str, int]) -> None:
        """Record an entry; drops that free nothing are none. `tiers`: away before, `more`: allocated there."""
        freed, after = before + allocated - self.alive(), self.away()
        self.tier_peaks = {tier: max(self.tier_peaks[tier], tiers[tier] + more.get(tier, 0)) for tier in TIERS}
        moved = ((tier, more.get(tier, 0), tiers[tier] + more.get(tier, 0) - after[tier]) for tier in sorted(TIERS))
        changed = tuple(each for each in moved if each[1] or each[2])
        if target != "drop" or freed or changed:
            self.entries.append((target, allocated, freed, changed))
            self.live.append(self.alive())

    def run(self) -> NaiveReplay:
        """Take every step."""
        for number, step in enumerate(self.program.steps):
            before, away = self.alive(), self.away()
            self.instants[number, -1] = before, away
            if step.kind is StepKind.CALL:
                self.call(step, number)
            elif step.kind is StepKind.ACCUMULATE:
                total, addend = step.args
                self.outer.setdefault(total, self.outer[addend])
                del self.outer[addend]
                self.note("accumulate", before, 0, away, {})
            elif step.kind is StepKind.DROP:
                for name in step.drops:
                    del self.outer[name]
                self.note("drop", before, 0, away, {})
            else:
                self.peak = max(self.peak, before + self.program.update_workspace_bytes)
                self.note("update", before, 0, away, {})
        return self

    def call(self, step: Step, number: int) -> None:
        """Run a block, instruction by instruction."""
        code = self.program.blocks[step.block]
        self.local = {name: self.outer[outer] for name, outer in zip(code.inputs, step.args, strict=True)}
        cells = dict(self.local)  # by owner, also after the owner's name is gone
        before, away = self.alive(), self.away()
        for name in step.drops:
            del self.outer[name]
        results = (*code.outputs, *code.saved)
        read = {name for instr in code.instrs for name in refs(instr.args)}
        for name in set(code.inputs) - read - set(results):
            del self.local[name]
        self.note("drop", before, 0, away, {})
        for index, instr in enumerate(code.instrs):
            before, away = self.alive(), self.away()
            for name in instr.outs:
                value = code.values[name]
                cells[name] = Cell(value.storage_bytes, value.tier) if value.base == name else cells[value.base]
                self.local[name] = cells[name]
            allocated = self.alive() - before
            more = {tier: size - away[tier] for tier, size in self.away().items()}
            self.peak = max(self.peak, before + allocated + instr.workspace_bytes)
            self.instants[number, index] = self.alive() + instr.workspace_bytes, self.away()
            for name in instr.frees:
                del self.local[name]
            self.note("wait" if instr.kind is InstrKind.WAIT else instr.target, before, allocated, away, more)
        before, away = self.alive(), self.away()
        for outer, name in zip(step.outs, results, strict=True):
            if outer is not None:
                self.outer[outer] = self.local[name]
        self.local = {}
        self.note("drop", before, 0, away, {})


def summary(entry: Entry) -> tuple[str, int, int, tuple[tuple[str, int, int], ...]]:
    """What the naive replay notes of an entry."""
    return entry.target, entry.allocated_bytes, entry.freed_bytes, entry.tiers


@st.composite
def random_blocks(draw: st.DrawFn, name: str) -> Block:
    """A well-formed block: ops, views (of inputs too), collectives and waits, on any tier; frees at last uses."""
    tiers = st.sampled_from(["", "", "", *TIERS])
    inputs = [f"i{k}" for k in range(draw(st.integers(1, 4)))]
    values = {value: own(value, draw(st.integers(0, 9)), draw(tiers)) for value in inputs}
    steps: list[tuple[InstrKind, str, list[str], int]] = []
    names, pending = list(inputs), []
    for index in range(draw(st.integers(0, 8))):
        out, kind = f"v{index}", draw(st.sampled_from(["op", "op", "view", "issue", "wait"]))
        if kind == "wait" and pending:
            issued = pending.pop(0)
            values[out] = view(root(values, issued), values[issued].shape[0], values[issued].tier)
            steps.append((InstrKind.WAIT, out, [issued], 0))
        elif kind == "view":
            base = draw(st.sampled_from(names))
            values[out] = view(root(values, base), values[base].shape[0], values[base].tier)
            steps.append((InstrKind.OP, out, [base], 0))
        elif kind == "issue":
            values[out] = own(out, draw(st.integers(0, 9)), draw(tiers))
            steps.append((InstrKind.COLLECTIVE, out, [draw(st.sampled_from(names))], 0))
            pending.append(out)
            continue
        else:
            values[out] = own(out, draw(st.integers(0, 9)), draw(tiers))
            used = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3))
            steps.append((InstrKind.OP, out, used, draw(st.integers(0, 9))))
        names.append(out)
    for issued in pending:
        out = f"w{issued}"
        values[out] = view(issued, values[issued].shape[0], values[issued].tier)
        steps.append((InstrKind.WAIT, out, [issued], 0))
        names.append(out)
    outputs = draw(st.lists(st.sampled_from(names), max_size=3))
    saved = draw(st.lists(st.sampled_from(names), max_size=3))
    return Block(
        name=name,
        role=BlockRole.FORWARD,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        saved=tuple(saved),
        values=values,
        instrs=with_frees(steps, {*outputs, *saved}),
    )


def root(values: dict[str, LocalValue], name: str) -> str:
    """The owner of a name's storage."""
    return name if values[name].base == name else root(values, values[name].base)


def with_frees(steps: list[tuple[InstrKind, str, list[str], int]], kept: set[str]) -> tuple[Instr, ...]:
    """Instructions that drop every name not kept at its last use (results nobody reads at once)."""
    last: dict[str, int] = {}
    for index, (_, out, used, _) in enumerate(steps):
        last |= dict.fromkeys([*used, out], index)
    return tuple(
        Instr(
            kind=kind,
            target={InstrKind.OP: ADD, InstrKind.WAIT: "wait"}.get(kind, "all_gather"),
            args=tuple("%" + name for name in used),
            outs=(out,),
            axis=0 if kind is InstrKind.COLLECTIVE else -1,
            frees=tuple(sorted(name for name, at in last.items() if at == index and name not in kept)),
            workspace_bytes=workspace,
        )
        for index, (kind, out, used, workspace) in enumerate(steps)
    )


@st.composite
def random_programs(draw: st.DrawFn) -> RankProgram:
    """Calls, accumulations, drops and an update over a namespace full of aliases and overwritten names."""
    blocks = [draw(random_blocks(name)) for name in ("a", "b")]
    names = [*(f"o{k}" for k in range(draw(st.integers(1, 3)))), *(f"{tier}0" for tier in TIERS)]
    outer = {name: draw(st.integers(0, 9)) for name in names}
    where, steps = {name: tier_of(name) for name in outer}, []
    for index in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(["call", "call", "call", "accumulate", "drop", "update"]))
        if not where:
            break
        known = st.sampled_from(sorted(where))
        if kind == "call":
            code = draw(st.sampled_from(blocks))
            there = {tier: [name for name in sorted(where) if where[name] == tier] for tier in ("", *TIERS)}
            wanted = [there[code.values[name].tier] for name in code.inputs]
            if not all(wanted):
                continue
            args = [draw(st.sampled_from(names)) for names in wanted]
            drops = draw(st.lists(known, unique=True, max_size=3))
            fresh = st.sampled_from([*(f"x{index}{k}" for k in range(6)), "o0", None])
            outs = [draw(fresh) for _ in (*code.outputs, *code.saved)]
            where = {name: tier for name, tier in where.items() if name not in drops}
            made = zip(outs, (*code.outputs, *code.saved), strict=True)
            where |= {out: code.values[local].tier for out, local in made if out is not None}
            steps.append(
                Step(
                    kind=StepKind.CALL,
                    action="0F0",
                    block=code.name,
                    args=tuple(map(named, args)),
                    outs=tuple(None if out is None else named(out) for out in outs),
                    drops=tuple(map(named, drops)),
                )
            )
        elif kind == "accumulate":
            addend = draw(known)
            total = draw(st.sampled_from(["acc", *sorted({*where} - {addend})]))
            if addend == total:
                continue
            tier = where.pop(addend)
            where.setdefault(total, tier)
            steps.append(Step(kind=StepKind.ACCUMULATE, action="0B0", args=(named(total), named(addend))))
        elif kind == "drop":
            drops = draw(st.lists(known, unique=True, max_size=2))
            where = {name: tier for name, tier in where.items() if name not in drops}
            steps.append(Step(kind=StepKind.DROP, action="0B0", drops=tuple(map(named, drops))))
        else:
            steps.append(Step(kind=StepKind.UPDATE, action="0UPDATE"))
    return program(blocks, outer, steps, optimizer_bytes=draw(st.integers(0, 9)), update_workspace_bytes=5)
