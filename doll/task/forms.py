"""The form of a sample's arrays: their types and shapes, declared by `Task.spec` or taken from the first samples.

This module converts values to arrays that torch accepts, and refuses a value that does not fit; the error names its
field.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from doll.errors import ConfigError, SampleError
from doll.task import trees
from doll.task.trees import Array, Structure, Tree

NUMERIC_KINDS: Final = "biufc"  # numpy's kinds: boolean, integer, unsigned, floating, complex
_MAX_SHOWN: Final = 200
_EXACT_IN_FLOAT32: Final = 1 << 24  # float32 holds every integer up to this one
NO_GROUP: Final = -(1 << 63)  # id of samples without a group, if others of their batch have one


@dataclass(frozen=True)
class Field:
    """One array of a sample, in `Task.spec`.

    Attributes:
        dtype: numpy type, such as `float32`, `int64` or `bool`. In x, `float64` means float32, because x never is
            float64. Values are checked before they are converted. A conversion to an integer type must not change the
            value. So an integer must be within the range of the type, and a float must be a whole number below 2**53
            (float32: below 2**24), because a larger float may stand for another integer. `uint64` has all 64 bits of an
            id, but torch supports few operations on it. `x["id"].view(torch.int64)` has the same bits.
        shape: shape of one sample. None as a size: any length, for a task that defines `collate`.
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
        """Return the form that `Task.spec` declares.

        Raises:
            ConfigError: the tree has a leaf that is not a `Field`, or a type that is not a type of numbers.
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
        """Return the form of the arrays of these samples. `of_any_length`: each size may differ in other samples."""
        fields = []
        for arrays in zip(*samples, strict=True):
            dtype = np.result_type(*{array.dtype for array in arrays})
            dtype = np.dtype(np.float32) if root == "x" and dtype == np.float64 else dtype  # integers and floats
            shape = arrays[0].shape
            fields.append(Field(dtype.name, (None,) * len(shape) if of_any_length else shape))
        return cls(root, structure, fields)

    def taken_apart(self, value: Tree) -> list[Any]:
        """Return the values of a sample for each field. A list of numbers counts as the value of one array.

        Raises:
            SampleError: the sample has another structure.
        """
        if self.structure is None:
            return [value]
        try:
            return self.structure.flatten_up_to(value)
        except (TypeError, ValueError) as exc:
            raise SampleError(f"{self.root}: expected {self.described()}, got another structure: {exc}") from None

    def described(self) -> str:
        """Return the names of the arrays, for messages."""
        return ", ".join(self.names)

    def fitted(self, leaves: Sequence[Array], lead: int = 0) -> list[Array]:
        """Return the arrays, each converted to its field's type.

        Args:
            lead: number of dimensions before those of one sample: 1 for arrays of many samples.

        Raises:
            SampleError: an array has another shape, or values that its field's type cannot hold.
        """
        return [_fitted(*item, lead) for item in zip(leaves, self.fields, self.names, strict=True)]


def _fitted(array: Array, field: Field, name: str, lead: int) -> Array:
    shape, dtype = array.shape[lead:], np.dtype(field.dtype)
    fits = len(shape) == len(field.shape) and all(
        wanted is None or size == wanted for size, wanted in zip(shape, field.shape, strict=True)
    )
    if fits and array.dtype == dtype:
        return array if array.dtype.num == dtype.num else array.view(dtype)  # torch does not take `ulonglong`
    problem = ""
    if fits and not (problem := _misfit(array, dtype)):
        with np.errstate(over="ignore"):  # a number that is too large becomes infinite, and is refused
            return array.astype(dtype)
    if array.dtype == object:
        problem = "mixed or ragged values"
    raise SampleError(f"{name}: expected {field}, got {problem or f'{array.dtype} of shape {shape}'}")


def _misfit(array: Array, dtype: np.dtype[Any]) -> str:
    """Return why `array` must not be converted to `dtype`; "" if it may be. Conversions between floats and integers are
    allowed if no integer changes its value."""
    kinds = array.dtype.kind + dtype.kind
    if kinds[0] not in "iuf" or kinds[1] not in "iufc":
        return "" if kinds[0] == "b" and kinds[1] in "iuf" else f"{array.dtype} of shape {array.shape}"
    if kinds[1] in "fc" or not array.size:
        return ""
    if kinds[0] == "f":
        if not (whole := np.isfinite(array) & (np.floor(array) == array)).all():
            return f"{array[~whole].flat[0]!s} ({array.dtype})"
        # From here on, two different whole numbers may have become the same float.
        exact = 1 << (np.finfo(array.dtype).nmant + 1)
        if not (known := np.abs(array) < exact).all():
            return f"{array[~known].flat[0]!s}, which as {array.dtype} may have been another number: send an integer"
    limits = np.iinfo(dtype)
    return next(
        (f"{bound!s}" for bound in (array.min(), array.max()) if not limits.min <= int(bound) <= limits.max), ""
    )


# --- values to arrays -------------------------------------------------------------------------------------------------


def array_of(value: npt.ArrayLike, name: str, rounded: Any = None) -> Array:
    """Convert `value` to an array in which integers keep their value.

    Args:
        name: name of the value in messages.
        rounded: type to which floats, and integers in a list with floats, are converted later. None: the type of the
            field.

    Raises:
        SampleError: the conversion would change an integer in a list, or an integer has more than 64 bits.
    """
    array = np.asarray(value)
    kind = array.dtype.kind
    if kind not in "fO" or not isinstance(value, list | tuple | int):
        return array
    if kind == "f" and not np.abs(array).max(initial=0) > _EXACT_IN_FLOAT32:
        return array
    items = np.array(value, np.object_).ravel().tolist()
    integers = [item for item in items if isinstance(item, int | np.integer) and not isinstance(item, bool)]
    is_signed = any(item < 0 for item in integers)
    beyond_64_bits = next((item for item in integers if not -(1 << 63) <= item < 1 << (63 if is_signed else 64)), None)
    if beyond_64_bits is not None:
        raise SampleError(f"{name}: expected integers of 64 bits, got {beyond_64_bits!s:.40}")
    if len(integers) == len(items) > 0:  # numpy converts integers that do not fit into int64 to floats
        return np.array(value, np.uint64)
    if kind == "f" and rounded is not None:
        with np.errstate(over="ignore"):
            lost = next((item for item in integers if float(np.float64(item).astype(rounded)) != item), None)
        if lost is not None:
            raise SampleError(
                f"{name}: expected numbers that {np.dtype(rounded)} holds, got the integer {lost} beside a fraction: "
                f"an id needs an array of its own (a dict of arrays); if {name} may be rounded, write {lost}.0"
            )
    return array


def as_features(x: npt.ArrayLike, name: str = "x") -> Array:
    """Convert an `x` of one array for torch. Integers stay unchanged; all other real numbers become float32."""
    array = array_of(x, name, np.float32)
    if array.dtype.kind in "fb" and array.dtype != np.float32:
        with np.errstate(over="ignore"):  # a number that is too large becomes infinite, and is refused
            return array.astype(np.float32)
    return _for_torch(array, name)


def as_feature(x: npt.ArrayLike, name: str = "x") -> Array:
    """Convert one of several arrays of `x` for torch. Its type stays, except that float64 becomes float32."""
    array = array_of(x, name, np.float32)
    if array.dtype in (np.float64, np.longdouble):
        return as_features(array, name)
    return _for_torch(array, name)


def as_target(y: npt.ArrayLike, name: str = "y") -> Array:
    """Convert `y`, or one of its arrays, for torch; its type stays."""
    array = array_of(y, name, np.float64)
    return array.astype(np.float64) if array.dtype == np.longdouble else _for_torch(array, name)


def stacked(arrays: Sequence[Array], name: str, rounded: Any) -> Array:
    """Stack the arrays of samples. `name`, `rounded`: as in `array_of`.

    Raises:
        SampleError: an array has floats, and the conversion would change an integer.
    """
    array = np.stack(arrays)
    if array.dtype.kind == "f":
        for item in arrays:
            if item.dtype.kind in "iu" and (lost := beyond(item, rounded)) is not None:
                raise SampleError(f"{name}: expected integers in all of these samples, or in none, got {lost}")
    return array


def beyond(integers: Array, rounded: Any) -> int | None:
    """Return the first of these integers that the float type `rounded` cannot hold exactly."""
    lost = integers[integers.astype(rounded).astype(np.longdouble) != integers.astype(np.longdouble)]
    return int(lost.flat[0]) if lost.size else None


def as_integers(array: Array) -> Array | None:
    """Convert floats to int64 if all are whole numbers that stand for exactly one integer; otherwise None."""
    return None if _misfit(array, np.dtype(np.int64)) else array.astype(np.int64)


def weight_of(weight: Any) -> float:
    """Return the weight of a sample.

    Raises:
        SampleError: `weight` is not a finite number of 0 or more.
    """
    try:
        number = float(weight)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise SampleError(f"weight: expected a finite number of 0 or more, got {weight!r}"[:_MAX_SHOWN])
    return number


def group_of(group: Any) -> int:
    """Return the id of a sample's group, an int64: the number, or a hash of the text that is equal in every process.

    Raises:
        SampleError: `group` is neither a valid number nor a text.
    """
    if isinstance(group, str):
        return int.from_bytes(hashlib.blake2b(group.encode(), digest_size=8).digest(), "little", signed=True)
    if isinstance(group, int | np.integer) and not isinstance(group, bool) and NO_GROUP < group < 1 << 63:
        return int(group)
    raise SampleError(f"group: expected an integer of 64 bits above -2**63, or a text, got {group!r}"[:_MAX_SHOWN])


def _for_torch(array: Array, name: str) -> Array:
    if array.dtype == np.uint64:
        if array.size and array.max() > np.iinfo(np.int64).max:
            raise SampleError(
                f"{name}: expected integers below 2**63, got {array.max()}: Task.spec() may declare all 64 bits, "
                'doll.Field("uint64")'
            )
        return array.astype(np.int64)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


# --- sequences of different lengths, for `Task.collate` --------------------------------------------------------------


class Padded(NamedTuple):
    """n sequences, padded to one length.

    Attributes:
        values: values of the sequences, shape (n, longest, ...).
        mask: booleans, shape (n, longest): True where `values` belongs to the sequence, False where it is padding.
    """

    values: npt.NDArray[Any]
    mask: npt.NDArray[np.bool_]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Lengths of the sequences, shape (n,)."""
        lengths: npt.NDArray[np.int64] = self.mask.sum(axis=1, dtype=np.int64)
        return lengths


def pad(sequences: Sequence[npt.ArrayLike], *, length: int | None = None, value: float = 0) -> Padded:
    """Combine sequences of different lengths into one padded array.

    Args:
        sequences: at least one sequence; the shapes (m, ...) may differ only in m.
        length: length of all padded sequences. None: the length of the longest sequence.
        value: value of the padding after the end of each sequence.

    Raises:
        ValueError: a sequence is longer than `length`, or has another shape.
    """
    arrays = [np.asarray(sequence) for sequence in sequences]
    if not arrays or any(array.ndim == 0 or array.shape[1:] != arrays[0].shape[1:] for array in arrays):
        shapes = sorted({array.shape for array in arrays}, key=str)
        raise ValueError(f"expected sequences of one or more dimensions that differ in the first, got {shapes[:8]}")
    lengths = np.array([len(array) for array in arrays])
    longest = int(lengths.max()) if length is None else length
    if lengths.max() > longest:
        raise ValueError(f"expected sequences of at most {longest}, got one of {lengths.max()}")
    mask = np.arange(longest) < lengths[:, None]
    values = np.full((len(arrays), longest, *arrays[0].shape[1:]), value, np.result_type(*arrays))
    values[mask] = np.concatenate(arrays)
    return Padded(values, mask)
