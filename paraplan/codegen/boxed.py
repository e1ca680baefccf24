"""The boxed calling convention: one list, emptied on entry, so that a block can free its inputs.

`f(*args)` keeps every argument alive until it returns, because the caller's argument tuple does. Generated
code here takes a list, unpacks it and clears it; fx then frees each name at its last use. Inputs the block
never reads are not even unpacked.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.graph import CodeGen


class BoxedCodeGen(CodeGen):
    """Writes `def forward(self, boxed)`.

    Args:
        unread: names of placeholders without users.
    """

    def __init__(self, unread: frozenset[str]) -> None:
        super().__init__()
        self.unread = unread

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **kwargs: Any) -> str:
        """The signature and the unpacking, as torch.fx asks for them.

        Args:
            free_vars: the placeholders in order, after "self", as fx writes them.
            maybe_return_annotation: not written.
            kwargs: what other versions of torch give.
        """
        names = [text.split(":")[0].split("=")[0].strip() for text in free_vars if text != "self"]
        lines = [f"def {self._func_name}(self, boxed):"]
        lines += [f"    {name} = boxed[{index}]" for index, name in enumerate(names) if name not in self.unread]
        return "\n".join([*lines, "    boxed.clear()"])


def box(graph: fx.Graph) -> None:
    """Give a graph the boxed convention."""
    unread = frozenset(node.name for node in graph.nodes if node.op == "placeholder" and not node.users)
    graph.set_codegen(BoxedCodeGen(unread))
