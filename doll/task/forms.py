"""What the arrays of a sample must be: their types and shapes, declared by `Task.spec` or taken from the first samples.

Here values become arrays that torch takes, and a value that does not fit is refused by the name of its field.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from doll.errors import ConfigError, SampleError
from doll.task import trees
from doll.task.trees import Array, Structure, Tree

NUMERIC_KINDS: Final = "biufc"  # numpy's kinds: boolean, integer, unsigned, floating, complex
_MAX_SHOWN: Final = 200
NO_GROUP: Final = -1  # id of samples without a group, where others of their batch have one


@dataclass(frozen=True)
class Field:
    """One array of a sample, in `Task.spec`.

    Attributes:
        dtype: of numpy, such as `float32`, `int64` or `bool`. `float64` in x stands for float32, as everywhere in x.
            Integers, and floats that are whole numbers, are converted where that keeps their value.
        shape: of one sample; None in it: of any length, for a task that defines `collate`.
    """

    dtype: str = "float32"
    shape: tuple[int | None, ...] = ()

    def __str__(self) -> str:
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape)
        return f"{self.dtype} of shape ({sizes}{',' if len(self.shape) == 1 else ''})"


class Form:
    """The structure of a sample's x or y, and a `Field` for each array in it."""

    def __init__(self, root: str, structure: Structure | None, fields: Sequence[Field]) -> None:
        """`root`: "x" or "y"."""
        self.root = root
        self.structure = structure
        self.fields = list(fields)
        self.names = trees.names(root, structure)

    @classmethod
    def declared(cls, root: str, tree: Tree) -> Form:
        """As `Task.spec` says.

        Raises:
            ConfigError: there is something else than fields in it, or a type that is no number's.
        """
        leaves, structure = trees.flat(tree)
        if not leaves or not all(isinstance(leaf, Field) for leaf in leaves):
            raise ConfigError(f"Task.spec(): expected doll.Field for each array of {root}, got {tree!r:.200}")
        fields = []
        for name, field in zip(trees.names(root, structure), leaves, strict=True):
            try:
                dtype = np.dtype(field.dtype)
            except TypeError as exc:
                raise ConfigError(f"Task.spec(): {name}: expected a type of numpy, got {field.dtype!r}") from exc
            if dtype.kind not in NUMERIC_KINDS:
                raise ConfigError(f"Task.spec(): {name}: expected a type of numbers or bool, got {field.dtype!r}")
            if root == "x" and dtype == np.float64:
                dtype = np.dtype(np.float32)
            fields.append(Field(dtype.name, tuple(field.shape)))
        return cls(root, structure, fields)

    @classmethod
    def seen(
        cls, root: str, structure: Structure | None, samples: Sequence[Sequence[Array]], *, of_any_length: bool
    ) -> Form:
        """As the arrays of these samples are. `of_any_length`: others may differ in each size."""
        fields = []
        for arrays in zip(*samples, strict=True):
            dtype = np.result_type(*{array.dtype for array in arrays})
            dtype = np.dtype(np.float32) if root == "x" and dtype == np.float64 else dtype  # integers and floats
            shape = arrays[0].shape
            fields.append(Field(dtype.name, (None,) * len(shape) if of_any_length else shape))
        return cls(root, structure, fields)

    def taken_apart(self, value: Tree) -> list[Any]:
        """What a sample has for each field; a list of numbers may be an array.

        Raises:
            SampleError: it has another structure.
        """
        if self.structure is None:
            return [value]
        try:
            return self.structure.flatten_up_to(value)
        except (TypeError, ValueError) as exc:
            raise SampleError(f"{self.root}: expected {self.described()}, got another structure: {exc}") from None

    def described(self) -> str:
        """The names of its arrays, for messages."""
        return ", ".join(self.names)

    def fitted(self, leaves: Sequence[Array], lead: int = 0) -> list[Array]:
        """The arrays, each of its field's type.

        Args:
            lead: dimensions in front of a sample's own: 1 for arrays of many samples.

        Raises:
            SampleError: one has another shape, or values that its field's type cannot have.
        """
        return [_fitted(*item, lead) for item in zip(leaves, self.fields, self.names, strict=True)]


def _fitted(array: Array, field: Field, name: str, lead: int) -> Array:
    shape, dtype = array.shape[lead:], np.dtype(field.dtype)
    fits = len(shape) == len(field.shape) and all(
        wanted is None or size == wanted for size, wanted in zip(shape, field.shape, strict=True)
    )
    if fits and array.dtype == dtype:
        return array
    if fits and _is_safe(array, dtype):
        return array.astype(dtype)
    got = "mixed or ragged values" if array.dtype == object else f"{array.dtype} of shape {shape}"
    raise SampleError(f"{name}: expected {field}, got {got}")


def _is_safe(array: Array, dtype: np.dtype[Any]) -> bool:
    """Whether `array` may become `dtype`: of floats and integers, where integers keep their value."""
    kinds = array.dtype.kind + dtype.kind
    if kinds[0] not in "iuf" or kinds[1] not in "iufc":
        return kinds[0] == "b" and kinds[1] in "iuf"
    if kinds[1] in "fc":
        return True
    if kinds[0] == "f" and not bool((np.isfinite(array) & (np.floor(array) == array)).all()):
        return False
    limits = np.iinfo(dtype)
    return array.size == 0 or bool(array.min() >= limits.min and array.max() <= limits.max)


# --- values to arrays -------------------------------------------------------------------------------------------------


def as_features(x: npt.ArrayLike) -> Array:
    """`x`, one array, as torch takes it: integers stay as they are, all other real numbers become float32."""
    array = np.asarray(x)
    if array.dtype.kind in "fb" and array.dtype != np.float32:
        with np.errstate(over="ignore"):  # it becomes infinite and is refused
            return array.astype(np.float32)
    return _for_torch(array)


def as_feature(x: npt.ArrayLike) -> Array:
    """One of several arrays of `x`: its type stays, but float64 becomes float32."""
    array = np.asarray(x)
    if array.dtype in (np.float64, np.longdouble):
        return as_features(array)
    return _for_torch(array)


def as_target(y: npt.ArrayLike) -> Array:
    """`y`, or one of its arrays, as torch takes it; its type stays."""
    array = np.asarray(y)
    return array.astype(np.float64) if array.dtype == np.longdouble else _for_torch(array)


def weight_of(weight: Any) -> float:
    """The weight of a sample.

    Raises:
        SampleError: it is no finite number of 0 or more.
    """
    try:
        number = float(weight)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise SampleError(f"weight: expected a finite number of 0 or more, got {weight!r}"[:_MAX_SHOWN])
    return number


def group_of(group: Any) -> int:
    """The id of a sample's group, an int64: the number itself, or a hash of the text, the same in every process.

    Raises:
        SampleError: it is neither.
    """
    if isinstance(group, str):
        return int.from_bytes(hashlib.blake2b(group.encode(), digest_size=8).digest(), "little", signed=True)
    if isinstance(group, int | np.integer) and not isinstance(group, bool) and -(1 << 63) <= group < 1 << 63:
        return int(group)
    raise SampleError(f"group: expected an integer of 64 bits or a text, got {group!r}"[:_MAX_SHOWN])


def _for_torch(array: Array) -> Array:
    if array.dtype == np.uint64:
        if array.size and array.max() > np.iinfo(np.int64).max:
            raise SampleError(f"expected integers below 2**63, got {array.max()}")
        return array.astype(np.int64)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
