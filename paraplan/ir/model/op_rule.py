"""What is known of an op that `rules` has no entry for, as data: it travels with the op, through files too.

A rule is found by running the op (`capture.discovery.discover`) or registered by the user, for one op on one set of
global shapes. Amounts (work, workspace) are sums of products over the shares of dims: with each dim `d` cut into
1/x_d parts, an amount is the sum over terms of `amount * prod(x_d for d in dims)`. Work and memory of nearly
every op are of this form, so the amounts hold for any sharding though nothing is left to call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from paraplan.ir.struct import Value

DISCOVERED, REGISTERED, UNKNOWN = "discovered", "registered", "unknown"
ROWS, ELEMENTWISE, ALIAS, PART = "rows", "elementwise", "alias", "part"


class WorkTerm(Value, frozen=True, array_like=True):
    """`amount` times the shares of `dims`."""

    amount: float
    dims: tuple[str, ...] = ()


Amount = tuple[WorkTerm, ...]
ArgPath = tuple[int | str, ...]


class OpRule(Value, frozen=True, kw_only=True):
    """The named dims of one op and what its results do to memory.

    Attributes:
        source: "discovered", "registered" or "unknown" (replicated; `reason` says why).
        shapes: global shape of each tensor input, in argument order: what the rule was made for.
        inputs, outputs, sizes, contracted, linear, addends: as in `rules.dims.OpDims`.
        size_args: dim -> arguments that count its elements (or a multiple of them), divided by the number of
            shards: the position or keyword of the argument, then indices into it.
        lies: per output, how it lies for row-major inputs: "rows" (row-major), "elementwise" (as torch's elementwise
            ops, whatever the inputs' order), "alias" (shares an input's storage; a copy is made at once), "part"
            (a view of a larger storage, which a copy leaves behind at once), or the dims from outermost to innermost
            ("1,0,2").
        alias_of: per output, the tensor input it shares its storage with; -1 for none.
        storages: per output, the bytes of the larger storage where it is a part of one; empty where none is.
        workspace: bytes made and dropped inside, moment by moment; the largest counts.
        flops, traffic_bytes: the registered work of the op, empty where none was registered.
        reason: why it is replicated, "" otherwise.
    """

    source: str
    shapes: tuple[tuple[int, ...], ...]
    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...] | None, ...]
    sizes: dict[str, int] = {}
    contracted: dict[str, str] = {}
    linear: tuple[tuple[int, ...], ...] = ()
    addends: tuple[int, ...] = ()
    size_args: dict[str, tuple[ArgPath, ...]] = {}
    lies: tuple[str, ...] = ()
    alias_of: tuple[int, ...] = ()
    storages: tuple[Amount, ...] = ()
    workspace: tuple[Amount, ...] = ()
    flops: Amount = ()
    traffic_bytes: Amount = ()
    reason: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether the op can only be replicated."""
        return not self.sizes and not self.linear

    @property
    def row_major_inputs(self) -> bool:
        """Whether inputs are brought into row-major order first: how its results lie is known for that order."""
        return any(lie != ELEMENTWISE for lie in self.lies)

    def shares(self, local_shapes: tuple[tuple[int, ...], ...]) -> dict[str, float]:
        """The share of each dim that a rank with inputs of these shapes works on."""
        found: dict[str, float] = {}
        for names, whole, local in zip(self.inputs, self.shapes, local_shapes, strict=True):
            for name, size, part in zip(names, whole, local, strict=True):
                if name in self.sizes and size:
                    found[name] = part / size
        return found

    def text(self) -> str:
        """In one line: `a b k, k n -> a b n (k summed; linear in 0)`."""
        outs = ", ".join(" ".join(names) or "()" for names in self.outputs if names is not None)
        said = [f"{dim} {'summed' if how == 'sum' else 'maximum'}" for dim, how in self.contracted.items()]
        said += [f"linear in {' and '.join(map(str, group))}" for group in self.linear]
        line = f"{', '.join(' '.join(names) or '()' for names in self.inputs)} -> {outs}"
        return f"{line} ({'; '.join(said)})" if said else line


def amount_of(amount: Amount, shares: Mapping[str, float]) -> float:
    """An amount at some shares; never below zero."""
    return max(0.0, sum(term.amount * math.prod(shares.get(name, 1.0) for name in term.dims) for term in amount))


