"""The checks of a version before it gets an alias: what was measured of it, against the alias's version. Pure.

A difference of a metric is judged by its standard error over the same held-out samples, for any mergeable metric: the
delete-one-block jackknife (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 11) of the paired
difference, with Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from doll.config.gates import GatesConfig
from doll.metrics.states import MetricState, merged
from doll.storage.version_marks import Check, Verdict
from doll.theory.comparison import stability_index, t_quantile

MAX_BLOCKS: Final = 20
_OUTPUT_BINS: Final = 10
_LEAST_ERROR: Final = 1e-9  # six standard errors: nobody knows tails beyond them
_USUAL_STEPS: Final = 3  # known steps before a step can be unusual


class Block(NamedTuple):
    """The metrics of some held-out samples: weighted sums and states by name, and the weight of the samples."""

    weight: float
    sums: Mapping[str, float]
    states: Mapping[str, MetricState]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measured facts of a version.

    Attributes:
        updates: number of updates that it has learned.
        newest_event_s: time of the newest event that it has learned; None: not known.
        tensors: the norm of each tensor's change since the alias's version; NaN if a value is not finite.
        lengths: the norm of each tensor.
        blocks: the metrics of the held-out samples, in parts; the same samples for all versions.
        outputs: the model's outputs for them, by name, flat.
        answers_s: time for these outputs.
        own: what `Task.check` says; "": nothing is wrong.
    """

    version: int
    updates: int = 0
    size_bytes: int = 0
    newest_event_s: float | None = None
    tensors: Mapping[str, float] = field(default_factory=dict)
    lengths: Mapping[str, float] = field(default_factory=dict)
    blocks: Sequence[Block] = ()
    outputs: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    answers_s: float = 0.0
    own: str = ""

    def metrics(self) -> dict[str, float]:
        """Return the metrics over all held-out samples."""
        return {name: _Metric(name, self.blocks).whole for name in _names(self.blocks)}


class Judge:
    """Decides about one version after another. It learns from those that pass what a usual step is."""

    def __init__(self, config: GatesConfig) -> None:
        self._config = config
        self._steps: dict[str, list[float]] = {}

    def weights(self, candidate: Measured, stable: Measured | None, now_s: float) -> list[Check]:
        """Return the checks that need no held-out samples."""
        config = self._config
        checks = [_finite(candidate)]
        if config.max_event_age_s is not None and candidate.newest_event_s is not None:
            age_s = now_s - candidate.newest_event_s
            checks.append(Check("age", age_s <= config.max_event_age_s, f"newest event {age_s:.3g} s old"))
        if stable is not None and config.max_growth is not None and stable.size_bytes:
            growth = candidate.size_bytes / stable.size_bytes
            checks.append(Check("size", growth <= config.max_growth, f"{growth:.3g} times as large"))
        if stable is not None and config.max_step is not None and checks[0].passed:
            checks.append(self._step(candidate, stable, config.max_step))
        return checks

    def answers(self, candidate: Measured, stable: Measured | None) -> list[Check]:
        """Return the checks of the answers to held-out samples."""
        config, checks = self._config, []
        values = candidate.metrics()
        for name in config.gated:
            if candidate.blocks and not math.isfinite(values.get(name, math.nan)):
                checks.append(Check(name, False, "not a finite number" if name in values else "the task has none"))
        if stable is not None:
            named = [name for name in config.gated if math.isfinite(values.get(name, math.nan))]
            level = 1.0 - max(config.held_back_share / max(1, len(named)), _LEAST_ERROR)
            checks += [self._metric(name, candidate, stable, level) for name in named]
            if config.max_shift is not None and candidate.outputs:
                shift = max(_shift(values, stable.outputs[name]) for name, values in candidate.outputs.items())
                checks.append(Check("answers", shift <= config.max_shift, f"stability index {shift:.3g}"))
            if config.max_slowdown is not None and stable.answers_s > 0:
                slowdown = candidate.answers_s / stable.answers_s
                checks.append(Check("latency", not self.is_slow(candidate, stable), f"{slowdown:.3g} times as long"))
        checks.append(Check("task", not candidate.own, candidate.own[:300] or "Task.check has no objection"))
        return checks

    def is_slow(self, candidate: Measured, stable: Measured) -> bool:
        """Return whether the check of the latency fails."""
        most = self._config.max_slowdown
        return most is not None and stable.answers_s > 0 and candidate.answers_s > most * stable.answers_s

    def verdict(self, candidate: Measured, stable: Measured | None, checks: Sequence[Check], now_s: float) -> Verdict:
        """Return the verdict of all checks, and learn from a version that passes."""
        is_good = all(check.passed for check in checks)
        if is_good and stable is not None:
            for name, rate in _rates(candidate, stable):
                self._steps[name] = [*self._steps.get(name, [])[-19:], rate]
        against = None if stable is None else stable.version
        return Verdict(candidate.version, against, now_s, is_good, tuple(checks))

    def _step(self, candidate: Measured, stable: Measured, most: float) -> Check:
        worst, where = 0.0, ""
        for name, rate in _rates(candidate, stable):
            known = self._steps.get(name, [])
            usual = float(np.median(known)) if len(known) >= _USUAL_STEPS else 0.0
            if usual > 0 and rate / usual > worst:
                worst, where = rate / usual, name
        text = f"{where} has moved {worst:.3g} times as far as usual" if where else "no usual step is known yet"
        return Check("step", worst <= most, text)

    def _metric(self, name: str, candidate: Measured, stable: Measured, level: float) -> Check:
        better, tolerance = self._config.better(name), self._config.gated[name].tolerance
        new, old = _Metric(name, candidate.blocks), _Metric(name, stable.blocks)
        worse: Callable[[float, float], float] = {
            "lower": lambda a, b: a - b, "higher": lambda a, b: b - a, "one": lambda a, b: abs(a - 1) - abs(b - 1),
        }[better]  # fmt: skip
        difference = worse(new.whole, old.whole)
        # A task may leave a metric out of some blocks, and not of the same ones for both versions: no pairs then.
        pairs = zip(new.without, old.without, strict=True) if len(new.without) == len(old.without) else ()
        parts = [part for a, b in pairs if math.isfinite(part := worse(a, b))]
        noise = t_quantile(level, len(parts) - 1) * jackknife_error(parts) if len(parts) > 1 else 0.0
        text = f"{new.whole:.4g}, version {stable.version} has {old.whole:.4g}: {difference:+.3g} worse ± {noise:.2g}"
        return Check(name, not difference - noise > tolerance, text)


