"""What must hold of a block's graph after every pass.

Every collective and copy is waited for exactly once, here or in a later block, and read by nothing else (an early read
gives stale data without an error); the wait holds its input where the instruction says so; and each value's last use in
the graph, which is where generated code frees it, is where the instruction frees it.
"""

from __future__ import annotations

from torch import fx

from paraplan.ir.errors import CodegenError
from paraplan.ir.execution.name import Name
from paraplan.ir.execution.rank_program import Block, InstrKind, RankProgram, StepKind
from paraplan.ir.model.graph import refs
from paraplan.runtime.executing.instructions import INSTR, LOCAL


def verify(module: fx.GraphModule, block: Block) -> None:
    """Check a graph against its block.

    Raises:
        CodegenError: names the instruction and the rule it breaks.
    """
    module.graph.lint()
    _check_waits(module.graph, block)
    _check_frees(module.graph, block)


def verify_program(program: RankProgram) -> None:
    """Check that what blocks leave unfinished is waited for in a later one, and read by nothing before.

    Raises:
        CodegenError: names the step.
    """
    unfinished: set[Name] = set()
    for index, step in enumerate(program.steps):
        if step.kind is not StepKind.CALL:
            found = unfinished & {*step.args, *step.drops}
        else:
            block = program.blocks[step.block]
            waited = {next(refs(instr.args)) for instr in block.instrs if instr.kind is InstrKind.WAIT}
            ended = {outer for local, outer in zip(block.inputs, step.args, strict=True) if local in waited}
            found = (unfinished & {*step.args}) - ended
            unfinished -= ended
            issued = {instr.outs[0] for instr in block.instrs if instr.issues} - waited
            results = zip((*block.outputs, *block.saved), step.outs, strict=True)
            left = {local: outer for local, outer in results if local in issued}
            if None in left.values():
                raise CodegenError(f"step {index} ({step.block}): a collective or copy it leaves unfinished is dropped")
            unfinished |= {outer for outer in left.values() if outer is not None}
        if found:
            raise CodegenError(f"step {index} ({step.action}): reads {sorted(found, key=str)} before waiting for it")
    if unfinished:
        raise CodegenError(f"nothing waits for {sorted(unfinished, key=str)}")


def _check_waits(graph: fx.Graph, block: Block) -> None:
    for node in graph.nodes:
        index = node.meta.get(INSTR)
        if index is None or not block.instrs[index].issues:
            continue
        readers = list(node.users)
        waits = [user for user in readers if _is_wait_of(user, node, block) or user.op == "output"]
        if len(readers) != 1 or len(waits) != 1:
            where = f"{block.name}[{index}] {block.instrs[index].target}"
            raise CodegenError(
                f"{where}: its result must be read by one wait alone, or leave the block, "
                f"and is read by {[str(user) for user in readers]}"
            )


def _is_wait_of(user: fx.Node, issued: fx.Node, block: Block) -> bool:
    index = user.meta.get(INSTR)
    return index is not None and block.instrs[index].kind is InstrKind.WAIT and user.args[0] is issued


def last_use(node: fx.Node) -> int | None:
    """Index of the instruction after which a value is freed; None where it leaves the block."""
    if any(user.op == "output" for user in node.users):
        return None
    own = node.meta.get(INSTR, -1)
    return max((user.meta[INSTR] for user in node.users), default=own)


def _check_frees(graph: fx.Graph, block: Block) -> None:
    nodes = {node.meta[LOCAL]: node for node in graph.nodes if LOCAL in node.meta}
    frees = {name: index for index, instr in enumerate(block.instrs) for name in instr.frees}
    for name, index in frees.items():
        found = last_use(nodes[name])
        if found != index:
            raise CodegenError(
                f"{block.name}[{index}] frees {name}, whose last use is {'the result' if found is None else found}"
            )
    for name, node in nodes.items():
        if name not in frees and name not in block.inputs and last_use(node) is not None:
            raise CodegenError(f"{block.name}: {name} is neither freed nor returned")
