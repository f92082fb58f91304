"""The base of every section of the job file."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """A section of the job file: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`true`, which YAML also makes of `yes` and `on`, is not 1."""
        if isinstance(value, bool) and info.field_name is not None:
            kinds = _kinds(cls.model_fields[info.field_name].annotation)
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(f"expected a number, got {str(value).lower()} (YAML reads yes, no, on and off so too)")
        return value


def _kinds(annotation: Any) -> set[Any]:
    """The types that `annotation` is made of."""
    own = {annotation} if isinstance(annotation, type) else set()
    return own.union(*map(_kinds, get_args(annotation)))
