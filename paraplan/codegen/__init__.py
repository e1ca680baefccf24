"""RankProgram -> the fx modules one rank executes."""

from paraplan.codegen.build_modules import build_block, build_modules
from paraplan.codegen.passes import EmitContext

__all__ = ["EmitContext", "build_block", "build_modules"]
