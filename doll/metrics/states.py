"""The protocol of a mergeable metric state, and its form in records. Pure.

A state is sent as its kind and numbers. A reader decodes only kinds whose classes its process has already imported:
a record cannot make it import anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, Self

import msgspec
import numpy as np
import numpy.typing as npt

from doll.errors import RecordError

Floats = npt.NDArray[np.float64]

MAX_STATE_BYTES: Final = 65_536  # an update of a few metrics must fit into a Kafka record
STDERR, ERROR_BOUND = "_stderr", "_error_bound"
"""The ends of the names of a metric's standard error, and of the bound of its sketch's error."""


class MetricState(ABC):
    """The state of a metric over some samples. States are immutable. `kind` names the class, as in `my_team:gini`.

    The result of `merge` must not depend on the order in which states are merged, except for rounding.
    """

    kind: ClassVar[str]

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "kind" in vars(cls):
            known = _KINDS.get(cls.kind)
            if known is not None and known.__module__.startswith(f"{__package__}."):
                raise TypeError(f"{cls.__name__}.kind: expected a kind that no metric of DOLL has, got {cls.kind!r}")
            _KINDS[cls.kind] = cls

    @abstractmethod
    def merge(self, *others: Self) -> Self:
        """Return the state over the samples of this state and of `others`."""

    @abstractmethod
    def compute(self) -> float:
        """Return the metric; NaN if the samples do not define it."""

    def stderr(self) -> float:
        """Return the standard error of the metric; NaN if it is not known."""
        return float("nan")

    def error_bound(self) -> float:
        """Return the maximum difference between `compute` and the metric of the samples; 0 if the state is exact."""
        return 0.0

    def faded(self, factor: float) -> Self | None:
        """Optional: return the state as if each sample had `factor` times its weight. None: the metric does not
        fade."""
        return None

    def in_memory(self) -> Self:
        """Return the same state with the size that is allowed for a state that is never sent."""
        return self

    @abstractmethod
    def encode(self) -> Any:
        """Return numbers, texts, lists and dicts of them, as JSON has them."""

    @classmethod
    @abstractmethod
    def decode(cls, content: Any) -> Self:
        """Return the state that was encoded. Raise ValueError if `content` is not the result of `encode`."""


_KINDS: Final[dict[str, type[MetricState]]] = {}


def to_bytes(state: MetricState) -> bytes:
    """Return the form of a state in records.

    Raises:
        ValueError: the state is longer than `MAX_STATE_BYTES`.
    """
    data = msgspec.msgpack.encode((state.kind, state.encode()))
    if len(data) > MAX_STATE_BYTES:
        raise ValueError(f"expected a state of at most {MAX_STATE_BYTES:,} bytes of {state.kind!r}, got {len(data):,}")
    return data


def from_bytes(data: bytes) -> MetricState:
    """Return the state in a record.

    Raises:
        RecordError: the state is too long, damaged, or of a kind that this process does not know.
    """
    if len(data) > MAX_STATE_BYTES:
        raise RecordError(f"expected a metric state of at most {MAX_STATE_BYTES:,} bytes, got {len(data):,}")
    try:
        kind, content = msgspec.msgpack.decode(data, type=tuple[str, Any])
        if kind not in _KINDS:
            raise ValueError(f"expected one of {sorted(_KINDS)}, got {kind[:60]!r}")
        return _KINDS[kind].decode(content)
    except Exception as exc:  # also from the `decode` of a user's class
        raise RecordError(f"not a metric state: {type(exc).__name__}: {exc}"[:300]) from exc


def merged(parts: Iterable[MetricState]) -> MetricState:
    """Return the state over the samples of all parts; at least one is needed.

    Raises:
        RecordError: the parts are of different metrics, or cannot be merged.
    """
    first, *rest = parts
    if any(type(part) is not type(first) for part in rest):
        raise RecordError(f"expected states of one metric, got {sorted({type(part).kind for part in (first, *rest)})}")
    try:
        return first.merge(*rest)
    except Exception as exc:  # the user's code may raise anything
        raise RecordError(f"metric states cannot be merged: {type(exc).__name__}: {exc}"[:300]) from exc


def combined(parts: Sequence[tuple[Mapping[str, float | bytes], float]]) -> tuple[dict[str, float | bytes], int]:
    """Combine the metrics of batches.

    Args:
        parts: for each batch its metrics (sums over the samples, and states), and the weight of its samples.

    Returns:
        By name, the weighted mean of sums, or the merged state; and the number of metrics left out, because their
        states are damaged, unknown or of different metrics.
    """
    weight, refused = sum(part_weight for _, part_weight in parts), 0
    result: dict[str, float | bytes] = {}
    for name in sorted({name for values, _ in parts for name in values}):
        values = [values[name] for values, _ in parts if name in values]
        numbers = [value for value in values if not isinstance(value, bytes)]
        states = [value for value in values if isinstance(value, bytes)]
        if not states:
            result[name] = float(sum(numbers)) / weight if weight else 0.0
            continue
        try:
            if numbers:
                raise RecordError("expected states of all batches, got numbers of some")
            result[name] = states[0] if len(states) == 1 else to_bytes(merged(map(from_bytes, states)))
        except (RecordError, ValueError):
            refused += 1
    return result, refused


def values_of(name: str, state: MetricState) -> dict[str, float]:
    """Return a metric with its standard error and the bound of its error, under their names, as far as known."""
    values = {name: state.compute(), f"{name}{STDERR}": state.stderr(), f"{name}{ERROR_BOUND}": state.error_bound()}
    return {key: value for key, value in values.items() if key == name or value > 0}


def by_segment(
    name: str, make: Callable[..., MetricState], *arrays: Any, segment: Any, segments: Sequence[Any]
) -> dict[str, MetricState]:  # fmt: skip
    """Return the metric `name` of all samples, and of each segment as `name[segment]`, for `Task.metrics`.

    Args:
        make: function of `arrays`, such as `metrics.auc` of scores, targets and weights.
        segment: segment of each sample, shape (n,).
        segments: the segments to show, at most 50. All others are `name[other]`.
    """
    if len(segments) > 50:
        raise ValueError(f"segments: expected at most 50, got {len(segments)}")
    whole, of_sample = [as_array(array) for array in arrays], as_array(segment).reshape(-1)
    rows = {str(label): of_sample == label for label in segments} | {"other": ~np.isin(of_sample, list(segments))}
    parts = {f"{name}[{label}]": make(*(array[at] for array in whole)) for label, at in rows.items() if at.any()}
    return {name: make(*whole), **parts}


def columns(what: str, *arrays: Any, weight: Any = None) -> tuple[Floats, ...]:
    """Return arrays or tensors as float64 of shape (n,), and their weights; weights None become 1.

    Raises:
        ValueError: they differ in size, or a weight is not a finite number of 0 or more.
    """
    flat = [as_array(array).astype(np.float64).reshape(-1) for array in arrays]
    flat.append(np.ones(len(flat[0])) if weight is None else as_array(weight).astype(np.float64).reshape(-1))
    if len({len(array) for array in flat}) != 1:
        raise ValueError(f"{what}: expected arrays of one size, got {[len(array) for array in flat]}")
    if not (np.isfinite(flat[-1]).all() and (flat[-1] >= 0).all()):
        raise ValueError(f"{what}: expected finite weights of 0 or more")
    return tuple(flat)


def as_array(values: Any) -> npt.NDArray[Any]:
    """Return the numpy array of anything that numpy takes, or of a tensor on any device."""
    if hasattr(values, "detach"):  # a tensor; this module does not load torch
        values = values.detach().cpu()
        values = values.double() if values.is_floating_point() else values  # numpy has no bfloat16
    return np.asarray(values)
