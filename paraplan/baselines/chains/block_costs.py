"""What a chain's blocks need, for dynamic programs over chains: bytes beside the boundary each block starts from.

For blocks 0 … L − 1 (boundary −1 is what is given, always there):
    checkpoint_bytes(s, b)  of boundary b beyond those of boundary s − 1, which is there too
    saved[k]                all that block k makes and the backward reads, its boundary included; saved_bytes[k] of it
    forward_peak[k]         the most while its forward runs, keeping only its boundary
    saving_peak[k]          the same, keeping what `saved_bytes` counts
    backward_peak[k]        the most while its backward runs, what it saved and the gradients that come in included
    incoming_bytes[k]       gradients there before its backward: for its own and earlier ones' ops, and those kept

Exact for a chain whose blocks read nothing further away than their boundary; elsewhere estimates, which is why plans
are evaluated before they are believed.
"""

from __future__ import annotations

from dataclasses import dataclass

from paraplan.baselines.chains.chain_blocks import Chain
from paraplan.planner.memory.problem import GIVEN


@dataclass(frozen=True)
class BlockCosts:
    """Bytes of a chain's blocks; see the module's head."""

    chain: Chain
    saved: tuple[frozenset[int], ...]
    saved_bytes: tuple[int, ...]
    forward_peak: tuple[int, ...]
    saving_peak: tuple[int, ...]
    backward_peak: tuple[int, ...]
    incoming_bytes: tuple[int, ...]

    def checkpoint_bytes(self, first: int, block: int) -> int:
        """Bytes of a block's boundary beyond those of the boundary that block `first` starts from."""
        there = self.chain.boundary[first - 1] if first else frozenset()
        return self.chain.nbytes(self.chain.boundary[block] - there)


def block_costs(chain: Chain) -> BlockCosts:
    """The costs of a chain."""
    saved = tuple(_saved(chain, block) for block in range(len(chain)))
    incoming = [frozenset[int]() for _ in range(len(chain))]
    for block in reversed(range(len(chain) - 1)):
        incoming[block] = _after_backward(chain, block + 1, incoming[block + 1])
    nothing: frozenset[int] = frozenset()
    return BlockCosts(
        chain,
        saved,
        tuple(map(chain.nbytes, saved)),
        tuple(_peak(chain, chain.forward[k], nothing, chain.boundary[k]) for k in range(len(chain))),
        tuple(_peak(chain, chain.forward[k], nothing, saved[k]) for k in range(len(chain))),
        tuple(
            _peak(chain, chain.backward[k], saved[k] | incoming[k], _after_backward(chain, k, incoming[k]))
            for k in range(len(chain))
        ),
        tuple(map(chain.nbytes, incoming)),
    )


def _saved(chain: Chain, block: int) -> frozenset[int]:
    problem = chain.problem
    forwards = {op for ops in chain.forward for op in ops}
    made = chain.made(block)
    read = {tensor for tensor in made if any(op not in forwards for op in problem.readers[tensor])}
    kept = {tensor for tensor in made if problem.tensors[tensor].kept}
    return frozenset(read | kept) | (chain.boundary[block] & made)


def _after_backward(chain: Chain, block: int, before: frozenset[int]) -> frozenset[int]:
    """Gradients there after a block's backward: those that earlier blocks' backward reads, and those kept."""
    problem = chain.problem
    there = before | {tensor for op in chain.backward[block] for tensor in problem.ops[op].makes}
    later = {op for earlier in range(block) for op in chain.backward[earlier]}
    return frozenset(t for t in there if problem.tensors[t].kept or any(op in later for op in problem.readers[t]))


def _peak(chain: Chain, ops: tuple[int, ...], there: frozenset[int], stays: frozenset[int]) -> int:
    """The most bytes while ops run one after the other, of `there` and what they make; all but `stays` is freed."""
    problem = chain.problem
    last = {
        tensor: place for place, op in enumerate(ops) for tensor in (*problem.ops[op].makes, *problem.ops[op].reads)
    }
    live = {t for t in there if t in stays or t in last}
    now = peak = chain.nbytes(frozenset(live))
    for place, op in enumerate(ops):
        made = [t for t in problem.ops[op].makes if t not in live]
        now += sum(problem.tensors[t].nbytes for t in made)
        live.update(made)
        peak = max(peak, now + problem.ops[op].workspace_bytes)
        for tensor in {*problem.ops[op].makes, *problem.ops[op].reads} & live - stays:
            if last[tensor] == place and problem.tensors[tensor].maker != GIVEN:
                live.remove(tensor)
                now -= problem.tensors[tensor].nbytes
    return peak
