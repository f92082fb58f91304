"""The best cut of a chain of layers over all orders of devices: a dynamic programme over sets of devices. Pure.

A state is the set of the devices in use, the last of them, and the class of the link after it, which the time of both
of its neighbours depends on. The value of a state is a vector: for each layer j, the least bottleneck of layers 0 to
j - 1 on these devices. It has to be kept for each j: with transfers, a stage may get faster by a layer more, so that
the furthest layer within a time does not say which other ones are.

Sets are of types of devices, with how many of each: devices of one type are not permuted among themselves.
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

# Numbers of a temporary array: it stays in the cache.
_CHUNK = 1 << 16
# Problems of so few numbers are searched without a limit on the time: a search takes less than the next one.
_SMALL = 1 << 17
_GROWTH = 1.25


@dataclass(frozen=True)
class Costs:
    """The times and the memory of stages. L layers, T types of devices, C classes of links.

    Attributes:
        compute_s: shape (T, L + 1); forward and backward of layers 0 to i - 1.
        transfer_s: shape (C + 1, L + 1); what crosses the cut before layer i, in one direction. The last row is 0: no
            link.
        link: shape (T, T); class of the link between two types.
        fits: shape (T, 2, L + 1, L + 1); layers i to j - 1 fit into the memory as [a stage, the last stage].
    """

    compute_s: Floats
    transfer_s: Floats
    link: Indices
    fits: Bools

    @property
    def num_layers(self) -> int:
        return int(self.compute_s.shape[1]) - 1

    def stage_s(self, kind: int, before: int, after: int) -> Floats:
        """Seconds of layers i to j - 1 on a device of type `kind`, shape (L + 1, L + 1); infinite where j <= i.

        Args:
            before: class of the link to the stage before; C: none.
            after: that of the link to the next stage.
        """
        compute = self.compute_s[kind]
        seconds: Floats = compute[None, :] - compute[:, None]
        seconds = seconds + self.transfer_s[before][:, None] + self.transfer_s[after][None, :]
        seconds[np.tri(self.num_layers + 1, dtype=bool)] = np.inf
        return seconds


class Step(NamedTuple):
    """One more device, of type `kind`: set `sources[n]` becomes set `targets[n]` of the next level."""

    kind: int
    sources: Indices
    targets: Indices


@dataclass(frozen=True)
class Sets:
    """Sets of devices by their size. `steps[s]` lead from sets of s devices to sets of s + 1.

    Attributes:
        members: of each set of each size, how many of each type.
    """

    members: tuple[tuple[tuple[int, ...], ...], ...]
    steps: tuple[tuple[Step, ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.steps)

    @classmethod
    def of(cls, counts: Sequence[int], num_stages: int) -> Sets:
        """All sets of up to `num_stages` devices, from `counts` devices of each type."""
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
    """Layers `first` to `stop` - 1 on a device of type `kind`, and the classes of the links around it (C: none)."""

    kind: int
    first: int
    stop: int
    before: int
    after: int


def reachable(costs: Costs, sets: Sets) -> tuple[list[Bools], bool]:
    """The cuts that fit into memory, whatever time they take.

    Returns:
        for each number of stages below k, shape (sets, L + 1): layers 0 to j - 1 fit onto the devices of the set, none
        of which is the last stage; and whether there is a partition.
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
    """The partition with the least bottleneck, and of those one in which a minibatch takes least, from the first stage
    to the last and back; the same one in each run.

    Returns:
        the stages in order; None if none fits into memory.
    """
    if not reachable(costs, sets)[1]:
        return None
    # Any partition that is found within a limit is the best one, as all of those within the limit are looked at. With a
    # limit, stages have few layers, and there is less to look at.
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
    """One pass over all states, with stages of `limit` seconds at most. `join` of numpy puts a stage's time to the
    value of what comes before it: maximum or sum."""

    def __init__(self, costs: Costs, sets: Sets, limit: float, join: Any) -> None:
        self._costs, self._sets, self._join = costs, sets, join
        self._classes = len(costs.transfer_s) - 1
        self._limit = limit
        self._tables: dict[tuple[int, int, int], Floats] = {}
        # Of each size: (sets, type of the last device, class of the link after it, layers).
        self._values: list[Floats] = []
        self._windows: dict[int, tuple[int, Floats]] = {}
        for size in range(1, sets.num_stages):
            self._values.append(self._level(size))

    def _table(self, kind: int, before: int, after: int) -> Floats:
        """Seconds of the stages that are allowed, the others infinite."""
        key = (kind, before, after)
        if key not in self._tables:
            seconds = self._costs.stage_s(*key)
            allowed = self._costs.fits[kind, int(after == self._classes)] & (seconds <= self._limit)
            self._tables[key] = np.where(allowed, seconds, np.inf)
        return self._tables[key]

    def _window(self, kind: int) -> tuple[int, Floats]:
        """(most layers of a stage, W; shape (classes before, classes after, W, L + 1): seconds of layers j - W + u to
        j - 1 at [u, j])."""
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
        """Values of `sources`, sets of this size, with a device of type `kind` after them: shape (sources, class of
        the link between them, L + 1)."""
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
        """The best partition, put together from the last stage back. Of equal ones, later stages have later types, so
        that devices that make no difference stay in their order."""
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
        """Stage `size` - 1 of type `kind` up to layer `stop`: (values of what comes before it, shape (sources, class of
        the link to it, first layer); seconds of the stage, shape (class, first layer))."""
        if size == 1:
            start = np.full((len(sources), 1, self._costs.num_layers + 1), np.inf)
            start[:, :, 0] = 0.0
            return start, self._table(kind, self._classes, after)[None, :, stop]
        seconds = np.array([self._table(kind, before, after)[:, stop] for before in range(self._classes)])
        return self._before(size - 1, kind, sources), seconds
