"""Gradient scaling for fp16: `torch.amp.GradScaler`, with one verdict on infinities for the whole mesh.

    scaler = trainer.scaler()
    for batch in trainer.shard(loader):
        loss = trainer.step(batch); scaler.step(optimizer); scaler.update(); optimizer.zero_grad()

The program multiplies the gradient of its loss by the scale itself, so `scale(loss)` is not called; everything else
(unscaling, skipped steps, growth and backoff, state) is torch's. An infinity that one rank finds in its shards skips
the step on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

from paraplan.ir.errors import PlanMismatchError
from paraplan.ir.plan import Plan
from paraplan.runtime.optimizers.waiting_grads import WaitingGrads


class Scaler(GradScaler):
    """torch's scaler for the shards of a plan.

    Args:
        plan: computes in fp16.
        agree: in place, the largest of a scalar over all ranks.
        scales: the programs' scale tensors.
        device: of the gradients.
        waiting: gradients that wait beside states, of the ranks of this process.
        options: of GradScaler (init_scale, growth_factor, backoff_factor, growth_interval).
    Raises:
        PlanMismatchError: the plan computes in another precision.
    """

    def __init__(
        self,
        plan: Plan,
        agree: Callable[[Tensor], object],
        scales: Sequence[Tensor],
        device: str,
        waiting: Sequence[WaitingGrads] = (),
        **options: Any,
    ) -> None:
        if plan.program.precision != "fp16":
            raise PlanMismatchError(
                f"the plan computes in {plan.program.precision}, whose gradients need no scaling; "
                "plan with precision='fp16', or train without a scaler"
            )
        super().__init__(torch.device(device).type, **options)
        self._agree, self._scales, self._waiting = agree, tuple(scales), tuple(waiting)
        self._lazy_init_scale_growth_tracker(torch.device(device))
        self._hand_on()

    def _hand_on(self) -> None:
        for scale in self._scales:
            scale.copy_(self._scale)

    def scale(self, outputs: Any) -> Any:
        """Not needed here.

        Raises:
            PlanMismatchError: always.
        """
        raise PlanMismatchError("trainer.step scales by itself: call scaler.step(optimizer) and scaler.update() alone")

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, and agree on whether one is infinite or NaN."""
        self.unscale_all([optimizer])

    def unscale_all(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """`unscale_` of the optimizers of several ranks of this process, with one verdict."""
        verdict = torch.zeros((), dtype=torch.float32, device=self._scales[0].device)
        states = []
        for optimizer in optimizers:
            torch.maximum(verdict, self._unscale(optimizer).to(verdict), out=verdict)
            states.append(self._per_optimizer_states[id(optimizer)]["found_inf_per_device"])
            for found in states[-1].values():
                torch.maximum(verdict, found.to(verdict.device), out=verdict)
        self._agree(verdict)
        for state in states:
            if not state:  # no gradient on this rank
                state[verdict.device] = verdict.clone()
            for found in state.values():
                found.copy_(verdict)

    def _unscale(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """torch's `unscale_`; gradients that wait beside states are divided in their update. Whether one of these is
        not finite."""
        known = [(each, name, param) for each in self._waiting for name, param in each.of(optimizer).items()]
        grads = [param.grad for _, _, param in known]
        for _, _, param in known:
            param.grad = None
        try:
            super().unscale_(optimizer)
        finally:
            for (_, _, param), grad in zip(known, grads, strict=True):
                param.grad = grad
        inverse = self._scale.double().reciprocal().float()  # as torch's
        for (each, name, _), grad in zip(known, grads, strict=True):
            each.scale(name, grad, inverse)
        finite = [each.is_finite(name) for each, name, _ in known]
        return ~torch.stack(finite).all() if finite else torch.zeros((), dtype=torch.bool, device=inverse.device)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale if that was not done, then the optimizer's step unless an infinity was found anywhere.

        Args:
            optimizer: whose step it is.
            args, kwargs: of its `step`.
        """
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the scale, the same on every rank."""
        super().update(new_scale)
        self._hand_on()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's."""
        super().load_state_dict(state_dict)
        self._hand_on()
