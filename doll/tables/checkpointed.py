"""The arrays of a table in a checkpoint: their names, and how the parts of all shards make the whole table. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from doll.tables.row_slices import RowSlice, row_slices

Tensors: TypeAlias = Mapping[str, npt.NDArray[Any]]
# Function from a shape and a dtype to zeros.
Make: TypeAlias = Callable[[tuple[int, ...], "np.dtype[Any]"], npt.NDArray[Any]]

VALUES: Final = "values"
TOUCHED: Final = "touched"  # the row of each slot of the optimizer's state
NUMBERS: Final = "numbers"  # version of the last change, and number of steps


def tensor_name(table: str, part: str) -> str:
    return f"table.{table}.{part}"


def joined_table(parts: Sequence[Tensors], table: str, make: Make) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a table that has a row for each id, from the parts of all shards, in their order. Slots are
    those of the first shard, then those of the second one, and so on. Raises KeyError or ValueError if the parts do not
    fit together."""
    slices = row_slices(len(parts))
    values = [part[tensor_name(table, VALUES)] for part in parts]
    whole = make((sum(map(len, values)), *values[0].shape[1:]), values[0].dtype)
    for at, rows in zip(slices, values, strict=True):
        whole[at.shard :: at.shards] = rows
    touched = [at.ids(part[tensor_name(table, TOUCHED)]) for at, part in zip(slices, parts, strict=True)]
    state = {name: np.concatenate([part[name] for part in parts]) for name in _names_of_state(parts[0], table)}
    numbers = tensor_name(table, NUMBERS)
    if any((part[numbers] != parts[0][numbers]).any() for part in parts):
        raise ValueError(f"{numbers}: expected equal numbers in all parts")
    return {
        tensor_name(table, VALUES): whole, tensor_name(table, TOUCHED): np.concatenate(touched),
        numbers: parts[0][numbers], **state,
    }  # fmt: skip


def part_of_tables(tensors: Tensors, tables: Iterable[str], part: RowSlice) -> dict[str, npt.NDArray[Any]]:
    """Return a shard's part of the arrays of these tables in a checkpoint. Raises KeyError if one is missing."""
    parts: dict[str, npt.NDArray[Any]] = {}
    for table in tables:
        touched = tensors[tensor_name(table, TOUCHED)]
        is_here = part.has(touched)
        parts[tensor_name(table, VALUES)] = part.values(tensors[tensor_name(table, VALUES)])
        parts[tensor_name(table, TOUCHED)] = part.numbers(touched)
        parts[tensor_name(table, NUMBERS)] = tensors[tensor_name(table, NUMBERS)]
        parts.update((name, tensors[name][is_here]) for name in _names_of_state(tensors, table))
    return parts


def by_row(tensors: Tensors) -> dict[str, npt.NDArray[Any]]:
    """Return all tensors of a checkpoint with the slots of tables in the order of their rows. The number of shards does
    not change this order."""
    ordered = dict(tensors)
    for name, touched in tensors.items():
        if name.startswith("table.") and name.endswith(f".{TOUCHED}"):
            table, order = name[len("table.") : -len(f".{TOUCHED}")], np.argsort(touched)
            for part in (name, *_names_of_state(tensors, table)):
                ordered[part] = tensors[part][order]
    return ordered


def _names_of_state(tensors: Tensors, table: str) -> list[str]:
    prefix = tensor_name(table, "state.")
    return [name for name in tensors if name.startswith(prefix)]
