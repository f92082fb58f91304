"""The metric states of a run's updates, merged over all of them and over the last ones. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from doll.errors import RecordError
from doll.metrics.states import MetricState, from_bytes, merged, values_of

_MAX_BYTES: Final = 64 * 2**20
MAX_HALF_LIVES: Final = 10  # after which an update counts no more
_MAX_METRICS: Final = 256  # names: a hostile record must not fill the memory

States = Mapping[str, MetricState]


class MetricWindow:
    """The states of the updates, which can be rolled back to an earlier version.

    The states of single updates are kept as long as they are in the window or fit into a limit of bytes; those before
    are merged. A rollback to a version before the kept ones forgets all earlier states: the metrics over the whole run
    then begin there.

    Args:
        window: number of updates in the windowed metrics; at least 1.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._begin()

    def _begin(self) -> None:
        self._kept: deque[tuple[int, Mapping[str, bytes]]] = deque()
        self._bytes = self._until = 0  # version of the newest update in `_earlier`
        self._earlier: States = {}
        self._all: States = {}
        self._new: list[Mapping[str, bytes]] = []  # not yet in `_all`
        self._names: set[str] = set()

    def add(self, version: int, states: Mapping[str, bytes]) -> None:
        """Add the encoded states of an update. States that cannot be decoded are left out."""
        if not states and not self._kept:
            return
        self._names.update(sorted(states)[: max(0, _MAX_METRICS - len(self._names))])
        states = {name: states[name] for name in states if name in self._names}
        self._kept.append((version, states))
        self._bytes += _size(states)
        self._new.append(states)
        if len(self._new) >= 64:  # not each alone: a merge with a large table takes milliseconds
            self.running()
        if self._bytes > _MAX_BYTES:
            oldest = []
            while self._bytes > 0.9 * _MAX_BYTES and len(self._kept) > self._window:
                self._until, states = self._kept.popleft()
                self._bytes -= _size(states)
                oldest.append(states)
            self._earlier = _merged(self._earlier, oldest)

    def rollback(self, version: int) -> None:
        """Forget the updates above `version`."""
        if version < self._until:
            self._begin()
        while self._kept and self._kept[-1][0] > version:
            self._bytes -= _size(self._kept.pop()[1])
        self._all, self._new = self._earlier, [states for _, states in self._kept]

    def running(self) -> dict[str, float]:
        """Return the metrics over all updates, with their standard errors."""
        self._all, self._new = _merged(self._all, self._new), []
        return _values(self._all)

    def windowed(self) -> dict[str, float]:
        """Return the metrics over the samples of the last `window` updates, with their standard errors."""
        first = max(0, len(self._kept) - self._window)
        return _values(_merged({}, (self._kept[at][1] for at in range(first, len(self._kept)))))

    def faded(self, half_life: float) -> dict[str, float]:
        """Return the metrics with the weight of each update halved in `half_life` updates, with their standard errors.
        Updates whose weight is below a thousandth are left out."""
        by_name: dict[str, list[MetricState]] = {}
        for age, (_, states) in zip(range(MAX_HALF_LIVES * math.ceil(half_life)), reversed(self._kept), strict=False):
            for name, state in _decoded(states).items():
                if (faded := state.faded(0.5 ** (age / half_life))) is not None:
                    by_name.setdefault(name, []).append(faded)
        return _values(_merged_states(by_name))


def split_metrics(metrics: Mapping[str, float | bytes]) -> tuple[dict[str, float], dict[str, bytes]]:
    """Return the means and the encoded states of an update."""
    states = {name: value for name, value in metrics.items() if isinstance(value, bytes)}
    return {name: value for name, value in metrics.items() if not isinstance(value, bytes)}, states


def update_values(metrics: Mapping[str, float | bytes]) -> dict[str, float]:
    """Return the means of an update, and the metrics of its states as far as they can be decoded."""
    means, states = split_metrics(metrics)
    return means | _values(_decoded(states))


def _size(states: Mapping[str, bytes]) -> int:
    return sum(map(len, states.values())) + 200


def _decoded(states: Mapping[str, bytes]) -> States:
    result = {}
    for name, data in states.items():
        try:
            result[name] = from_bytes(data).in_memory()
        except RecordError:  # such as a kind of the user's task, which this process has not imported
            continue
    return result


def _merged(earlier: States, encoded: Iterable[Mapping[str, bytes]]) -> States:
    by_name: dict[str, list[MetricState]] = {}
    for states in (earlier, *map(_decoded, encoded)):
        for name, state in states.items():
            by_name.setdefault(name, []).append(state)
    return _merged_states(by_name)


def _merged_states(by_name: Mapping[str, Sequence[MetricState]]) -> States:
    result = {}
    for name, of_name in by_name.items():
        try:
            result[name] = merged(of_name)
        except RecordError:  # the kind of the metric has changed: the newest counts
            result[name] = of_name[-1]
    return result


def _values(states: States) -> dict[str, float]:
    return {key: value for name, state in states.items() for key, value in values_of(name, state).items()}
