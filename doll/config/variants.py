"""Sections of which the job file names one: `policy.name`, `optimizer.name`, `source.kind`, `fleet.kind`."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from doll.config.section import Section

S = TypeVar("S", bound=Section)


class Variants:
    """Section classes that are told apart by the value of one key, as an annotation of a field.

    Use it as `Annotated[Base, variants]`. A value of the field is an instance of one of the classes, or a mapping that
    one of them accepts. Each class has the key as a field of type `Literal["its value"]`.

    Args:
        key: the key that names the class.
        default: the value of the key where the job file does not give it; None: the key is required.
    """

    def __init__(self, key: str, *classes: type[Section], default: str | None = None) -> None:
        self.key = key
        self.default = default
        self._classes: dict[str, type[Section]] = {}
        for cls in classes:
            self.add(cls)

    def add(self, cls: type[S]) -> type[S]:
        """Register a class, also as a decorator.

        Raises:
            ValueError: the class has no such key, or its value is taken.
        """
        fields: dict[str, FieldInfo] = cls.model_fields
        field = fields.get(self.key)
        values = typing.get_args(field.annotation) if field is not None else ()
        if len(values) != 1:
            raise ValueError(f"{cls.__name__}: expected a field {self.key}: Literal[...] with one value")
        if self._classes.setdefault(values[0], cls) is not cls:
            raise ValueError(
                f"{cls.__name__}: {self.key} {values[0]!r} is taken by {self._classes[values[0]].__name__}"
            )
        return cls

    @property
    def classes(self) -> dict[str, type[Section]]:
        """The registered classes by the value of their key, in the order of registration."""
        return dict(self._classes)

    def validate(self, value: Any) -> Section:
        """The section that `value` stands for.

        Raises:
            PydanticCustomError: it names no registered class.
            ValidationError: its class refuses it.
        """
        classes = self.classes
        if isinstance(value, Section) and isinstance(value, tuple(classes.values())):
            return value
        name = value.get(self.key, self.default) if isinstance(value, dict) else None
        cls = classes.get(name) if isinstance(name, str) else None
        if cls is None:
            raise self.unknown(classes)
        return cls.model_validate(value)

    def unknown(self, names: Iterable[str]) -> PydanticCustomError:
        """The error for a value that names none of `names`."""
        context = {"key": self.key, "expected": ", ".join(names)}
        return PydanticCustomError("unknown_variant", "expected {key}: {expected}", context)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.validate,
            serialization=core_schema.wrap_serializer_function_ser_schema(
                lambda value, serialize: serialize(value), schema=core_schema.any_schema()
            ),
        )


def sections_of(field: FieldInfo) -> list[type[BaseModel]]:
    """The classes that a field of a section may hold; empty for a plain value."""
    variants = [part for part in field.metadata if isinstance(part, Variants)]
    parts: list[Any] = [*variants] or [field.annotation]
    return [cls for part in parts for cls in _sections_in(part)]


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, Variants):
        yield from annotation.classes.values()
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        args = typing.get_args(annotation)
        variants = [arg for arg in args if isinstance(arg, Variants)]
        for arg in variants or args:
            yield from _sections_in(arg)
