"""Trees of arrays: the form of a sample's `x` and `y`. A tree is an array, or a dict, tuple or list of trees.

The structure is that of optree (docs/decisions/0081): the keys of dicts are sorted, named tuples keep their class. A
batch has the same tree as its samples; each of its arrays contains the arrays of all samples. If the task combines
samples of different shapes itself (`Task.collate`), a batch is a `Ragged`: one tree for each sample.

For a single array, these functions do the same as the functions of numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import optree

from doll.errors import SampleError

Tree: TypeAlias = Any
Array: TypeAlias = npt.NDArray[Any]
Structure: TypeAlias = optree.PyTreeSpec
_NUMBERS: Final = frozenset((int, float, bool))
_MAX_DEPTH: Final = 32  # the maximum number of dimensions of a numpy array


class Ragged(list[Tree]):
    """The trees of a batch's samples, one for each sample; they may differ in shape."""


def is_container(value: Any) -> bool:
    """Return whether a tree of arrays is more than one array."""
    return isinstance(value, dict | tuple | list)


def are_numbers(items: Sequence[Any], depth: int = _MAX_DEPTH) -> bool:
    """Return whether an untrusted list has only numbers, or lists of numbers. numpy makes huge arrays of some texts."""
    if _NUMBERS.issuperset(map(type, items)):
        return True
    return depth > 1 and all(isinstance(item, list) and are_numbers(item, depth - 1) for item in items)


def is_tree(value: Any) -> bool:
    """Return whether `value` is more than a single array: a dict, or a tuple or list that contains a dict or an array.
    A list of numbers is a single array, and so is a list of such lists."""
    if isinstance(value, dict):
        return True
    if not isinstance(value, tuple | list):
        return False
    if _NUMBERS.issuperset(map(type, value)):
        return False
    return any(getattr(item, "ndim", 0) > 0 or is_tree(item) for item in value)


def parts_of(value: Tree) -> tuple[list[Any], Structure | None]:
    """Return the leaves of a sample's x or y, and the structure around them; None for the structure of one array."""
    if not is_tree(value):
        return [value], None
    return optree.tree_flatten(value, is_leaf=lambda item: not is_tree(item), none_is_leaf=True)


def flat(tree: Tree) -> tuple[list[Any], Structure | None]:
    """Return the arrays or tensors of a tree, and the structure around them; None for the structure of one array."""
    return optree.tree_flatten(tree, none_is_leaf=True) if is_container(tree) else ([tree], None)


def arrays_of(tree: Tree) -> list[Any]:
    """Return the arrays or tensors of a tree."""
    return flat(tree)[0]


def tree_of(structure: Structure | None, leaves: Sequence[Any]) -> Tree:
    """Return the tree of a structure and leaves; the inverse of `flat`."""
    return leaves[0] if structure is None else optree.tree_unflatten(structure, leaves)


