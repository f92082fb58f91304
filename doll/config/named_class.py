"""A class of somebody else that a job file names, with its keyword arguments: an optimizer, a schedule. Pure."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from doll.config.section import Section

T = TypeVar("T")
# YAML 1.1 reads 3e-4, without a point, as text; nothing tells a class that a number is meant.
_NUMBER: Final = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def _is_class_name(name: str) -> str:
    parts = name.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ValueError(f"expected module.Class, as in torch.optim.AdamW, got {name!r}")
    return name


def _with_numbers(value: Any) -> Any:
    match value:
        case str() if _NUMBER.fullmatch(value):
            return float(value)
        case dict():
            return {key: _with_numbers(item) for key, item in value.items()}
        case list():
            return [_with_numbers(item) for item in value]
        case _:
            return value


Values = Annotated[dict[str, Any], BeforeValidator(_with_numbers)]
"""Keyword arguments, whatever their types; text such as 3e-4 is a number."""


class NamedClass(Section):
    """A class and its keyword arguments."""

    cls: Annotated[str, AfterValidator(_is_class_name)] = Field(alias="class")
    """`module.Class`, as in torch.optim.AdamW"""
    args: Values = Field(default_factory=dict)
    """keyword arguments of the class"""


def _check_patterns(values: dict[str, T]) -> dict[str, T]:
    for pattern in values:
        try:
            re.compile(pattern)
        except re.error as exc:
            raise ValueError(f"expected a regular expression, got {pattern!r}: {exc}") from exc
    return values


ByPattern = Annotated[dict[str, T], AfterValidator(_check_patterns)]
"""Values by regular expressions."""
