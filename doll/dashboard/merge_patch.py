"""The difference of two JSON values as a merge patch (RFC 7386). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the patch that changes `before` into `after`. It contains the changed members, and None for removed
    members.

    A list is replaced as a whole. `after` must not contain None, because a merge patch cannot express it.

    >>> merge_patch({"a": 1, "b": {"c": 2, "d": 3}}, {"a": 1, "b": {"c": 4}})
    {'b': {'d': None, 'c': 4}}
    """
    patch: dict[str, Any] = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            if inner := merge_patch(old, value):
                patch[name] = inner
        elif value != old:
            patch[name] = value
    return patch
