"""Objects whose state is kept over restarts: attributes to and from the plain values of a JSON file. Pure.

JSON has no infinity and no arrays: a number that is not finite ("never") is None there, and an array is a list.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import msgspec
import numpy as np


class KeptState:
    """Base of an object with a state that is kept. A kept value is the attribute of its name, or of `_` and its name.

    Attributes:
        KEPT: type of each kept value by its name; `KeptState` for one with a state of its own. Arrays keep their shape.
        LATER: names of values that the state files of earlier releases lack.
    """

    KEPT: ClassVar[Mapping[str, Any]] = {}
    LATER: ClassVar[Collection[str]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `restore` takes them back."""
        return {name: plain(getattr(self, self._attribute(name))) for name in self.KEPT}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Continue from what `to_dict` returned; for a value of None the new object's own value stays. Raises KeyError,
        TypeError or ValueError if `kept` is something else, or of another number of slots."""
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
        vars(self).update(restored)  # all values or none

    def _attribute(self, name: str) -> str:
        return f"_{name}" if f"_{name}" in vars(self) else name


def plain(value: Any) -> Any:
    """A value for JSON."""
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
    """A value of this type. Fields of a `msgspec.Struct` that are None have their defaults."""
    return msgspec.convert(_without_none(value), kind, str_keys=True)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
