"""Generates docs/configuration.md from the models of the job file: `python deploy/config_reference.py FILE`."""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from doll.config.job import JobConfig
from doll.config.section import BY_SUFFIX, OTHER, WHOLE, Section
from doll.config.variants import sections_of
from pydantic import AwareDatetime, BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

_HEAD = """\
# The job file

One YAML file describes a whole job. `doll config check JOB.yaml` checks it, `doll config show JOB.yaml` prints it with
all defaults. `--set key.sub=value` overrides a key on every command. Relative paths are relative to the job file.

Secrets are not allowed in the file. They come from the environment ([security.md](security.md#connections) has the
variables). Addresses may come from there, too: `DOLL_KAFKA`, `DOLL_REDIS`.

Each number has limits. Where the table of a key names no limits, the limits of the key's unit hold. The unit is the end
of the key's name (0 has no unit):

{limits}

This page is generated from `doll/config/` by `python deploy/config_reference.py docs/configuration.md`.
"""


def markdown() -> str:
    """The whole page."""
    limits = "\n".join(
        [
            *(f"- `{suffix}`: {it.least:g} to {it.most:g}{it.unit}" for suffix, it in BY_SUFFIX.items()),
            f"- other whole numbers: at most {WHOLE.most:g}; other numbers: at most {OTHER.most:g}",
        ]
    )
    parts = [_HEAD.replace("{limits}", limits), "\n## Top level\n\n" + _table(JobConfig, skip=("base_folder",))]
    for name, field in JobConfig.model_fields.items():
        models = sections_of(field)
        for model in models:
            parts.extend(_section(name, model, variants=len(models) > 1))
    return "".join(parts)


def _section(path: str, model: type[BaseModel], *, variants: bool) -> Iterator[str]:
    title = f"`{path}`" + (f": {_variant(model)}" if variants else "")
    summary = (model.__doc__ or "").strip()
    yield f"\n## {title}\n\n" + (f"{summary}\n\n" if summary else "") + _table(model)
    for name, field in model.model_fields.items():
        inner = sections_of(field)
        for model_type in inner:
            yield from _section(f"{path}.{field.alias or name}", model_type, variants=len(inner) > 1)


def _variant(model: type[BaseModel]) -> str:
    for name in ("kind", "name"):
        if name in model.model_fields:
            (value,) = typing.get_args(model.model_fields[name].annotation)
            return f"`{name}: {value}`"
    return model.__name__


def _table(model: type[BaseModel], skip: tuple[str, ...] = ()) -> str:
    rows = ["| key | type | default | meaning |\n", "|---|---|---|---|\n"]
    meanings = _meanings(model)
    for name, field in model.model_fields.items():
        if name not in skip:
            meaning = meanings.get(name, field.description or "")
            cells = (f"`{field.alias or name}`", _type(field), _default(field), meaning)
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(rows)


def _meanings(model: type[BaseModel]) -> dict[str, str]:
    """The strings under the keys of a section's class.

    pydantic's `use_attribute_docstrings` would read them at the start of every process, which takes 0.13 s.
    """
    meanings = {}
    for cls in (cls for cls in reversed(model.__mro__) if issubclass(cls, Section)):
        (tree,) = ast.parse(inspect.getsource(cls)).body
        for key, text in itertools.pairwise(tree.body if isinstance(tree, ast.ClassDef) else ()):
            match key, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                    meanings[name] = " ".join(meaning.split())
    return meanings


def _type(field: FieldInfo) -> str:
    has_words = any(typing.get_origin(part) is typing.Literal for part in typing.get_args(field.annotation))
    text = "section" if sections_of(field) and not has_words else _annotation(field.annotation)
    bounds = []
    for rule in field.metadata:
        for attribute, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
            if (limit := getattr(rule, attribute, None)) is not None:
                bounds.append(f"{sign} {limit:g}")
    return f"{text} {', '.join(bounds)}".strip()


def _annotation(annotation: Any) -> str:
    if annotation is type(None):
        return "null"
    if typing.get_origin(annotation) is typing.Annotated:
        base, *rules = typing.get_args(annotation)
        positive = any(getattr(rule, "gt", None) == 0 for rule in rules)
        return _annotation(base) + (" > 0" if positive else "")
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(f"`{value}`" for value in typing.get_args(annotation))
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        args = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
        return " or ".join(_annotation(arg) for arg in args)
    if typing.get_origin(annotation) is list:
        return "list of " + _annotation(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is dict:
        return "keys and values"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    names = {
        AwareDatetime: "time",
        str: "text",
        int: "whole number",
        float: "number",
        bool: "true or false",
        Path: "path",
    }
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined or isinstance(value, BaseModel) or value in (None, {}):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python deploy/config_reference.py docs/configuration.md")
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