def fit_amount(values: Mapping[frozenset[str], float]) -> Amount:
    """Terms from values with every subset of dims halved.

    Args:
        values: the amount with the dims of the key at share 1/2 and the others whole, for every subset.
    Returns:
        sum over S of c_S * prod(x_d, d in S), exact for functions linear in each dim's share.
    """
    dims = sorted({name for key in values for name in key})
    terms = dict(values)
    # In one dim: f(x) = (2 f(1/2) - f(1)) + 2 (f(1) - f(1/2)) x; dim after dim gives all terms.
    for dim in dims:
        after = {}
        for key in terms:
            if dim not in key:
                one, half = terms[key], terms[key | {dim}]
                after[key], after[key | {dim}] = 2 * half - one, 2 * (one - half)
        terms = after
    largest = max((abs(value) for value in terms.values()), default=0.0)
    return tuple(
        WorkTerm(amount=value, dims=tuple(sorted(key)))
        for key, value in sorted(terms.items(), key=lambda item: (len(item[0]), sorted(item[0])))
        if abs(value) > 1e-9 * largest
    )


def faults(rule: OpRule, inputs: tuple[tuple[int, ...], ...], outputs: tuple[tuple[int, ...] | None, ...]) -> str:
    """What is wrong with a rule for an op on these global shapes; "" if nothing is.

    Args:
        rule: as it travelled with the op.
        inputs: shape of each tensor input, in argument order.
        outputs: shape of each output; None for an absent one.
    """
    if rule.source not in (DISCOVERED, REGISTERED, UNKNOWN):
        return f"its source is {rule.source!r}"
    if rule.shapes != inputs:
        return f"it was made for inputs of shapes {rule.shapes}, not {inputs}"
    if len(rule.inputs) != len(inputs) or len(rule.outputs) != len(outputs):
        return f"it names {len(rule.inputs)} inputs and {len(rule.outputs)} outputs of {len(inputs)} and {len(outputs)}"
    if len(rule.lies) != len(outputs) or len(rule.alias_of) != len(outputs):
        return f"it says of {len(rule.lies)} outputs how they lie, of {len(outputs)}"
    pairs = [*zip(rule.inputs, inputs, strict=True), *zip(rule.outputs, outputs, strict=True)]
    for names, shape in pairs:
        if (names is None) != (shape is None):
            return "it names an absent output or misses one that exists"
        if names is None or shape is None:
            continue
        if len(names) != len(shape):
            return f"it names {len(names)} dims of shape {shape}"
        used = [name for name in names if name in rule.sizes]
        if len(set(used)) != len(used):
            return f"a dim stands twice in {' '.join(names)}"
        for name, size in zip(names, shape, strict=True):
            if name in rule.sizes and (rule.sizes[name] < 1 or size % rule.sizes[name]):
                return f"{name} has {rule.sizes[name]} parts, which do not divide a dim of {size}"
    return _more_faults(rule, len(inputs), outputs)


def storage_order(lie: str) -> tuple[int, ...]:
    """The dims of an output from the slowest to the fastest, of one that lies in an order of its own."""
    return tuple(int(dim) for dim in lie.split(","))


def _more_faults(rule: OpRule, num_inputs: int, outputs: tuple[tuple[int, ...] | None, ...]) -> str:
    named = {name for names in rule.inputs for name in names}
    if unknown := [name for name in (*rule.sizes, *rule.contracted) if name not in named]:
        return f"dim {unknown[0]!r} stands in no input"
    if bad := [how for how in rule.contracted.values() if how not in ("sum", "max")]:
        return f"a dim is reduced by {bad[0]!r}; only sum and max are known"
    indices = [*rule.addends, *(index for group in rule.linear for index in group)]
    if any(not 0 <= index < num_inputs for index in indices) or any(not group for group in rule.linear):
        return f"it speaks of inputs {sorted(set(indices))}, of {num_inputs}"
    if any(not -1 <= index < num_inputs for index in rule.alias_of):
        return f"outputs share the storage of inputs {rule.alias_of}, of {num_inputs}"
    for lie, alias, shape in zip(rule.lies, rule.alias_of, outputs, strict=True):
        ordered = lie.split(",") if lie not in (ROWS, ELEMENTWISE, ALIAS, PART) else None
        if ordered is not None and (shape is None or sorted(ordered) != sorted(map(str, range(len(shape))))):
            return f"an output cannot lie as {lie!r}"
        if (lie == ALIAS) != (alias >= 0):
            return "an output shares storage with nothing"
    if PART in rule.lies and len(rule.storages) != len(rule.lies):
        return f"it says of {len(rule.storages)} outputs what storage they are part of, of {len(rule.lies)}"
    return ""
