"""What optimizers keep beside parameters, and what their updates need."""

from __future__ import annotations

from collections.abc import Sequence

from paraplan.ir.struct import Value


class Optimizer(Value, frozen=True, kw_only=True):
    """What an optimizer keeps and needs.

    Attributes:
        name: e.g. "adamw".
        state_slots: tensors of a parameter's size it keeps.
        workspace_slots: tensors of one parameter's size alive at once while that parameter is updated.
        lingering_slots: tensors of the previous parameter's size still alive then.
        scalar_bytes: bytes of small state per parameter (step counters).
        fused: whether torch's fused kernels update what has no gaps (`ir.model.fused_updates`), which takes no
        workspace.
        accumulates: whether the loop adds gradients of several steps up for an update, so that those of earlier steps
            are there all the while.
    """

    name: str
    state_slots: int
    workspace_slots: int
    lingering_slots: int = 0
    scalar_bytes: int = 0
    fused: bool = False
    accumulates: bool = False

    @property
    def kept_slots(self) -> int:
        """Tensors of a parameter's size that stay from step to step beside it."""
        return self.state_slots + self.accumulates

    def workspace_bytes(self, sizes: Sequence[int]) -> int:
        """The most an update that is not fused of parameters of these bytes, one after another, allocates and drops
        inside."""
        pairs = zip(sizes, [0, *sizes], strict=False)
        return max((self.workspace_slots * n + self.lingering_slots * last for n, last in pairs), default=0)

    @property
    def timed_as(self) -> str:
        """What profiles call the times of its updates."""
        return f"{self.name}.fused" if self.fused else self.name


OPTIMIZERS: dict[str, Optimizer] = {
    each.name: each
    for each in (
        Optimizer(name="sgd", state_slots=0, workspace_slots=0, fused=True),
        Optimizer(name="momentum", state_slots=1, workspace_slots=0, fused=True),
        Optimizer(name="adam", state_slots=2, workspace_slots=2, lingering_slots=1, scalar_bytes=4, fused=True),
        Optimizer(name="adamw", state_slots=2, workspace_slots=2, lingering_slots=1, scalar_bytes=4, fused=True),
        Optimizer(name="nesterov", state_slots=1, workspace_slots=1, fused=True),
        Optimizer(name="sgd+decay", state_slots=0, workspace_slots=1, fused=True),
        Optimizer(name="momentum+decay", state_slots=1, workspace_slots=1, fused=True),
        Optimizer(name="nesterov+decay", state_slots=1, workspace_slots=2, fused=True),
        Optimizer(name="adam+decay", state_slots=2, workspace_slots=3, lingering_slots=1, scalar_bytes=4, fused=True),
    )
}
"""By name. `+decay`: with `weight_decay`, which adds the parameter to its gradient in a tensor of its own (AdamW's
scales the parameter in place and needs none)."""
