"""The base class of all sections of the job file. It limits each number by its unit, which is the suffix of the key's
name.

No run can use a number beyond these limits. Examples are a wait that system calls refuse or round to 0, a size that
exceeds any memory, and an integer that JSON and float64 cannot represent. Some keys define narrower bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from doll.redaction import holds_credentials


class Limits(NamedTuple):
    """The smallest and the largest absolute value of a number that is not 0."""

    least: float
    most: float
    unit: str


BY_SUFFIX: Final = {
    "_per_s": Limits(1e-6, 1e9, " per second"),
    "_per_min": Limits(1e-6, 1e9, " per minute"),
    "_ms": Limits(1, 2_000_000_000, " ms"),
    "latency_s": Limits(1e-9, 3600, " seconds"),  # latency of a link, for which no timer waits
    # System calls take waits in ms, as 32 bits: at most 24 days.
    "_s": Limits(0.001, 2_000_000, " seconds"),
    "_hours": Limits(0.01, 1_000_000, " hours"),
    "_bytes": Limits(1, 1e15, " bytes"),
    "_usd": Limits(1e-9, 1e12, " USD"),
    "_usd_per_h": Limits(1e-9, 1e9, " USD per hour"),
}
WHOLE: Final = Limits(1, 2**53, "")  # limits of integers in JSON and float64
OTHER: Final = Limits(0.0, 1e35, "")  # limits of a float32, with room for a factor
LONGEST_S: Final = 1e9  # the limit of a duration that is only compared with others: 31 years
_LARGEST: Final = 1e300  # largest number that a float's format accepts


class Section(BaseModel):
    """A section of the job file. It is immutable; an unknown key is an error. The string below a key describes the
    key."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, populate_by_name=True, hide_input_in_errors=True,
        allow_inf_nan=False, ser_json_inf_nan="constants",
    )  # fmt: skip

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true` as a number: YAML also reads `yes` and `on` as `true`."""
        if isinstance(value, bool) and info.field_name is not None:
            kinds = _kinds(cls.model_fields[info.field_name].annotation)
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(f"expected a number, got {str(value).lower()} (YAML reads yes, no, on and off so too)")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _no_credentials(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse URLs with credentials. A nested section checks its own fields, sometimes with a better message."""
        texts = value if isinstance(value, list) else [value]
        if isinstance(value, dict) and get_origin(cls.model_fields[info.field_name or ""].annotation) is dict:
            texts = list(value.values())
        if any(isinstance(text, str) and holds_credentials(text) for text in texts):  # the URL is not shown
            raise ValueError("expected a URL without user and password: no credentials in the job file")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _usable_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Check that a number is within the limits of its unit, unless the key has its own limits."""
        if info.field_name is not None:
            field = cls.model_fields[info.field_name]
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int | float) and not isinstance(number, bool):
                    _check_limits(info.field_name, field, number)
        return value


def short_form(key: str) -> BeforeValidator:
    """Return a validator for the annotation of a section, with which a text stands for a section with only this key."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


def _check_limits(name: str, field: FieldInfo, number: float) -> None:
    is_whole = isinstance(number, int) and float not in _kinds(field.annotation)
    of_unit = (limits for suffix, limits in BY_SUFFIX.items() if name.endswith(suffix))
    least, most, unit = next(of_unit, WHOLE if is_whole else OTHER)
    if any(bound > 0 for bound in _bounds_of(field, "le", "lt", "allow_inf_nan")):
        most = math.inf
    if any(bound > 0 for bound in _bounds_of(field, "ge", "gt")):
        least = 0.0
    if abs(number) > most:
        shown = f"{number:g}" if abs(number) < _LARGEST else "a larger one"  # the number may have thousands of digits
        raise ValueError(f"expected at most {most:g}{unit}, got {shown}")
    if 0 < abs(number) < least:
        raise ValueError(f"expected at least {least:g}{unit}, got {number:g}")


def _bounds_of(field: FieldInfo, *kinds: str) -> list[float]:
    """Return the bounds of these kinds (gt, ge, lt, le; `allow_inf_nan`: no bound) of a field or its numbers."""
    rules = [*field.metadata, *_rules(field.annotation)]
    bounds = [getattr(rule, kind, None) for rule in rules for kind in kinds]
    return [bound for bound in bounds if bound is not None]


def _rules(annotation: Any) -> Iterator[Any]:
    """Yield the rules of the numbers in `annotation`, such as the numbers of a list."""
    for rule in getattr(annotation, "__metadata__", ()):
        yield from getattr(rule, "metadata", (rule,))
    for inner in get_args(annotation):
        yield from _rules(inner)


def _kinds(annotation: Any) -> set[Any]:
    """Return the types that `annotation` consists of."""
    own = {annotation} if isinstance(annotation, type) else set()
    return own.union(*map(_kinds, get_args(annotation)))
