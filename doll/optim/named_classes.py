"""Classes of torch or of another package that a job file names: found by name, and made with the given arguments."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from doll.errors import ConfigError
from doll.task.base import described

T = TypeVar("T")


def find_class(field: str, name: str, base: type[T]) -> type[T]:
    """The subclass `name` (`module.Class`) of `base`.

    Args:
        field: of the job file, for errors.

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
    """`cls(given, **args)`.

    Raises:
        ConfigError: it does not take these arguments.
    """
    try:
        return cls(given, **args)
    except ConfigError:
        raise
    except Exception as exc:  # it may raise anything
        raise ConfigError(
            f"{field}.args: {name} does not take {dict(args)}: {described(exc)}; expected {_signature(cls)}"
        ) from exc


def _signature(cls: Callable[..., Any]) -> str:
    try:
        taken = list(inspect.signature(cls).parameters.values())[1:]
    except (TypeError, ValueError):
        return "the arguments of its documentation"
    return ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in taken) or "no arguments"
