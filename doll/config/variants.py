"""Sections whose class a key selects: `policy.name`, `optimizer.name`, `source.kind`, `fleet.kind`."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from doll.config.section import Section


class Variants:
    """A set of section classes for the annotation of a field. The value of a key selects one of the classes.

    Use it as `Annotated[Base, variants]`. A value of the field is an instance of one of the classes, or a mapping that
    one of them accepts. Each class has the key as a field of type `Literal["its value"]`.

    A discriminator of pydantic is not suitable: it has no default value, it needs classes that validate all their
    fields at once (`Section` does not), and it would import policies that the job does not use.
    """

    def __init__(
        self, key: str, *classes: type[Section], default: str | None = None, gone: Mapping[str, str] | None = None
    ) -> None:
        """
        Args:
            key: the key that names the class.
            default: value of the key if the job file omits it. None: the key is required.
            gone: values that only earlier releases accepted, and the advice for each of these values.

        Raises:
            ValueError: two classes have the same value, or a class has an abstract method.
        """
        self.key = key
        self.default = default
        self._gone = gone or {}
        self._classes: dict[str, type[Section]] = {}
        for cls in classes:
            (value,) = typing.get_args(cls.model_fields[key].annotation)
            if inspect.isabstract(cls):
                raise ValueError(f"{cls.__name__}: expected {', '.join(cls.__abstractmethods__)} to be defined")
            if (taken := self._classes.setdefault(value, cls)) is not cls:
                raise ValueError(f"{cls.__name__}: {key} {value!r} is taken by {taken.__name__}")

    @property
    def classes(self) -> dict[str, type[Section]]:
        """The classes, by the value of their key."""
        return self._classes

    def validate(self, value: Any) -> Section:
        """Return the section for `value`. Raise PydanticCustomError if `value` names none of the classes, and
        ValidationError if its class refuses it."""
        if isinstance(value, Section) and isinstance(value, tuple(self.classes.values())):
            return value
        name = value.get(self.key, self.default) if isinstance(value, dict) else None
        cls = self.classes.get(name) if isinstance(name, str) else None
        if cls is None and isinstance(name, str) and name in self._gone:
            raise PydanticCustomError("gone_variant", "{advice}", {"advice": self._gone[name]})
        if cls is None:
            raise self.unknown(self.classes)
        return cls.model_validate(value)

    def unknown(self, names: Iterable[str]) -> PydanticCustomError:
        """Return the error for a value that names none of `names`."""
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
    """Return the section classes that the value of a field may have; empty for a plain value."""
    return list(_sections_in((field.annotation, *field.metadata)))


def _sections_in(parts: Iterable[Any]) -> Iterator[type[BaseModel]]:
    """Yield the section classes in the parts of an annotation. If there is a `Variants` among them, yield only its
    classes."""
    parts = tuple(parts)
    if variants := [part for part in parts if isinstance(part, Variants)]:
        yield from variants[0].classes.values()
        return
    for part in parts:
        if isinstance(part, type) and issubclass(part, BaseModel):
            yield part
        else:
            yield from _sections_in(typing.get_args(part))
