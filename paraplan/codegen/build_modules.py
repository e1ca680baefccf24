"""RankProgram -> one fx module per block, shared by all segments that call it."""

from __future__ import annotations

from torch import fx

from paraplan.codegen.block_graph import emit_block
from paraplan.codegen.passes import PASSES, EmitContext
from paraplan.codegen.verify import verify, verify_program
from paraplan.ir.execution.rank_program import Block, RankProgram


def build_block(block: Block, context: EmitContext) -> fx.GraphModule:
    """Emit one block and run every pass, verifying after each.

    Raises:
        CodegenError: the block breaks a rule of `verify`.
    """
    module = emit_block(block)
    verify(module, block)
    for rewrite in PASSES:
        module = rewrite(module, block, context)
        verify(module, block)
    return module


def build_modules(
    program: RankProgram, groups: tuple[str, ...] | None = None, device: str = "cpu"
) -> dict[str, fx.GraphModule]:
    """Every block of a program.

    Args:
        program: of one rank class.
        groups: `DistributedTransport.groups`; None for the in-process transport.
        device: where factories make tensors.

    Raises:
        CodegenError: a block breaks a rule of `verify`, or the program one of `verify_program`.
    """
    verify_program(program)
    context = EmitContext(mesh_shape=program.mesh_shape, groups=groups, device=device)
    return {name: build_block(block, context) for name, block in program.blocks.items()}