def mapped(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Return the same tree with `function` applied to each array; for `Ragged`, to each array of each sample."""
    if isinstance(tree, Ragged):
        return Ragged(mapped(function, item) for item in tree)
    return optree.tree_map(function, tree, none_is_leaf=True) if is_container(tree) else function(tree)


def names(root: str, structure: Structure | None) -> list[str]:
    """Return the name of each leaf for messages: `x["user"]["age"]`."""
    if structure is None:
        return [root]
    return [root + "".join(map(_index, path)) for path in structure.paths()]


def dotted_names(root: str, structure: Structure | None) -> list[str]:
    """Return the name of each leaf for other programs: `user.age`, or `x.0` in a tuple."""
    if structure is None:
        return [root]
    paths = [path if path and isinstance(path[0], str) else (root, *path) for path in structure.paths()]
    return [".".join(map(str, path)) for path in paths]


def _index(key: Any) -> str:
    return f'["{key}"]' if isinstance(key, str) else f"[{key!r}]"


# --- structures in records --------------------------------------------------------------------------------------------


def plain_of(tree: Tree) -> Any:
    """Return a tree of numbers in a form for MessagePack and JSON: a dict stays a dict; a tuple or list becomes a list
    that begins with its kind. Named tuples become tuples.

    Raises:
        TypeError: a key of a dict is not a text.
    """
    if isinstance(tree, dict):
        if not all(isinstance(key, str) for key in tree):
            raise TypeError(f"expected texts as the keys of dicts, got {list(tree)!r:.100}")
        return {key: plain_of(item) for key, item in tree.items()}
    if isinstance(tree, tuple | list):
        return ["list" if isinstance(tree, list) else "tuple", *map(plain_of, tree)]
    return tree


def from_plain(plain: Any, leaves: Sequence[Any]) -> Tree:
    """Return the tree of a form that `plain_of` made; `leaves` replace its numbers, which are their indexes.

    Raises:
        SampleError: `plain` is not the form of a tree with this number of leaves.
    """
    match plain:
        case dict():
            return {key: from_plain(item, leaves) for key, item in plain.items()}
        case ["list", *items]:
            return [from_plain(item, leaves) for item in items]
        case ["tuple", *items]:
            return tuple(from_plain(item, leaves) for item in items)
        case int() if 0 <= plain < len(leaves):
            return leaves[plain]
    raise SampleError(f"expected a tree of {len(leaves)} arrays, got {plain!r:.100}")


def numbered(tree: Tree, begin: int = 0) -> tuple[list[Any], Any]:
    """Return the leaves of a tree, and its plain form, in which each leaf is replaced by its index plus `begin`."""
    leaves, structure = flat(tree)
    return leaves, plain_of(tree_of(structure, range(begin, begin + len(leaves))))


# --- batches ----------------------------------------------------------------------------------------------------------


def count(batch: Tree) -> int:
    """Return the number of samples in the trees of a batch."""
    return len(batch) if isinstance(batch, Ragged | np.ndarray) else len(arrays_of(batch)[0])


def taken(batch: Tree, places: Any) -> Tree:
    """Return some samples of a batch. `places`: their indexes, in any form that numpy accepts."""
    if isinstance(batch, Ragged):
        return Ragged(batch[at] for at in np.arange(len(batch))[places].tolist())
    return mapped(lambda array: array[places], batch)


def rows_of(batch: Tree) -> tuple[list[list[Array]], Structure | None]:
    """Return the arrays of each sample, and the structure around them, which is the same for all samples."""
    if isinstance(batch, Ragged):
        return [arrays_of(item) for item in batch], flat(batch[0])[1] if batch else None
    columns, structure = flat(batch)
    return [[np.asarray(value) for value in values] for values in zip(*columns, strict=True)], structure


def objects(values: Sequence[Any]) -> Array:
    """Return one array with an object for each value, also if numpy would convert the values to a larger array."""
    return np.fromiter(values, np.object_, len(values))


def taken_apart(batch: Tree, count: int) -> list[Tree]:
    """Return the tree of each sample; arrays may be arrays of objects."""
    columns, structure = flat(batch)
    return [tree_of(structure, [column[at] for column in columns]) for at in range(count)]


def joined(batches: Sequence[Tree]) -> Tree:
    """Join several batches of one structure, at least one."""
    first = batches[0]
    if isinstance(first, np.ndarray):
        return np.concatenate(batches)
    if isinstance(first, Ragged):
        return Ragged(item for batch in batches for item in batch)
    structure = flat(first)[1]
    columns = zip(*(arrays_of(batch) for batch in batches), strict=True)
    return tree_of(structure, [np.concatenate(column) for column in columns])


# --- targets, for the guard -------------------------------------------------------------------------------------------


def is_alone(batch: Tree) -> bool:
    """Return whether each sample is one array."""
    first = batch[0] if isinstance(batch, Ragged) and batch else batch
    return not is_container(first)


def rolled(batch: Tree) -> Tree:
    """Give each sample the values of the sample before it. If shapes differ, roll each array separately."""
    if not isinstance(batch, Ragged):
        return mapped(lambda array: np.roll(array, 1, axis=0), batch)
    shapes = {tuple(array.shape for array in arrays_of(item)) for item in batch}
    if len(shapes) == 1:
        return Ragged([*batch[-1:], *batch[:-1]])
    return mapped(lambda array: np.roll(array, 1, axis=0) if array.ndim else array, batch)


def largest(batch: Tree) -> float:
    """Return the largest absolute value of a number in the batch; 0 if there are no numbers."""
    items = batch if isinstance(batch, Ragged) else [batch]
    return max((float(np.abs(array).max(initial=0)) for item in items for array in arrays_of(item)), default=0.0)


def bytes_of(batch: Tree) -> bytes:
    """Return bytes that distinguish this batch from others of the same form."""
    items = batch if isinstance(batch, Ragged) else [batch]
    return b"".join(array.tobytes() for item in items for array in arrays_of(item))
