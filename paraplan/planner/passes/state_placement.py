"""Where states and stored parameters live, and who updates them, by simulation.

Layouts are chosen by work, which does not tell whether a copy hides behind compute, another copy or an update. So of a
plan that leaves states or parameters elsewhere, parameters of equal shape and layouts are moved together, as long as
less is too much for the device and the tiers, or, once all fits, the simulated step gets shorter:

    everything at every place it may be;
    from the best of these, the set of groups at home that by the seconds and bytes of each alone is fastest: these add
    up nearly, so the first few of those that should fit are simulated;
    one group moved to every place it may be, the largest groups first, until none helps;
    two groups that exchange their places;
    of a group that is away some parameters brought home, as many as there is room for (bisection): those of the last
    layers, which are read twice in a row.

A local search over at most `MOST` plans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from paraplan.ir.machine.mesh import parse_layout
from paraplan.ir.machine.reshard import only_gathers
from paraplan.ir.machine.tier_placement import HERE, PLACEMENTS, TierPlacement
from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.model.program import trained_params
from paraplan.ir.param_layouts import ParamLayouts
from paraplan.ir.plan import Plan, Stage

MOST = 64
"""Plans simulated."""
SUBSETS = 8
"""Sets of groups at home among them, from each of which the others are tried."""
ENUMERATED = 12
"""Groups whose sets are all looked at; of more, the smallest stay away."""

NEAR = tuple(
    each
    for each in PLACEMENTS.values()
    if each.states and TIERS[each.states].is_memory and not each.params and not each.grads_wait
)
"""States alone off the device, in memory."""

Price = Callable[[Plan], tuple[float, float]]
"""Of a plan: seconds of its step, and the bytes that it has too much (or, negative, to spare)."""

Names = tuple[str, ...]
Places = Mapping[str, TierPlacement]


def with_places(plan: Plan, places: Places) -> Plan:
    """The plan with these parameters there, the others where they are."""

    def changed(stage: Stage) -> Stage:
        moved = {
            name: _moved(plan, name, layouts, stage.mesh.shape, places.get(name, layouts.place))
            for name, layouts in stage.params.items()
        }
        return msgspec.structs.replace(stage, params=moved)

    return msgspec.structs.replace(plan, stages=tuple(map(changed, plan.stages)))


def _moved(plan: Plan, name: str, layouts: ParamLayouts, mesh: tuple[int, ...], place: TierPlacement) -> ParamLayouts:
    """A parameter's layouts elsewhere; one that comes home is gathered ahead as those that are there."""
    if place == layouts.place:
        return layouts
    shape, ahead = plan.program.params[name].spec.shape, False
    if place == HERE and plan.bundle_bytes and layouts.stored != layouts.state:
        ahead = only_gathers(shape, parse_layout(layouts.state), parse_layout(layouts.stored), mesh)
    state = layouts.stored if place.params else layouts.state  # alike but for axes of one rank: see `may_be`
    return msgspec.structs.replace(layouts.placed(place, ahead), state=state)


def may_be(
    plan: Plan, name: str, layouts: ParamLayouts, mesh: tuple[int, ...], places: Sequence[TierPlacement]
) -> tuple[TierPlacement, ...]:
    """Those of some places where a parameter can be: stored elsewhere only if its state lies alike.

    Args:
        plan: that has the parameter.
        name, layouts: of the parameter.
        mesh: shape of its stage's.
        places: to choose from.
    """
    if name not in trained_params(plan.program):
        return tuple(dict.fromkeys(place.frozen for place in places))
    lies = zip(parse_layout(layouts.stored), parse_layout(layouts.state), mesh, strict=True)
    alike = all(size == 1 or stored == state for stored, state, size in lies)
    return tuple(place for place in places if alike or not place.params)


def choose_places(plan: Plan, places: Sequence[TierPlacement], price: Price, pinned: Collection[str] = ()) -> Plan:
    """The plan with states and parameters where that makes it fastest.

    Args:
        plan: with some of them off the device.
        places: where they may be.
        price: see there.
        pinned: parameters to be left where they are.
    """
    return _Search(plan, tuple(places), price, frozenset(pinned)).run()


