"""Canonical strategies over lower sets of the forward: exact, and over the sets one op's ancestors make.

A strategy is a chain of lower sets L_1 ⊂ … ⊂ L_k = V of the forward (sets closed under what ops depend on). The forward
runs V_i = L_i ∖ L_{i−1} after V_{i−1} and afterwards keeps, of what it made, the boundary ∂L_i: what ops outside L_i
read. The backward, from V_k down, executes again what of V_i was dropped, keeping all, then V_i's backward. With U_i =
∪_{j ≤ i} ∂L_j,

    overhead = Σ_i time(V_i ∖ made in ∂L_i),   peak_i = bytes(U_{i−1}) + local(L_{i−1}, L_i)

    opt[L'][t + time(V' ∖ ∂L')] = min over L ⊂ L' with opt[L][t] + local(L, L') ≤ budget of opt[L][t] + bytes(∂L' ∖ L)

where opt[L][t] is the fewest bytes of U after L with overhead t; only Pareto pairs (t, bytes) are kept. kusumoto-exact
takes all lower sets, kusumoto-approx those of the form "an op and all it depends on".

local is counted from the step itself: the most bytes, beside U_{i−1}, while V_i runs (first or again) and then its
backward. The last set is executed once (its repeat right after itself is left out). An op of the backward belongs to
the last forward op among those that read or make all it reads, no later than the ops whose gradients it takes; those
ties are dependencies of lower sets too, so that the backward's order runs.

Source: Kusumoto, Inoue, Watanabe, Akiba & Koyama 2019 (NeurIPS). Limits: exact is exponential in the forward's
width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from paraplan.baselines.chains.chain_blocks import split_backward
from paraplan.baselines.common import given_bytes
from paraplan.planner.memory.problem import GIVEN, MemoryProblem

LowerSet = frozenset[int]


@dataclass(frozen=True)
class ForwardOps:
    """A step seen from its forward ops.

    Attributes:
        problem: the step.
        size: number of forward ops (0 … size − 1).
        partner: per later op, the forward op it belongs to.
        needs: per forward op, those that must be in a lower set with it.
    """

    problem: MemoryProblem
    size: int
    partner: dict[int, int]
    needs: tuple[frozenset[int], ...]

    @cached_property
    def later(self) -> range:
        """The ops after the forward."""
        return range(self.size, len(self.problem.ops))

    @cached_property
    def _memo(self) -> dict[tuple[str, LowerSet], frozenset[int]]:
        return {}

    @cached_property
    def _inner(self) -> tuple[frozenset[int], ...]:
        """Per tensor, the forward ops that read it."""
        return tuple(frozenset(op for op in readers if op < self.size) for readers in self.problem.readers)

    @cached_property
    def _outer(self) -> tuple[frozenset[int], ...]:
        """Per tensor, the partners of the later ops that read it."""
        return tuple(frozenset(self.partner[op] for op in all_ if op >= self.size) for all_ in self.problem.readers)

    def boundary(self, inside: LowerSet) -> frozenset[int]:
        """∂: tensors made inside that forward ops outside read."""
        found = self._memo.get(("boundary", inside))
        if found is None:
            made = (tensor for op in inside for tensor in self.problem.ops[op].makes)
            found = self._memo["boundary", inside] = frozenset(t for t in made if not self._inner[t] <= inside)
        return found

    def coming(self, inside: LowerSet) -> frozenset[int]:
        """What is there from outside when the backward of the last part of `inside` begins."""
        found = self._memo.get(("coming", inside))
        if found is None:
            makers = [op for op in range(self.size) if op not in inside]
            makers += [op for op in self.later if self.partner[op] not in inside]
            made = (tensor for op in makers for tensor in self.problem.ops[op].makes)
            found = self._memo["coming", inside] = frozenset(t for t in made if self._outlives(t, inside))
        return found

    def dropped(self, before: LowerSet, inside: LowerSet) -> list[int]:
        """Ops of V_i that are executed again: those that made something outside ∂L_i."""
        if len(inside) == self.size:
            return []
        kept = self.boundary(inside)
        ops = self.problem.ops
        return [op for op in sorted(inside - before) if ops[op].repeatable and not kept.issuperset(ops[op].makes)]

    def overhead_s(self, before: LowerSet, inside: LowerSet) -> float:
        """Seconds of what is executed again."""
        return sum(self.problem.ops[op].time_s for op in self.dropped(before, inside))

    def cached_bytes(self, before: LowerSet, inside: LowerSet) -> int:
        """Bytes of ∂L_i ∖ L_{i−1}."""
        makers = self.problem.tensors
        return sum(makers[t].nbytes for t in self.boundary(inside) if makers[t].maker not in before)

    def ops(self, chain: list[LowerSet]) -> tuple[int, ...]:
        """The sequence of a canonical strategy."""
        found = [op for before, inside in _pairs(chain) for op in sorted(inside - before)]
        for before, inside in reversed(_pairs(chain)):
            found += self.dropped(before, inside)
            found += [op for op in self.later if self.partner[op] in inside - before]
        return tuple(found)

    def local_bytes(self, before: LowerSet, inside: LowerSet) -> int:
        """The most bytes beside U_{i−1} while V_i and its backward run, base and given tensors included."""
        problem, new = self.problem, sorted(inside - before)
        made = {tensor for op in new for tensor in problem.ops[op].makes}
        stays = self.boundary(inside) & made
        backward = [op for op in self.later if self.partner[op] in inside - before]
        coming = self.coming(inside)
        first = self._peak(new, frozenset(stays), frozenset(stays))
        rest = frozenset(t for t in made | coming if self._outlives(t, before))
        again = self._peak([*new, *backward], frozenset(stays | coming), rest)
        return problem.base_bytes + given_bytes(problem) + max(first, again)

    def _outlives(self, tensor: int, inside: LowerSet) -> bool:
        """Whether backward ops of `inside` read it, or it is kept."""
        return self.problem.tensors[tensor].kept or not self._outer[tensor].isdisjoint(inside)

    def _peak(self, ops: list[int], there: frozenset[int], stays: frozenset[int]) -> int:
        problem = self.problem
        last = {t: place for place, op in enumerate(ops) for t in (*problem.ops[op].makes, *problem.ops[op].reads)}
        live = set(there)
        now = peak = sum(problem.tensors[t].nbytes for t in live)
        for place, op in enumerate(ops):
            it = problem.ops[op]
            made = [t for t in it.makes if t not in live]
            now += sum(problem.tensors[t].nbytes for t in made)
            live.update(made)
            peak = max(peak, now + it.workspace_bytes)
            for tensor in sorted({*it.makes, *it.reads} & live - stays):
                if last[tensor] == place and problem.tensors[tensor].maker != GIVEN:
                    live.remove(tensor)
                    now -= problem.tensors[tensor].nbytes
        return peak


def _pairs(chain: list[LowerSet]) -> list[tuple[LowerSet, LowerSet]]:
    return list(zip([frozenset(), *chain[:-1]], chain, strict=True))


def forward_of(problem: MemoryProblem, strategy: str) -> ForwardOps:
    """A step seen from its forward.

    Raises:
        ConstraintError: it has no backward.
    """
    size = split_backward(problem, strategy)
    partner = _partners(problem, size)
    needs: list[set[int]] = [set() for _ in range(size)]
    for index in range(size):
        needs[index].update(m for t in problem.ops[index].reads if 0 <= (m := problem.tensors[t].maker))
    for index in range(size, len(problem.ops)):
        here = partner[index]
        for tensor in problem.ops[index].reads:
            maker = problem.tensors[tensor].maker
            if maker >= size and partner[maker] != here:  # its gradient comes first: so must that op's set, after ours
                needs[partner[maker]].add(here)
    return ForwardOps(problem, size, partner, _closed(needs))


def _partners(problem: MemoryProblem, size: int) -> dict[int, int]:
    around = [{*problem.ops[op].reads, *problem.ops[op].makes} for op in range(size)]
    partner: dict[int, int] = {}
    for index in range(size, len(problem.ops)):
        reads = problem.ops[index].reads
        above = min((partner[m] for t in reads if (m := problem.tensors[t].maker) >= size), default=size - 1)
        values = {t for t in reads if 0 <= problem.tensors[t].maker < size}
        whole = [op for op in range(above + 1) if values and values <= around[op]]
        makers = [problem.tensors[t].maker for t in values]
        partner[index] = whole[-1] if whole else min(above, max(makers, default=above))
    return partner


def _closed(needs: list[set[int]]) -> tuple[frozenset[int], ...]:
    """Transitively, each op itself included; one pass per change, since ties may point forward."""
    reach = [{index, *direct} for index, direct in enumerate(needs)]
    changed = True
    while changed:
        changed = False
        for index, known in enumerate(reach):
            grown = known.union(*(reach[other] for other in known))
            changed |= len(grown) > len(known)
            reach[index] = grown
    return tuple(map(frozenset, reach))
