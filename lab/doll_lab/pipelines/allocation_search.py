"""A search for the best grouping of devices into virtual workers, beyond the rules of the HetPipe paper. Pure.

Virtual workers wait for the slowest one, so the value of N groups is N times the smallest rate. Devices may be left
out, if fewer virtual workers do more without them.

Small fleets are searched exhaustively, over the distinct groupings: devices of one kind on one node are
interchangeable, and so are nodes with equal devices. The best grouping of the remaining devices depends only on them,
so it is computed once. If this takes too many steps, devices are exchanged between groups while it increases the rate,
and the answer has an upper bound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from doll.pipeline.profiling.profile import Device

from doll_lab.pipelines.allocation import Group, Grouping, alike

MAX_STEPS = 30_000
MAX_GROUPS = 200
"""Distinct groups whose rate is worked out by the exhaustive search; as many again by the improvement."""

Contents = tuple[int, ...]
State = tuple[Contents, ...]
"""What remains: the kinds on each node, sorted; nodes in order of their contents."""


class Rates(Protocol):
    """The rates of groups of devices, as in `GroupRates`; tests use tables of rates."""

    def rate(self, devices: Sequence[Device]) -> float:
        """Return the minibatches per second of one virtual worker; 0 if the model does not fit."""

    def bound(self, devices: Sequence[Device], num_workers: int) -> float:
        """Return an upper bound on the rate of the slowest of `num_workers` virtual workers of these devices."""


@dataclass(frozen=True)
class Found:
    """The result of a search: a grouping and its value.

    Attributes:
        groups: the groups; empty if the model fits on no group.
        spare: devices that are left out.
        value: N times the smallest rate, in minibatches per second.
        bound: upper bound on the value of any grouping; equal to `value` if the search was exhaustive.
    """

    groups: Grouping
    spare: Group
    value: float
    bound: float
    is_exact: bool

    @property
    def gap(self) -> float:
        """The share by which a better grouping could at most exceed this one."""
        return self.bound / self.value - 1.0 if self.value else 0.0


def search(
    fleet: Sequence[Device], k: int, rates: Rates, *, starts: Iterable[Grouping] = (), max_steps: int = MAX_STEPS
) -> Found:
    """Search for the best grouping into groups of k; devices may be left out.

    Args:
        fleet: the devices.
        k: number of devices of a group.
        rates: rates of groups.
        starts: groupings to improve if the fleet is too large for an exhaustive search.
        max_steps: maximum number of groups that the exhaustive search tries.

    Raises:
        ValueError: there are fewer than k devices, or k is below 1.
    """
    most = len(fleet) // k if k > 0 else 0
    if not most:
        raise ValueError(f"expected {k} devices at least, a whole group, got {len(fleet)}")
    bounds = {count: count * rates.bound(fleet, count) for count in range(1, most + 1)}
    best = Found((), tuple(fleet), 0.0, 0.0, is_exact=True)
    exhaustive = _Exhaustive(fleet, k, rates, max_steps)
    for count in range(most, 0, -1):
        if bounds[count] <= best.value:
            continue
        try:
            groups, spare, pace = exhaustive.best(count)
        except _TooManyError:
            break
        if count * pace > best.value:
            best = Found(groups, spare, count * pace, 0.0, is_exact=True)
    else:
        return replace(best, bound=best.value)
    improving = _Improving(rates)
    for grouping in starts:
        best = _better(best, improving.improve(grouping), fleet)
    for count in range(most, 0, -1):
        if bounds[count] > best.value:
            best = _better(best, improving.improve(_dealt(fleet, k, count)), fleet)
    return replace(best, bound=max(best.value, *bounds.values()), is_exact=False)


def _better(best: Found, candidate: tuple[Grouping, float], fleet: Sequence[Device]) -> Found:
    groups, pace = candidate
    if len(groups) * pace <= best.value:
        return best
    left = list(fleet)
    for group in groups:
        for device in group:
            left.remove(device)
    return Found(groups, tuple(left), len(groups) * pace, 0.0, is_exact=False)


# --- exhaustive ------------------------------------------------------------------------------------------------------


class _TooManyError(Exception):
    """The search takes more steps or groups than allowed."""


@dataclass(frozen=True)
class _Choice:
    """The best choice for the remaining devices: its pace, and the kinds on each node that the next group takes (None:
    the first device is left out)."""

    pace: float
    take: State | None


class _Exhaustive:
    def __init__(self, fleet: Sequence[Device], k: int, rates: Rates, max_steps: int) -> None:
        self._k = k
        self._rates = rates
        self._steps = max_steps
        kinds = sorted({device.kind for device in fleet})
        self._of_kind = [next(device for device in fleet if device.kind == kind) for kind in kinds]
        nodes = defaultdict[str, list[Device]](list)
        for device in sorted(fleet, key=lambda device: device.kind):
            nodes[device.node].append(device)
        self._nodes = list(nodes.values())
        self._number = {kind: number for number, kind in enumerate(kinds)}
        self._rate_of: dict[tuple[Contents, ...], float] = {}
        self._bound_of: dict[tuple[Contents, ...], float] = {}
        self._known: dict[tuple[State, int], _Choice] = {}

    def best(self, count: int) -> tuple[Grouping, Group, float]:
        """Return the `count` groups whose smallest rate is largest, the devices that are left out, and this rate.

        Raises:
            _TooManyError: the search takes too many steps.
        """
        rest = [list(node) for node in self._nodes]
        spare_count = sum(map(len, rest)) - count * self._k
        groups: list[Group] = []
        spare: list[Device] = []
        pace = self._choose(self._state(rest), spare_count).pace
        while pace and len(groups) < count:
            rest = sorted((node for node in rest if node), key=self._contents)
            choice = self._choose(self._state(rest), spare_count)
            if choice.take is None:
                spare_count -= 1
                spare.append(rest[0].pop(0))
            else:
                taken = [_pop(rest[at], kind, self._number) for at, kinds in enumerate(choice.take) for kind in kinds]
                groups.append(tuple(taken))
        return tuple(groups), (*spare, *(device for node in rest for device in node)), pace

    def _contents(self, node: Sequence[Device]) -> Contents:
        return tuple(self._number[device.kind] for device in node)

    def _state(self, rest: Sequence[Sequence[Device]]) -> State:
        return tuple(sorted(self._contents(node) for node in rest if node))

    def _choose(self, state: State, spare: int) -> _Choice:
        if sum(map(len, state)) < self._k + spare:  # only the devices that are left out remain
            return _Choice(float("inf"), None)
        if (known := self._known.get((state, spare))) is not None:
            return known
        best = _Choice(0.0, None)
        takes = sorted(_takes(state, self._k), key=self._bound, reverse=True)
        self._steps -= len(takes)
        if self._steps < 0:
            raise _TooManyError
        for take in takes:
            if self._bound(take) <= best.pace:
                break
            rate = self._rate(take)
            if rate > best.pace:
                pace = min(rate, self._choose(_without(state, take), spare).pace)
                if pace > best.pace:
                    best = _Choice(pace, take)
        if spare:
            pace = self._choose(_without(state, ((state[0][0],),)), spare - 1).pace
            if pace > best.pace:
                best = _Choice(pace, None)
        self._known[state, spare] = best
        return best

    def _devices(self, key: tuple[Contents, ...]) -> list[Device]:
        return [replace(self._of_kind[kind], node=str(at)) for at, kinds in enumerate(key) for kind in kinds]

    def _bound(self, take: State) -> float:
        key = tuple(sorted(filter(None, take)))
        if key not in self._bound_of:
            self._bound_of[key] = self._rates.bound(self._devices(key), 1)
        return self._bound_of[key]

    def _rate(self, take: State) -> float:
        key = tuple(sorted(filter(None, take)))
        if key not in self._rate_of:
            if len(self._rate_of) >= MAX_GROUPS:
                raise _TooManyError
            self._rate_of[key] = self._rates.rate(self._devices(key))
        return self._rate_of[key]


def _pop(node: list[Device], kind: int, number: dict[tuple[str, float, float], int]) -> Device:
    return node.pop(next(at for at, device in enumerate(node) if number[device.kind] == kind))


def _without(state: State, take: State) -> State:
    rest = []
    for at, contents in enumerate(state):
        left = list(contents)
        for kind in take[at] if at < len(take) else ():
            left.remove(kind)
        if left:
            rest.append(tuple(left))
    return tuple(sorted(rest))


def _takes(state: State, k: int) -> list[State]:
    """Return each way to take k devices with the first one, node by node; nodes that are alike count as equal."""
    answer = set[State]()

    def extend(at: int, taken: tuple[Contents, ...], missing: int) -> None:
        if not missing:
            answer.add(taken)
            return
        if at == len(state) or sum(map(len, state[at:])) < missing:
            return
        after = next((to for to in range(at + 1, len(state)) if state[to] != state[at]), len(state))
        for part in _parts(state[at], missing):
            if at == 0 and (not part or part[0] != state[0][0]):
                continue
            if at >= 2 and state[at] == state[at - 1] and part > taken[at - 1]:
                continue
            if part:
                extend(at + 1, (*taken, part), missing - len(part))
            else:  # also take nothing from the following nodes that are alike
                extend(after, (*taken, *((),) * (after - at)), missing)

    extend(0, (), k)
    return sorted(answer)


def _parts(contents: Contents, most: int) -> Iterator[Contents]:
    """Yield the distinct selections of at most `most` elements of sorted kinds.

    >>> sorted(_parts((0, 0, 1), 2))
    [(), (0,), (0, 0), (0, 1), (1,)]
    """
    if not contents:
        yield ()
        return
    kind, count = contents[0], contents.count(contents[0])
    for rest in _parts(contents[count:], most):
        for times in range(min(count, most - len(rest)) + 1):
            yield (kind,) * times + rest


# --- improvement by exchange -----------------------------------------------------------------------------------------


class _Improving:
    """Exchanges devices of the slowest group with devices of others while this makes the slower of the two faster."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._left = MAX_GROUPS
        self._known: dict[object, float] = {}

    def improve(self, groups: Grouping) -> tuple[Grouping, float]:
        """Return a grouping that is at least as good, and the rate of its slowest group."""
        current = list(groups)
        rates = [self._rate(group) for group in current]
        while self._exchange(current, rates):
            pass
        return tuple(current), min(rates)

    def _exchange(self, groups: list[Group], rates: list[float]) -> bool:
        slowest = min(range(len(groups)), key=rates.__getitem__)
        pace = rates[slowest]
        for other in sorted(range(len(groups)), key=rates.__getitem__, reverse=True):
            if other == slowest:
                continue
            for mine, theirs in _exchanges(groups[slowest], groups[other]):
                pair = mine, theirs
                if min(self._rates.bound(each, 1) for each in pair) <= pace or self._left <= 0:
                    continue
                new = [self._rate(each) for each in pair]
                if min(new) > pace:
                    groups[slowest], groups[other] = pair
                    rates[slowest], rates[other] = new
                    return True
        return False

    def _rate(self, group: Group) -> float:
        key = alike(group)[1]
        if key not in self._known:
            self._left -= 1
            self._known[key] = self._rates.rate(group)
        return self._known[key]


def _exchanges(mine: Group, theirs: Group) -> Iterator[tuple[Group, Group]]:
    seen = set[tuple[object, object]]()
    for a, device in enumerate(mine):
        for b, other in enumerate(theirs):
            pair = (device.kind, device.node), (other.kind, other.node)
            if pair[0] == pair[1] or pair in seen:
                continue
            seen.add(pair)
            yield (*mine[:a], other, *mine[a + 1 :]), (*theirs[:b], device, *theirs[b + 1 :])


def _dealt(fleet: Sequence[Device], k: int, count: int) -> Grouping:
    """Deal the fastest `count` * k devices to the groups in turn, forwards and backwards."""
    ordered = sorted(fleet, key=lambda device: (-device.speed, device.name, device.node))[: count * k]
    groups: list[list[Device]] = [[] for _ in range(count)]
    for at in range(k):
        row = ordered[at * count : (at + 1) * count]
        for group, device in zip(groups, row if at % 2 == 0 else reversed(row), strict=True):
            group.append(device)
    return tuple(map(tuple, groups))
