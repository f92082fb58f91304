"""Objects whose state is kept over restarts: attributes to and from plain JSON values. Pure.

JSON has neither infinity nor arrays. A number that is not finite ("never") is stored as None, and an array as a list.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import msgspec
import numpy as np


class KeptState:
    """Base class of objects whose state is saved. A saved value is the attribute `NAME` or `_NAME`.

    Attributes:
        KEPT: type of each saved value, by name; `KeptState` for an object with a state of its own. Arrays keep their
            shape.
        LATER: names of values that are missing in the state files of earlier releases.
    """

    KEPT: ClassVar[Mapping[str, Any]] = {}
    LATER: ClassVar[Collection[str]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, which `restore` reads."""
        return {name: plain(getattr(self, self._attribute(name))) for name in self.KEPT}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Continue from the result of `to_dict`. If a value is None, the new object keeps its own value. Raises
        KeyError, TypeError or ValueError if `kept` has another form or another number of slots."""
        restored: dict[str, Any] = {}
        for name, kind in self.KEPT.items():
            value = kept.get(name) if name in self.LATER else kept[name]
            attribute = self._attribute(name)
            current = getattr(self, attribute)
            if isinstance(current, KeptState):
                if value is not None:
                    current.restore(value)
            elif value is not None and kind is not KeptState:
                restored[attribute] = _restored(value, kind, current)
        vars(self).update(restored)  # either all values or none

    def _attribute(self, name: str) -> str:
        return f"_{name}" if f"_{name}" in vars(self) else name


def plain(value: Any) -> Any:
    """Convert a value for JSON."""
    if isinstance(value, KeptState):
        return value.to_dict()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    elif isinstance(value, set | frozenset):
        value = sorted(value)
    return _finite(msgspec.to_builtins(list(value) if isinstance(value, deque) else value, str_keys=True))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _restored(value: Any, kind: Any, current: Any) -> Any:
    if isinstance(current, np.ndarray):
        array = np.array([-math.inf if number is None else number for number in value], dtype=current.dtype)
        if array.shape != current.shape:
            raise ValueError(f"expected {current.size} slots, got {array.size}")
        return array
    if isinstance(current, deque):
        return deque(_converted(value, kind), current.maxlen)
    return _converted(value, kind)


def _converted(value: Any, kind: Any) -> Any:
    """Convert a value to this type. Fields of a `msgspec.Struct` that are None get their defaults."""
    return msgspec.convert(_without_none(value), kind, str_keys=True)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
