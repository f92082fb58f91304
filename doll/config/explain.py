"""Error texts of an invalid job file: the key, the expected value, the actual value."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from doll.config.variants import sections_of


def explain(error: ValidationError, root: type[BaseModel]) -> Iterator[str]:
    """One line per wrong key of a job file that `root` describes: the key, the expected value, the actual value."""
    for item in error.errors():
        loc = _location(item["loc"])
        key = ".".join(loc) or "job file"
        value = item.get("input")
        shown = _shown(value)
        match item["type"]:
            case "extra_forbidden":
                known = [name for name in _sibling_keys(root, loc) if name != loc[-1]]
                matches = difflib.get_close_matches(loc[-1], known, n=1)
                hint = f" (did you mean {matches[0]!r}?)" if matches else ""
                yield f"{key}: unknown key{hint}"
            case "missing":
                yield f"{key}: expected a value, got nothing: add this key"
            case "unknown_variant":
                variant = item["ctx"]
                given = value.get(variant["key"]) if isinstance(value, dict) else value
                yield f"{key}.{variant['key']}: expected one of {variant['expected']}, got {_shown(given)}"
            case "value_error":
                message = item["msg"].removeprefix("Value error, ")
                yield f"{key}: {message}" if loc else message
            case _:
                message = item["msg"][:1].lower() + item["msg"][1:]
                yield f"{key}: {message}, got {shown}"


def _shown(value: Any) -> str:
    """A value for a message, shortened."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return type(value).__name__
    return type(value).__name__ if isinstance(value, dict | list) and len(text) >= 60 else shortened(text)


def shortened(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}..."


_TYPE_NAME = re.compile(r"constrained-\w+|list\[.*\]")


def _location(loc: Sequence[str | int]) -> list[str]:
    """The key as the file has it, without the type names that pydantic adds."""
    return [str(part) for part in loc if not _TYPE_NAME.fullmatch(str(part))]


def _sibling_keys(root: type[BaseModel], loc: Sequence[str]) -> list[str]:
    """The keys that are known where the last part of `loc` stands."""
    models = [root]
    for part in loc[:-1]:
        inner = [
            section
            for model in models
            for name, field in model.model_fields.items()
            if part in (name, field.alias)
            for section in sections_of(field)
        ]
        models = inner or models
    return [field.alias or name for model in models for name, field in model.model_fields.items()]
