"""Hypothesis strategies for control records: any record of any type, with any content."""

from __future__ import annotations

import types
import typing
from typing import Any, get_args, get_origin

import msgspec
from doll.records.control import AnyRecord
from doll.records.event_times import EventTimes, LatencyCounts, event_times_of
from hypothesis import strategies as st

TYPES: tuple[type[msgspec.Struct], ...] = get_args(AnyRecord)


def strategy(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of one field's type."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is int:
        return st.integers(-(2**63), 2**63 - 1)
    if annotation is float:
        return st.floats(allow_nan=False)
    if annotation is bool:
        return st.booleans()
    if annotation is str:
        return st.text(max_size=20)
    if annotation is bytes:
        return st.binary(max_size=50)
    if annotation is type(None):
        return st.none()
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([strategy(arg) for arg in args])
    if origin is tuple and args[1:] == (...,):
        return st.lists(strategy(args[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(strategy, args))
    if origin is not None and issubclass(origin, typing.Mapping):
        return st.dictionaries(strategy(args[0]), strategy(args[1]), max_size=3)
    if annotation is EventTimes:
        return st.lists(st.integers(-1, 2**53), max_size=20).map(lambda times: event_times_of(times, 2**52, 1000))
    if annotation is LatencyCounts:
        return st.lists(st.integers(0, 2**60), min_size=26, max_size=26).map(lambda counts: LatencyCounts((*counts,)))
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return struct_of(annotation)
    raise AssertionError(f"no strategy for {annotation!r}")


def struct_of(cls: type) -> st.SearchStrategy[Any]:
    """Structs of one type; fields with a default are sometimes left out. `packed` is in encoded records only."""
    hints = typing.get_type_hints(cls)
    required = {f.name: strategy(hints[f.name]) for f in msgspec.structs.fields(cls) if f.required}
    optional = {
        f.name: strategy(hints[f.name]) for f in msgspec.structs.fields(cls) if not f.required and f.name != "packed"
    }
    return st.fixed_dictionaries(required, optional=optional).map(lambda fields: cls(**fields))


ANY = st.one_of([struct_of(cls) for cls in TYPES])
