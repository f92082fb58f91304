"""The implementation of `training.init_from`, which loads tensors of a file or another model into a new model.

Trainable parameters, buffers and tables are matched by their names and shapes. If a table has another number of rows,
the rows that both tables have are loaded. From a bounded table, the ids that have rows are loaded, with their counts.
Frozen parameters are not loaded: each process makes its own in `build_model`, and all processes must have the same
values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import torch

from doll.errors import ConfigError
from doll.model.flat_model import FlatModel
from doll.tables.bounded_embedding import PARTS
from doll.tables.bounds import FirstRows, TableBounds, part_name
from doll.tables.rows import TableShape

_WRAPPER: Final = re.compile(
    r"^(?:_orig_mod\.|module\.)+|(?<=\.)_orig_mod\."
)  # prefixes of torch.compile, and of DataParallel and DDP
_NAMED: Final = 6  # maximum number of tensors in a message; the report contains all


@dataclass(frozen=True, kw_only=True)
class InitReport:
    """The report on which parts of a source were loaded into a model, and which were not.

    Attributes:
        source: origin of the tensors, and their sha256, as a checkpoint stores it.
        taken: names of the model's tensors that were loaded.
        num_values: number of values in these tensors.
        missing: tensors of the model that the source does not have.
        unknown: tensors of the source that the model does not have.
        other_shape: tensors with different shapes in source and model, with both shapes.
        rows: description of the loaded rows, for each table of which not all rows were loaded.
        frozen: frozen parameters of the model that have other values in the source.
        wrappers: prefixes of DDP and torch.compile that were removed from names of the source.
    """

    source: str
    taken: tuple[str, ...]
    num_values: int
    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    other_shape: tuple[str, ...]
    rows: tuple[str, ...]
    frozen: tuple[str, ...]
    wrappers: tuple[str, ...] = ()

    @property
    def differences(self) -> list[str]:
        lines = (
            ("not in the source, as the task draws them", self.missing),
            ("not in the model", self.unknown),
            ("of another shape", self.other_shape),
            ("tables", self.rows),
        )
        return [f"{what}: {_named(names)}" for what, names in lines if names]

    def text(self) -> str:
        """Return the report as a few lines for people."""
        lines = [f"begins with {self.source}: {len(self.taken)} tensors taken, {self.num_values} numbers"]
        if self.wrappers:
            lines.append(f"names of the source without {' and '.join(self.wrappers)}")
        lines += self.differences
        if self.frozen:
            lines.append(f"frozen, so as build_model() makes them, not as in the source: {_named(self.frozen)}")
        return "\n  ".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class WeightMatch:
    """The tensors of a source that fit a model, by the model's names: parameters and buffers, rows of tables, and first
    rows of bounded tables."""

    report: InitReport
    tensors: Mapping[str, torch.Tensor]
    tables: Mapping[str, torch.Tensor]
    bounded: Mapping[str, FirstRows]

    def load_into(self, model: FlatModel) -> None:
        """Load the tensors into a model that has not learned yet and has its first rows (`flat_model.build`)."""
        own = dict(model.module.named_parameters()) | dict(model.module.named_buffers())
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                own[name].copy_(tensor)
        for name, rows in self.tables.items():
            if model.tables is not None:
                model.tables.initial_rows(name)[: len(rows)] = rows.numpy()
        if model.tables is not None:
            model.tables.first_rows = dict(self.bounded)


def match(
    model: FlatModel, given: Mapping[str, torch.Tensor], *, source: str, strict: bool, rename: Mapping[str, str]
) -> WeightMatch:
    """Return the part of `given` that fits `model`. Nothing is changed.

    Args:
        strict: True: everything must fit.
        rename: regular expressions and their replacements in the names of `given`, applied in this order.

    Raises:
        ConfigError: nothing fits; or `strict` is set and not everything fits; or an expression of `rename` matches no
            name; or a number is not finite.
    """
    own = dict(model.module.named_parameters()) | dict(model.module.named_buffers())
    frozen = {name for name, parameter in model.module.named_parameters() if not parameter.requires_grad}
    bounds = {} if model.tables is None else model.tables.bounds
    all_shapes = {} if model.tables is None else model.tables.shapes
    table_shapes = {name: shape for name, shape in all_shapes.items() if name not in bounds}
    aliases = _aliases(model)
    paths = {} if model.tables is None else model.tables.names
    parts = {part_name(path, part) for table in bounds for path in paths[table] for part in (*PARTS, "counts")}
    given, wrappers = _unwrapped(_renamed(given, rename), own.keys() | aliases.keys() | all_shapes.keys() | parts)
    tensors: dict[str, torch.Tensor] = {}
    tables: dict[str, torch.Tensor] = {}
    bounded: dict[str, FirstRows] = {}
    unknown, other_shape, rows, unlike = [], [], [], []
    for name, limits in bounds.items():
        ids, values, counts = (given.pop(part_name(name, part), None) for part in ("ids", "rows", "counts"))
        # The source's key is for the initial rows of another job. A layer that shares the table has the same key.
        for other in paths[name]:
            given = {key: tensor for key, tensor in given.items() if key not in {part_name(other, p) for p in PARTS}}
        if ids is None or values is None:
            continue
        width = all_shapes[name].width
        if values.dim() != 2 or values.shape[1] != width:
            other_shape.append(_shapes(name, values, (ids.numel(), width)))
            continue
        try:
            bounded[name] = _first_rows(all_shapes[name], limits, ids, values, counts)
        except (ValueError, TypeError) as exc:
            raise ConfigError(f"training.init_from: {source}: bounded table {name!r}: {exc}") from exc
        if (num_rows := len(bounded[name].ids)) < ids.numel():
            rows.append(f"{name}: {num_rows} rows of {ids.numel()}, those of the ids that were named most often")
    for given_name, tensor in given.items():
        name = aliases.get(given_name, given_name)
        if name in table_shapes:
            num_rows, width = table_shapes[name]
            if tensor.dim() != 2 or tensor.shape[1] != width:
                other_shape.append(_shapes(name, tensor, (num_rows, width)))
                continue
            tables[name] = tensor[:num_rows].to(torch.float32)
            if len(tensor) != num_rows:
                rest = "the others as the task draws them" if len(tensor) < num_rows else "the source's others left out"
                rows.append(f"{name}: {len(tables[name])} rows of {len(tensor)}, {num_rows} in the model, {rest}")
        elif name in bounds:
            other_shape.append(f"{name}: {tuple(tensor.shape)} in the source, a bounded table in the model")
        elif name not in own:
            unknown.append(given_name)
        elif tensor.shape != own[name].shape:
            other_shape.append(_shapes(name, tensor, tuple(own[name].shape)))
        elif name in frozen:
            if not torch.equal(tensor.to(own[name].dtype), own[name]):
                unlike.append(name)
        else:
            tensors[name] = tensor.to(own[name].dtype)
    values_of_bounded = {name: torch.from_numpy(first.values) for name, first in bounded.items()}
    for name, tensor in [*tensors.items(), *tables.items(), *values_of_bounded.items()]:
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ConfigError(f"training.init_from: {source}: expected finite numbers, got others in {name}")
    seen = {*tensors, *tables, *bounded, *(item.partition(":")[0] for item in other_shape)}
    missing = [name for name in [*own, *all_shapes] if name not in seen | frozen]
    report = InitReport(
        source=source, taken=(*tensors, *tables, *bounded), missing=tuple(missing), unknown=tuple(unknown),
        num_values=sum(tensor.numel() for part in (tensors, tables, values_of_bounded) for tensor in part.values()),
        other_shape=tuple(other_shape), rows=tuple(rows), frozen=tuple(unlike), wrappers=wrappers,
    )  # fmt: skip
    trainable = {name for name, parameter in model.module.named_parameters() if parameter.requires_grad}
    if not tables and not bounded and not trainable & tensors.keys():
        shapes = f" (of another shape: {_named(other_shape)})" if other_shape else ""
        raise ConfigError(
            f"training.init_from: {source}: expected tensors with the names and shapes of the model's trainable "
            f"parameters ({_named(sorted(trainable | all_shapes.keys()))}), got {_named(sorted(given))}{shapes}: see "
            "init_from.rename; frozen parameters are loaded by build_model()"
        )
    if strict and report.differences:
        raise ConfigError(
            f"training.init_from: {source}: expected all tensors to match (init_from.strict), but "
            f"{'; '.join(report.differences)}"
        )
    return WeightMatch(report, tensors, tables, bounded)


def _first_rows(
    shape: TableShape, bounds: TableBounds, ids: torch.Tensor, values: torch.Tensor, counts: torch.Tensor | None
) -> FirstRows:
    """Return the first rows of a bounded table. If there are more ids than rows allowed, use the ids with the highest
    counts. Raises ValueError if `ids` are not ids of the table with one row each."""
    numbers = ids.reshape(-1).numpy()
    order = np.argsort(numbers, kind="stable")
    if problem := shape.problem(numbers[order]):
        raise ValueError(problem)
    # A file of `doll export` has no counts. Its ids were admitted, so each has at least `min_count`.
    named = torch.full_like(ids, bounds.min_count) if counts is None else counts.to(torch.int64)
    if not len(numbers) == len(values) == named.numel():
        raise ValueError(f"expected a row and a count for each of {len(numbers)} ids, got {len(values)} rows")
    often = named.reshape(-1).numpy()
    if len(order) > bounds.max_rows:
        most = np.argsort(-often[order], kind="stable")[: bounds.max_rows]
        order = order[np.sort(most)]
    return FirstRows(numbers[order], values.to(torch.float32).numpy()[order], often[order])


def _renamed(given: Mapping[str, torch.Tensor], rename: Mapping[str, str]) -> dict[str, torch.Tensor]:
    names = {name: name for name in given}
    for pattern, replacement in rename.items():
        if not any(re.search(pattern, name) for name in names.values()):
            raise ConfigError(
                f"training.init_from.rename: expected expressions that are found in names of the source "
                f"({_named(sorted(names.values()))}), got {pattern!r}"
            )
        try:
            names = {name: re.sub(pattern, replacement, new) for name, new in names.items()}
        except (re.error, IndexError) as exc:
            raise ConfigError(f"training.init_from.rename: {pattern!r} by {replacement!r}: {exc}") from exc
    renamed: dict[str, torch.Tensor] = {}
    for name, new in names.items():
        if new in renamed:
            raise ConfigError(f"training.init_from.rename: expected names of their own, got {new} for several tensors")
        renamed[new] = given[name]
    return renamed


def _unwrapped(given: Mapping[str, torch.Tensor], known: Set[str]) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """Return the tensors by the model's names, without prefixes of wrappers, and the prefixes that were removed."""
    prefixes: set[str] = set()
    names: dict[str, str] = {}
    for name in given:
        inner = _WRAPPER.sub("", name)
        if name not in known and inner in known and inner not in {*given, *names.values()}:
            prefixes.update(_WRAPPER.findall(name))
            names[name] = inner
    return {names.get(name, name): tensor for name, tensor in given.items()}, tuple(sorted(prefixes))


def _aliases(model: FlatModel) -> dict[str, str]:
    """Return further names of shared parameters and of tables, as they occur in a `state_dict()`."""
    first = {id(parameter): name for name, parameter in model.module.named_parameters()}
    names = {name: first[id(item)] for name, item in model.module.named_parameters(remove_duplicate=False)}
    for table, paths in ({} if model.tables is None else model.tables.names).items():
        names |= dict.fromkeys(paths, table)
    return names


def _shapes(name: str, tensor: torch.Tensor, own: tuple[int, ...]) -> str:
    return f"{name}: {tuple(tensor.shape)} in the source, {own} in the model"


def _named(names: tuple[str, ...] | list[str]) -> str:
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