@dataclass
class _Search:
    """A search from one plan; `groups` are the names that lie alike, `free` where each of them may be."""

    plan: Plan
    places: tuple[TierPlacement, ...]
    price: Price
    pinned: frozenset[str]
    best: dict[str, TierPlacement] = field(init=False)
    best_key: tuple[float, float] = field(init=False)
    left: int = MOST

    def __post_init__(self) -> None:
        self.layouts = {name: layouts for stage in self.plan.stages for name, layouts in stage.params.items()}
        shape = {name: stage.mesh.shape for stage in self.plan.stages for name in stage.params}
        self.best = {name: layouts.place for name, layouts in self.layouts.items() if name not in self.pinned}
        self.best_key = _key(self.price(self.plan))
        alike: dict[object, list[str]] = {}
        for name in self.plan.program.params:
            if name in self.best:
                spec, lies = self.plan.program.params[name].spec, self.layouts[name]
                free = may_be(self.plan, name, lies, shape[name], self.places)
                alike.setdefault((spec, lies.stored, lies.grad, lies.state, self.best[name], free), []).append(name)
        self.free = {tuple(names): key[-1] for key, names in alike.items()}  # type: ignore[index]
        specs = self.plan.program.params
        self.groups = sorted(self.free, key=lambda names: -sum(math.prod(specs[n].spec.shape) for n in names))

    def run(self) -> Plan:
        self._sets_at_home(self._together())
        while self._one_by_one():
            pass
        self._exchanged()
        self._brought_home()
        return with_places(self.plan, self.best)

    def _try(self, moved: Places) -> bool:
        """Whether moving these makes it faster; then they stay moved."""
        stays = all(self.best[name] == place for name, place in moved.items())
        return not stays and self._priced(moved)[1]

    def _priced(self, moved: Places) -> tuple[tuple[float, float], bool]:
        """What moving these comes to, and whether they stay moved."""
        if self.left <= 0:
            return (math.inf, math.inf), False
        self.left -= 1
        found = self.price(with_places(self.plan, {**self.best, **moved}))
        better = _key(found) < self.best_key
        if better:
            self.best |= moved
            self.best_key = _key(found)
        return found, better

    def _together(self) -> Places:
        """Everything at one place or as near to it as may be; returns the fastest of those off the device that fit, or
        else the one that needs least."""
        tried: list[tuple[tuple[float, float], dict[str, TierPlacement]]] = []
        for place in self.places:
            nearest = (place, place._replace(params=""))
            moved = {
                name: next((each for each in nearest if each in free), self.best[name])
                for names, free in self.free.items()
                for name in names
            }
            if place != HERE:
                found, _ = self._priced(moved)
                tried.append((_key(found), moved))
        return min(tried, key=lambda each: each[0])[1] if tried else {}

    def _sets_at_home(self, away: Places) -> None:
        """Bring home from where all is away the sets of groups that are fastest by the sum of what each brings."""
        start, _ = self._priced(away) if away else ((math.inf, 0.0), False)
        gains: list[tuple[Names, float, float]] = []
        for names in self.groups[:ENUMERATED]:
            if HERE in self.free[names] and start[0] < math.inf:
                (seconds, over), _ = self._priced({**away, **dict.fromkeys(names, HERE)})
                gains.append((names, seconds - start[0], over - start[1]))
        sums = [
            (start[0] + sum(x[1] for x in some), [x[0] for x in some])
            for count in range(len(gains) + 1)
            for some in itertools.combinations(gains, count)
            if start[1] + sum(x[2] for x in some) <= 0
        ]
        for _, some in sorted(sums, key=lambda each: each[0])[:SUBSETS]:
            self._try({**away, **{name: HERE for names in some for name in names}})

    def _one_by_one(self) -> bool:
        tried = [
            self._try(dict.fromkeys(names, place))
            for names in self.groups
            if self.best_key[0] or any(self.best[name] != HERE for name in names)
            for place in self.free[names]
        ]
        return any(tried)

    def _exchanged(self) -> None:
        for one, other in itertools.combinations(self.groups, 2):
            places = self.best[one[0]], self.best[other[0]]
            if places[0] != places[1] and places[1] in self.free[one] and places[0] in self.free[other]:
                self._try({**dict.fromkeys(one, places[1]), **dict.fromkeys(other, places[0])})

    def _brought_home(self) -> None:
        for names in self.groups:
            for place in (HERE, *NEAR):
                away = [name for name in names if self.best[name] != place and self.best[name].params]
                away = away if place != HERE else [name for name in names if self.best[name] != HERE]
                few, many = 0, len(away)
                while place in self.free[names] and many - few > 1:
                    middle = (few + many) // 2
                    if self._try(dict.fromkeys(away[-middle:], place)):
                        few = middle
                    else:
                        many = middle


def _key(found: tuple[float, float]) -> tuple[float, float]:
    """What is too much counts first, then seconds."""
    return max(found[1], 0.0), found[0]
