"""Sections that are told apart by one key: a new one is one class."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from doll.config.loader import explain
from doll.config.section import Section
from doll.config.variants import Variants, sections_of
from pydantic import BaseModel, Field, ValidationError


class Shape(Section):
    kind: str


class Circle(Shape):
    kind: Literal["circle"] = "circle"
    radius: float = 1.0


class Square(Shape):
    kind: Literal["square"]
    side: float


shapes = Variants("kind", Circle, Square, default="circle")


class Drawing(Section):
    shape: Annotated[Shape, shapes] = Field(default_factory=Circle)
    other: Annotated[Shape, shapes] | None = None


def errors(data: object) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        Drawing.model_validate(data)
    return list(explain(caught.value, Drawing))


def test_the_key_names_the_class() -> None:
    assert Drawing.model_validate({"shape": {"kind": "square", "side": 2}}).shape == Square(kind="square", side=2)
    assert Drawing.model_validate({"shape": {"radius": 2}}).shape == Circle(radius=2)
    assert Drawing.model_validate({"shape": Circle(radius=3)}).shape == Circle(radius=3)
    assert Drawing.model_validate({}).other is None


def test_all_keys_of_the_class_are_written() -> None:
    drawing = Drawing.model_validate({"shape": {"kind": "square", "side": 2}})
    assert drawing.model_dump(mode="json", exclude_none=True) == {"shape": {"kind": "square", "side": 2.0}}
    assert Drawing.model_validate(drawing.model_dump()) == drawing


def test_errors_name_the_key() -> None:
    assert errors({"shape": {"kind": "line"}}) == ["shape.kind: expected one of circle, square, got 'line'"]
    assert errors({"shape": "square"}) == ["shape.kind: expected one of circle, square, got 'square'"]
    assert errors({"shape": {"kind": ["square"]}}) == ["shape.kind: expected one of circle, square, got ['square']"]
    assert errors({"other": {"kind": "square"}}) == ["other.side: expected a value, got nothing: add this key"]
    assert errors({"shape": {"radus": 1}}) == ["shape.radus: unknown key (did you mean 'radius'?)"]


def test_the_classes_of_a_field() -> None:
    variants: list[type[BaseModel]] = [Circle, Square]
    assert sections_of(Drawing.model_fields["shape"]) == variants
    assert sections_of(Drawing.model_fields["other"]) == variants
    assert sections_of(Circle.model_fields["radius"]) == []


def test_a_value_of_the_key_has_one_class() -> None:
    class Disc(Shape):
        kind: Literal["circle"] = "circle"

    with pytest.raises(ValueError, match="'circle' is taken by Circle"):
        Variants("kind", Circle, Disc)
