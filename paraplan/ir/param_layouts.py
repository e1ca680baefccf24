"""Where a parameter, its gradient and its optimizer's state live: layouts on a stage's mesh, and tiers."""

from __future__ import annotations

import msgspec

from paraplan.ir.machine.tier_placement import DEVICE, HOST, TierPlacement
from paraplan.ir.struct import Value

AHEAD = "+ahead"
"""How pins say that a stored copy is gathered once a step."""


class ParamLayouts(Value, frozen=True, kw_only=True):
    """Where a parameter lives between uses; each a layout in text form on the stage's mesh.

    `stored` is the copy ops read, `grad` the accumulator each microbatch adds into, `state` what the optimizer updates
    (gradients are brought there once a step, the updated parameter goes back to `stored`). ZeRO-3 shards all three,
    ZeRO-2 the last two, ZeRO-1 the last.

    With `ahead` the stored copy lies as the state does between steps: it is gathered once a step, while segments before
    its first reader run, and kept until its last. So nobody waits for the gather that would follow an update, and
    ZeRO-1 and ZeRO-2 hold no whole copy then (FSDP's SHARD_GRAD_OP, Megatron-LM's overlapped gather of parameters).

    `state_tier` is where the optimizer's copy and states are: "" for the device, or "host": gradients are then copied
    there, the host updates, and the updated parameter is copied back (ZeRO-Offload, Ren et al. 2021). On "disk" they
    are files, of which a few parameters' at a time are brought to the host's memory, updated there, and written back
    (ZeRO-Infinity, Rajbhandari et al. 2021). With `fetched` they are brought to the device instead, from either tier,
    and updated there; gradients then stay on the device. `stored_tier` is where the stored copy is: off the device it
    is copied there a segment before it is read, and given up after it. A trained parameter's state then is on the same
    tier, in the same storage, and where that has another dtype (float32, under bf16) what comes is cast on arrival.

    `grad_tier` is where the gradient waits for its update: "" for where that is done, or the tier of states that come
    to it, to which it is written as it is made and with which it comes. All of it as one value is `place`."""

    stored: str
    grad: str
    state: str
    state_tier: str = ""
    stored_tier: str = ""
    fetched: bool = False
    ahead: bool = False
    grad_tier: str = ""

    @property
    def resting(self) -> str:
        """The layout of the stored copy between steps."""
        return self.state if self.ahead else self.stored

    @property
    def text(self) -> str:
        """As a pin says it: "stored/grad/state", then "+ahead", or "@host" where the state is, "@all" where all is."""
        place = self.place if self.state_tier else self.place.frozen
        at = AHEAD if self.ahead else f"@{place.text}" if place.states else ""
        return f"{self.stored}/{self.grad}/{self.state}{at}"

    @property
    def update_tier(self) -> str:
        """Where the optimizer updates: "" for the device, or a memory of the host."""
        return self.place.update_tier

    @property
    def staged(self) -> bool:
        """Whether states are brought to where they are updated, and back."""
        return self.place.is_staged

    @property
    def place(self) -> TierPlacement:
        """Where a trained parameter, its states and its gradient are, and who updates it."""
        update = HOST if self.state_tier and not self.fetched else DEVICE
        place = TierPlacement(self.stored_tier, self.state_tier, self.grad_tier, update)
        return place if self.grad_tier else place._replace(grads=place.update_tier)

    def placed(self, place: TierPlacement, ahead: bool = False) -> ParamLayouts:
        """The same layouts elsewhere, gathered ahead or not."""
        return msgspec.structs.replace(
            self,
            state_tier=place.states,
            stored_tier=place.params,
            ahead=ahead,
            fetched=bool(place.states) and place.update == DEVICE,
            grad_tier=place.grads if place.grads_wait else "",
        )
