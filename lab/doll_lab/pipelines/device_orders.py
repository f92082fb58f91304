"""The best cut of a chain of layers over all orders of devices: a dynamic programme over sets of devices. Pure.

A state is the set of the devices in use, the last of them, and the class of the link after it; this link affects the
times of both of its neighbours. The value of a state is a vector: for each layer j, the smallest bottleneck of layers 0
to j - 1 on these devices. A value for each j is needed: with transfers, one more layer may make a stage faster, so the
furthest layer within a time does not determine the values of other layers.

A set is the number of devices of each type, so that devices of one type are not permuted among themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
Bools = npt.NDArray[np.bool_]

# Size of a temporary array that stays in the cache.
_CHUNK = 1 << 16
# Problems up to this size are searched without a limit on the time, because one search takes less than a second try.
_SMALL = 1 << 17
_GROWTH = 1.25


@dataclass(frozen=True)
class Costs:
    """The times and the memory of stages, for L layers, T types of devices and C classes of links.

    Attributes:
        compute_s: seconds of layers 0 to i - 1, forward and backward, shape (T, L + 1).
        transfer_s: seconds to send the values at the cut before layer i in one direction, shape (C + 1, L + 1). The
            last row is 0: no link.
        link: class of the link between two types, shape (T, T).
        fits: whether layers i to j - 1 fit into the memory as [a stage, the last stage], shape (T, 2, L + 1, L + 1).
    """

    compute_s: Floats
    transfer_s: Floats
    link: Indices
    fits: Bools

    @property
    def num_layers(self) -> int:
        return int(self.compute_s.shape[1]) - 1

    def stage_s(self, kind: int, before: int, after: int) -> Floats:
        """Return the seconds of layers i to j - 1 on a device of type `kind`, shape (L + 1, L + 1); infinite if j <= i.

        Args:
            before: class of the link to the stage before; C: no link.
            after: class of the link to the next stage; C: no link.
        """
        compute = self.compute_s[kind]
        seconds: Floats = compute[None, :] - compute[:, None]
        seconds = seconds + self.transfer_s[before][:, None] + self.transfer_s[after][None, :]
        seconds[np.tri(self.num_layers + 1, dtype=bool)] = np.inf
        return seconds


class Step(NamedTuple):
    """The addition of a device of type `kind`: set `sources[n]` becomes set `targets[n]` of the next size."""

    kind: int
    sources: Indices
    targets: Indices


@dataclass(frozen=True)
class Sets:
    """Sets of devices by their size. `steps[s]` lead from sets of s devices to sets of s + 1 devices.

    Attributes:
        members: number of devices of each type, for each set of each size.
    """

    members: tuple[tuple[tuple[int, ...], ...], ...]
    steps: tuple[tuple[Step, ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.steps)

    @classmethod
    def of(cls, counts: Sequence[int], num_stages: int) -> Sets:
        """Return all sets of up to `num_stages` devices, from `counts` devices of each type."""
        level: dict[tuple[int, ...], int] = {(0,) * len(counts): 0}
        members, steps = [tuple(level)], []
        for _ in range(num_stages):
            following: dict[tuple[int, ...], int] = {}
            edges: list[tuple[int, list[int], list[int]]] = []
            for kind, count in enumerate(counts):
                sources, targets = [], []
                for has, number in level.items():
                    if has[kind] < count:
                        more = (*has[:kind], has[kind] + 1, *has[kind + 1 :])
                        sources.append(number)
                        targets.append(following.setdefault(more, len(following)))
                edges.append((kind, sources, targets))
            steps.append(tuple(Step(kind, np.array(s), np.array(t)) for kind, s, t in edges if s))
            members.append(tuple(following))
            level = following
        return cls(tuple(members), tuple(steps))


class StageRange(NamedTuple):
    """Layers `first` to `stop` - 1 on a device of type `kind`, and the classes of the links around it (C: no link)."""

    kind: int
    first: int
    stop: int
    before: int
    after: int


def reachable(costs: Costs, sets: Sets) -> tuple[list[Bools], bool]:
    """Return the cuts that fit into memory, whatever time they take.

    Returns:
        For each number of stages below k, shape (sets, L + 1): whether layers 0 to j - 1 fit onto the devices of the
        set, none of which is the last stage; and whether there is a partition.
    """
    end = costs.num_layers
    levels: list[Bools] = [np.zeros((1, end + 1), dtype=bool)]
    levels[0][0, 0] = True
    for size, steps in enumerate(sets.steps[:-1], 1):
        level = np.zeros((len(sets.members[size]), end + 1), dtype=bool)
        for kind, sources, targets in steps:
            there = levels[-1][sources].astype(np.float32) @ costs.fits[kind, 0].astype(np.float32)
            level[targets] |= there > 0
        levels.append(level)
    return levels, any(
        bool((levels[-1][sources] & costs.fits[kind, 1][:, end]).any()) for kind, sources, _ in sets.steps[-1]
    )


def best(costs: Costs, sets: Sets) -> list[StageRange] | None:
    """Return the partition with the smallest bottleneck, and among equal ones the partition with the shortest time of a
    minibatch from the first stage to the last and back. The result is equal in each run.

    Returns:
        The stages in order; None if no partition fits into memory.
    """
    if not reachable(costs, sets)[1]:
        return None
    # Any partition that is found within a limit on the time is the best one, because all partitions within it are
    # checked. With a limit, stages have few layers, so there are fewer partitions to check.
    limit = np.inf
    if sum(len(members) for members in sets.members) * costs.num_layers**2 > _SMALL:
        whole_s = costs.compute_s[:, -1]
        rates = np.repeat(1.0 / np.maximum(whole_s, 1e-300), np.max(sets.members[-1], axis=0))
        shared_s = 1.0 / float(np.sort(rates)[-sets.num_stages :].sum())
        longest_layer_s = float(np.diff(costs.compute_s, axis=1).min(axis=0).max())
        limit = _GROWTH * max(shared_s, longest_layer_s)
        most = float(whole_s.max()) + 2.0 * float(costs.transfer_s.max())
    while (found := _Search(costs, sets, limit, np.maximum).path()) is None:
        limit = limit * _GROWTH if limit < most else np.inf
    bottleneck = max(costs.stage_s(at.kind, at.before, at.after)[at.first, at.stop] for at in found)
    shortest = _Search(costs, sets, bottleneck, np.add).path()
    assert shortest is not None, "the partition that was found is within its own bottleneck"
    return shortest


class _Search:
    """One pass over all states, with stages of at most `limit` seconds. `join`, a function of numpy, combines the time
    of a stage with the value of the stages before it: maximum or sum."""

    def __init__(self, costs: Costs, sets: Sets, limit: float, join: Any) -> None:
        self._costs, self._sets, self._join = costs, sets, join
        self._classes = len(costs.transfer_s) - 1
        self._limit = limit
        self._tables: dict[tuple[int, int, int], Floats] = {}
        # For each size: (sets, type of the last device, class of the link after it, layers).
        self._values: list[Floats] = []
        self._windows: dict[int, tuple[int, Floats]] = {}
        for size in range(1, sets.num_stages):
            self._values.append(self._level(size))

    def _table(self, kind: int, before: int, after: int) -> Floats:
        """Return the seconds of the stages that are allowed; infinite for other stages."""
        key = (kind, before, after)
        if key not in self._tables:
            seconds = self._costs.stage_s(*key)
            allowed = self._costs.fits[kind, int(after == self._classes)] & (seconds <= self._limit)
            self._tables[key] = np.where(allowed, seconds, np.inf)
        return self._tables[key]

    def _window(self, kind: int) -> tuple[int, Floats]:
        """Return (maximum number of layers of a stage, W; array of shape (classes before, classes after, W, L + 1) with
        the seconds of layers j - W + u to j - 1 at [u, j])."""
        if kind not in self._windows:
            classes, end = self._classes, self._costs.num_layers
            tables = np.array([[self._table(kind, b, c) for c in range(classes)] for b in range(classes)])
            first, stop = np.nonzero(np.isfinite(tables).any(axis=(0, 1)))
            width = int((stop - first).max(initial=0))
            after = np.arange(end + 1)[None, :]
            before = after - width + np.arange(width)[:, None]
            band = tables[:, :, np.maximum(before, 0), after]
            self._windows[kind] = (width, np.where(before >= 0, band, np.inf))
        return self._windows[kind]

    def _before(self, size: int, kind: int, sources: Indices) -> Floats:
        """Return the values of `sources`, sets of this size, followed by a device of type `kind`: shape (sources, class
        of the link between them, L + 1)."""
        values = self._values[size - 1]
        result = np.full((len(sources), self._classes, values.shape[-1]), np.inf)
        for link in range(self._classes):
            last = np.flatnonzero(self._costs.link[:, kind] == link)
            if len(last):
                result[:, link] = values[sources[:, None], last[None, :], link].min(axis=1)
        return result

    def _level(self, size: int) -> Floats:
        classes, length = self._classes, self._costs.num_layers + 1
        kinds = len(self._costs.compute_s)
        values = np.full((len(self._sets.members[size]), kinds, classes, length), np.inf)
        for kind, sources, targets in self._sets.steps[size - 1]:
            if size == 1:
                values[targets, kind] = [self._table(kind, classes, after)[0] for after in range(classes)]
                continue
            width, band = self._window(kind)
            if not width:
                continue
            before = self._before(size - 1, kind, sources)
            padded = np.concatenate([np.full((*before.shape[:2], width), np.inf), before], axis=2)
            shifted = np.lib.stride_tricks.sliding_window_view(padded, length, axis=2)[:, :, :width]
            columns = np.flatnonzero(np.isfinite(before).any(axis=(0, 1)))
            if not len(columns):
                continue
            part = slice(int(columns[0]) + 1, int(columns[-1]) + width + 1)
            shifted, band = shifted[..., part], band[..., part]
            rows = max(1, _CHUNK // max(1, band.size))
            for at in range(0, len(sources), rows):
                joined = self._join(shifted[at : at + rows, :, None], band)
                values[targets[at : at + rows], kind, :, part] = joined.min(axis=(1, 3))
        return values

    def path(self) -> list[StageRange] | None:
        """Return the best partition, built from the last stage back. Among equal partitions, later stages have later
        types, so that devices that make no difference stay in their order."""
        size, end, none = self._sets.num_stages, self._costs.num_layers, self._classes
        best_value, best_end = np.inf, (0, 0)
        for kind, sources, targets in reversed(self._sets.steps[-1]):
            values = self._join(*self._ways(size, kind, sources, end, none)).min(axis=(1, 2))
            row = int(values.argmin())
            if values[row] < best_value:
                best_value, best_end = float(values[row]), (int(targets[row]), kind)
        if not np.isfinite(best_value):
            return None
        number, kind = best_end
        stop, after = end, none
        path: list[StageRange] = []
        while True:
            step = next(step for step in self._sets.steps[size - 1] if step.kind == kind)
            source = step.sources[np.flatnonzero(step.targets == number)]
            before, seconds = self._ways(size, kind, source, stop, after)
            values = self._join(before, seconds)[0]
            link, first = (int(index) for index in np.unravel_index(values.argmin(), values.shape))
            value = before[0, link, first]
            path.append(StageRange(kind, first, stop, none if size == 1 else link, after))
            size -= 1
            if not size:
                return path[::-1]
            number, stop, after = int(source[0]), first, link
            last = np.flatnonzero(self._costs.link[:, kind] == link)
            at_last = self._values[size - 1][number, last, link, stop]
            kind = int(last[np.flatnonzero(at_last == value)[-1]])

    def _ways(self, size: int, kind: int, sources: Indices, stop: int, after: int) -> tuple[Floats, Floats]:
        """Return the ways to end stage `size` - 1 of type `kind` at layer `stop`: (values of the stages before, shape
        (sources, class of the link to them, first layer); seconds of the stage, shape (class, first layer))."""
        if size == 1:
            start = np.full((len(sources), 1, self._costs.num_layers + 1), np.inf)
            start[:, :, 0] = 0.0
            return start, self._table(kind, self._classes, after)[None, :, stop]
        seconds = np.array([self._table(kind, before, after)[:, stop] for before in range(self._classes)])
        return self._before(size - 1, kind, sources), seconds
