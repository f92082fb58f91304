"""Detects that a job's metrics have become worse, and between which records. Pure.

The detectors are River's: ADWIN (Bifet and Gavaldà, SDM 2007), Page-Hinkley (Page, Biometrika 1954) and KSWIN (Raab et
al., Neurocomputing 2020). A model that learns becomes better all the time, so only changes for the worse count. ADWIN's
bound needs values in [0, 1]: a metric without such a range becomes x / (x + m), with m the median of its first values.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from doll.config.drift import DetectorConfig, DriftConfig
from doll.config.gates import direction_of
from doll.errors import ConfigError
from doll.ledger.lineage import Lineage, LineageChange
from doll.monitor.state.metric_window import update_values
from doll.records.control import AnyRecord, Finished, TermStarted, Update
from doll.theory.checks import Floats

_FIRST: Final = 30  # values before a detector begins: their median is the scale
_MAX_KEPT: Final = 5_000  # updates; a change is not placed further back
_WINDOW: Final = 300  # values in which the change is looked for, if the detector has no window
_LEAST: Final = 5  # values of either side of a change
_UNIT: Final = frozenset({"accuracy", "auc", "average_precision", "ndcg"})  # metrics in [0, 1]
_RIVER: Final = {"adwin": "ADWIN", "page_hinkley": "PageHinkley", "kswin": "KSWIN"}
_PACKAGE: Final = "river.drift"
# River looks for a change at each 32nd value, and its values are samples: here they are updates. Its threshold is for
# values without a limit, and its alpha finds changes in streams that have none.
_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "adwin": {"clock": 8}, "page_hinkley": {"threshold": 8.0}, "kswin": {"alpha": 1e-5, "seed": 0},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drift:
    """A metric that has become worse, or a feature, label or answer with another distribution.

    Attributes:
        before, after: mean of the metric before and after the change, in the part of the stream that was compared.
        since: the version at which the metric most likely changed.
        version: that at which the detector noticed it, made by the server of `term`.
        time_s: time of the update of `version`, Unix time.
        offsets: (partition, lo, hi): the records of these versions.
        index: population stability index of the two distributions; 0: the change is that of a metric.
    """

    metric: str
    detector: str
    before: float
    after: float
    since: int
    version: int
    time_s: float
    offsets: tuple[tuple[int, int, int], ...]
    term: int = 0
    index: float = 0.0


@dataclass(frozen=True, slots=True)
class _Seen:
    """An update: its values by metric, and its records."""

    version: int
    values: Mapping[str, float]
    records: tuple[tuple[int, int, int], ...]


class DriftWatch:
    """Feeds the metrics of updates to detectors. The records of `updates` give the same result each time that they are
    read from the beginning.

    Raises:
        ConfigError: River refuses the arguments of a detector.
    """

    def __init__(self, config: DriftConfig, *, after_term: int = 0) -> None:
        self._config, self._after_term = config, after_term
        self._lineage = Lineage()
        self._begin()

    def _begin(self) -> None:
        self._watched = {name: _Watched(name, item) for name, item in self._config.watched.items()}
        self._kept: deque[_Seen] = deque(maxlen=_MAX_KEPT)
        self._newest = 0

    def feed(self, record: AnyRecord) -> list[Drift]:
        """Take the next record of the topic `updates`, and return what it shows.

        A server that begins again repeats versions; their records were seen before. Another generation of the job
        begins another watch.
        """
        if not isinstance(record, TermStarted | Update | Finished) or record.term <= self._after_term:
            return []
        change = self._lineage.feed(record)
        if change is LineageChange.GENERATION:
            self._begin()
        if not isinstance(record, Update) or change is LineageChange.FENCED or record.version <= self._newest:
            return []
        self._newest = record.version
        if not record.n_samples:
            return []
        values = {"loss": record.loss, **update_values(record.metrics)}
        values = {name: values[name] for name in self._watched if math.isfinite(values.get(name, math.nan))}
        records = tuple((member.partition, member.lo, member.hi) for member in record.members)
        self._kept.append(_Seen(record.version, values, records))
        drifts = (self._drift(name, self._watched[name].changed(value), record) for name, value in values.items())
        return [drift for drift in drifts if drift is not None]

    def _drift(self, name: str, width: int, record: Update) -> Drift | None:
        """Return the change for the worse in the last `width` values of a metric; None: there is none."""
        kept = [item for item in self._kept if name in item.values][-width:] if width else []
        if len(kept) < 2 * _LEAST:
            return None
        watched, values = self._watched[name], np.array([item.values[name] for item in kept])
        at = _most_likely_change(watched.comparable(values))
        before, after = _mean(values[:at]), _mean(values[at:])
        if not watched.is_worse(before, after):
            return None
        return Drift(
            metric=name, detector=self._config.watched[name].detector, before=before, after=after,
            since=kept[at].version, version=record.version, time_s=record.time_s,
            offsets=_spans(place for item in kept[at:] for place in item.records), term=record.term,
        )  # fmt: skip


class _Watched:
    """The detector of one metric."""

    def __init__(self, name: str, config: DetectorConfig) -> None:
        self._better = config.better or direction_of(name)
        self._is_unit = name.partition("[")[0] in _UNIT
        self._first: list[float] = []
        self._scale = 0.0
        self._count = 0
        arguments = {key: int(value) if value == int(value) else value for key, value in config.args.items()}
        try:
            self._detector: Any = _detector_class(config.detector)(**{**_DEFAULTS[config.detector], **arguments})
        except (TypeError, ValueError, OverflowError) as exc:
            raise ConfigError(f"drift.metrics.{name}.args: {_RIVER[config.detector]}: {exc}") from exc

    def changed(self, value: float) -> int:
        """Take the next value. Return in how many last values there is a change; 0: there is none."""
        if not self._is_unit and len(self._first) < _FIRST:
            self._first.append(abs(value))
            self._scale = float(np.median(self._first)) or 1.0
            return 0
        self._detector.update(float(self.comparable(np.array([value]))[0]))
        self._count += 1
        if not self._detector.drift_detected:
            return 0
        # ADWIN's window has dropped a part of what was before. As much before it shows the change better.
        width = min(2 * int(getattr(self._detector, "width", 0)) or _WINDOW, self._count)
        self._count = 0  # River's detectors begin again
        return width

    def comparable(self, values: Floats) -> Floats:
        """Return values in [0, 1], of the same order."""
        values = np.abs(values - 1) if self._better == "one" else np.abs(values)
        return values if self._is_unit else values / (values + self._scale)

    def is_worse(self, before: float, after: float) -> bool:
        match self._better:
            case "higher":
                return after < before
            case "one":
                return abs(after - 1) > abs(before - 1)
            case _:
                return after > before


def _detector_class(name: str) -> Any:
    """Return River's class of a detector.

    Its module is imported without the package around it, whose data sets import pandas, scikit-learn and SQLAlchemy: 2
    s of processor time, while the job trains. The package is left as if nobody had imported it.
    """
    with contextlib.ExitStack() as opened:
        if _PACKAGE not in sys.modules:
            spec = importlib.util.find_spec(_PACKAGE)
            assert spec is not None
            sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)  # without its content
            opened.callback(sys.modules.pop, _PACKAGE)
        return getattr(importlib.import_module(f"{_PACKAGE}.{name}"), _RIVER[name])


def _most_likely_change(values: Floats) -> int:
    """Return the index at which the mean most likely changed: the two parts differ most, by the sum of squares between
    them."""
    count, sums = len(values), np.cumsum(values)
    at = np.arange(_LEAST, count - _LEAST + 1)
    difference = sums[at - 1] / at - (sums[-1] - sums[at - 1]) / (count - at)
    return int(at[np.argmax(at * (count - at) * difference**2)])


def _mean(values: Floats) -> float:
    return float(np.sum(values / len(values)))


def _spans(places: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Return one span of offsets for each partition."""
    spans: dict[int, tuple[int, int]] = {}
    for partition, lo, hi in places:
        known = spans.get(partition, (lo, hi))
        spans[partition] = min(known[0], lo), max(known[1], hi)
    return tuple((partition, *span) for partition, span in sorted(spans.items()))