class _Metric:
    """A metric over all blocks, and over all but each."""

    def __init__(self, name: str, blocks: Sequence[Block]) -> None:
        used = [block for block in blocks if name in block.sums or name in block.states]
        self.whole, self.without = math.nan, list[float]()
        if used and all(name in block.states for block in used):
            states = [block.states[name] for block in used]
            before = [*accumulate(states, lambda a, b: merged([a, b]))]
            after = [*accumulate(reversed(states), lambda a, b: merged([a, b]))][::-1]
            self.whole = before[-1].compute()
            for at in range(len(states)) if len(states) > 1 else ():
                parts = ([before[at - 1]] if at else []) + ([after[at + 1]] if at + 1 < len(states) else [])
                self.without.append(merged(parts).compute())
        elif used:
            weight, total = sum(block.weight for block in used), sum(block.sums.get(name, 0.0) for block in used)
            self.whole = total / weight if weight else math.nan
            self.without = [
                (total - block.sums.get(name, 0.0)) / (weight - block.weight)
                for block in used
                if len(used) > 1 and weight > block.weight
            ]


def jackknife_error(without: Sequence[float]) -> float:
    """Return the standard error of a statistic from its values without one block each; 0 for fewer than two."""
    count, values = len(without), np.array(without)
    return float(np.sqrt((count - 1) / count * np.sum((values - values.mean()) ** 2))) if count > 1 else 0.0


def _names(blocks: Sequence[Block]) -> list[str]:
    return sorted({name for block in blocks for name in (*block.sums, *block.states)})


def _finite(candidate: Measured) -> Check:
    broken = [name for name, length in candidate.lengths.items() if not math.isfinite(length)]
    return Check("finite", not broken, f"{broken[0]} has values that are not finite" if broken else "all values")


def _rates(candidate: Measured, stable: Measured) -> Iterator[tuple[str, float]]:
    """Yield the change of each tensor by the square root of the updates, which is how noise moves it."""
    updates = max(1, abs(candidate.updates - stable.updates))
    for name, change in candidate.tensors.items():
        yield name, change / math.sqrt(updates)


def _shift(values: npt.NDArray[Any], before: npt.NDArray[Any]) -> float:
    """Return the population stability index between outputs, over the deciles of `before`."""
    if not np.isfinite(values).all():
        return math.inf
    edges = np.unique(np.quantile(before, np.linspace(0, 1, _OUTPUT_BINS + 1)[1:-1]))
    counts = (np.bincount(np.searchsorted(edges, each), minlength=len(edges) + 1) for each in (values, before))
    return stability_index(*counts)
