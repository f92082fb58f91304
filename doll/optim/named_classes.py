"""Tools for classes of torch or another package that a job file names. They look a class up, make an object with the
given arguments, and encode the object's plain state (numbers and texts) as bytes for a checkpoint.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from doll.errors import CheckpointError, ConfigError
from doll.task.base import described

T = TypeVar("T")


def find_class(field: str, name: str, base: type[T]) -> type[T]:
    """Return the subclass `name` (`module.Class`) of `base`.

    Args:
        field: field of the job file, for error messages.

    Raises:
        ConfigError: there is no such class.
    """
    module_name, _, class_name = name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception as exc:  # another package may raise anything while it is imported
        raise ConfigError(
            f"{field}.class: cannot import {module_name!r}: {described(exc)}; expected module.Class of an installed "
            "package, or of a Python file beside the job file"
        ) from exc
    cls = getattr(module, class_name, None)
    if cls is None:
        known = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, base)]
        near = difflib.get_close_matches(class_name, known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"{field}.class: {module_name!r} has no class {class_name!r}{hint}")
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ConfigError(
            f"{field}.class: expected a subclass of {base.__module__}.{base.__name__}, got {name} which is {cls!r}"
        )
    return cls


def make(field: str, cls: Callable[..., T], name: str, given: Any, args: Mapping[str, Any]) -> T:
    """Return `cls(given, **args)`. Raises ConfigError if the class does not accept these arguments."""
    try:
        return cls(given, **args)
    except ConfigError:
        raise
    except Exception as exc:  # the class may raise anything
        raise ConfigError(
            f"{field}.args: {name} does not take {dict(args)}: {described(exc)}; expected {_signature(cls)}"
        ) from exc


def _signature(cls: Callable[..., Any]) -> str:
    try:
        taken = list(inspect.signature(cls).parameters.values())[1:]
    except (TypeError, ValueError):
        return "the arguments of its documentation"
    return ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in taken) or "no arguments"


def packed(values: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
    """Encode plain values as bytes; equal values give equal bytes. Raises ConfigError if a value is not plain."""
    try:
        return np.frombuffer(msgspec.msgpack.encode(values, order="deterministic"), np.uint8)
    except (TypeError, OverflowError, msgspec.MsgspecError) as exc:
        raise ConfigError(
            "training.optimizer, training.schedule: expected classes whose state is tensors, numbers and texts, which "
            f"a checkpoint can hold, got another type: {exc}"
        ) from exc


def unpacked(data: npt.NDArray[np.uint8] | None) -> dict[str, Any]:
    """Return the values that were given to `packed`, except that tuples become lists; {} if `data` is None. Raises
    CheckpointError if `data` is damaged."""
    if data is None:
        return {}
    try:
        return msgspec.msgpack.decode(data.tobytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise CheckpointError(f"expected the plain values of an optimizer, got {exc}") from exc


def like(example: Any, value: Any) -> Any:
    """Return `value` from a checkpoint, in which tuples became lists, with the types of `example`."""
    match example, value:
        case dict(), dict():
            items = {key: like(example.get(key), item) for key, item in value.items()}
            return items if type(example) is dict else type(example)(items)
        case ((list() | tuple()), list()):
            examples = [*example, *[None] * len(value)]
            return type(example)(like(one, item) for one, item in zip(examples, value, strict=False))
        case _:
            return value
