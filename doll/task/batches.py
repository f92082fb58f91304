"""Samples that are computed together: their x and y, their weights and their groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from doll.errors import ConfigError, SampleError
from doll.task import trees
from doll.task.base import Sample, Task
from doll.task.forms import NO_GROUP, Form, array_of, as_feature, as_features, as_target, group_of, stacked, weight_of
from doll.task.trees import Array, Ragged, Structure, Tree, parts_of, tree_of


class SampleBatch(NamedTuple):
    """The samples of a batch, or of a part of a batch.

    Attributes:
        x, y: trees (`doll.task.trees`) of arrays of shape (n, ...); `Ragged` if the task combines samples itself.
        weight: weight of each sample, float32, shape (n,). None: all are 1.
        group: group id of each sample, int64, shape (n,). None: no sample has a group.
    """

    x: Tree
    y: Tree
    weight: npt.NDArray[np.float32] | None = None
    group: npt.NDArray[np.int64] | None = None

    @property
    def num_samples(self) -> int:
        return trees.count(self.x)

    @property
    def total_weight(self) -> float:
        """Sum of the weights."""
        return float(self.num_samples) if self.weight is None else float(self.weight.sum(dtype=np.float64))

    def take(self, part: Sequence[int] | slice) -> SampleBatch:
        """Return the samples with these indexes."""
        places = part if isinstance(part, slice) else list(part)
        weight = None if self.weight is None else self.weight[places]
        group = None if self.group is None else self.group[places]
        return SampleBatch(trees.taken(self.x, places), trees.taken(self.y, places), weight, group)

    def few(self, most: int) -> SampleBatch:
        """Return at most `most` of the samples, evenly spaced."""
        return self.take(np.unique(np.linspace(0, self.num_samples - 1, most, dtype=int)).tolist())

    def rows(self, most: int | None = None) -> list[SampleRow]:
        """Return each sample as a row. `most`: only the first `most` samples."""
        samples = self if most is None else self.take(slice(most))
        (xs, x_structure), (ys, y_structure) = (trees.rows_of(tree) for tree in (samples.x, samples.y))
        count = samples.num_samples
        weights = [1.0] * count if samples.weight is None else samples.weight.tolist()
        groups = [NO_GROUP] * count if samples.group is None else samples.group.tolist()
        return [
            SampleRow(x, x_structure, y, y_structure, weight, group)
            for x, y, weight, group in zip(xs, ys, weights, groups, strict=True)
        ]

    def unweighted(self) -> SampleBatch:
        """Return the same samples, each with weight 1."""
        return self if self.weight is None else self._replace(weight=None)


class Forms(NamedTuple):
    """The forms that x and y of samples must have. None: any form."""

    x: Form | None = None
    y: Form | None = None
    is_ragged: bool = False  # samples may differ in shape, because the task combines them itself

    @classmethod
    def from_task(cls, task: Task) -> Forms:
        """Return the forms that the task declares.

        Raises:
            ConfigError: `Task.spec` returned a value that is not valid.
        """
        if (declared := task.spec()) is None:
            return cls(is_ragged=task.is_ragged)
        if not (isinstance(declared, tuple) and len(declared) == 2):
            raise ConfigError(f"Task.spec(): expected fields of x and of y, got {declared!r:.200}")
        x, y = declared
        form_of_x, form_of_y = (
            None if tree is None else Form.declared(root, tree) for root, tree in (("x", x), ("y", y))
        )
        return cls(form_of_x, form_of_y, task.is_ragged)


ANY_FORMS: Final = Forms()


class SampleRow(NamedTuple):
    """One sample: the arrays of its x and y, and the structures around them (`doll.task.trees.flat`)."""

    x: list[Array]
    x_structure: Structure | None
    y: list[Array]
    y_structure: Structure | None
    weight: float = 1.0
    group: int = NO_GROUP
    given_x: Sequence[Any] = ()  # the values that were converted to `x`, if no form declares their types; (): unknown

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Structures and shapes; all samples of one array have the same ones."""
        return (
            self.x_structure, tuple(array.shape for array in self.x),
            self.y_structure, tuple(array.shape for array in self.y),
        )  # fmt: skip

    @property
    def dimensions(self) -> tuple[Any, ...]:
        """Structures, and the number of dimensions of each array."""
        return (
            self.x_structure, tuple(array.ndim for array in self.x),
            self.y_structure, tuple(array.ndim for array in self.y),
        )  # fmt: skip

    @property
    def trees(self) -> tuple[Tree, Tree]:
        """x and y."""
        return tree_of(self.x_structure, self.x), tree_of(self.y_structure, self.y)


def row_of(sample: Sample | tuple[Any, Any], forms: Forms) -> SampleRow:
    """Return the arrays of a sample.

    Raises:
        SampleError: the sample does not fit its form, or its weight or group is not valid.
    """
    x, y, weight, group = sample if len(sample) == 4 else (*sample, 1.0, None)
    xs, x_structure, given_x = _arrays("x", x, forms.x, as_features)
    ys, y_structure, _ = _arrays("y", y, forms.y, as_target)
    if weight == 1 and group is None:
        return SampleRow(xs, x_structure, ys, y_structure, given_x=given_x)
    own = NO_GROUP if group is None else group_of(group)
    return SampleRow(xs, x_structure, ys, y_structure, weight_of(weight), own, given_x)


def _arrays(
    root: str, value: Any, form: Form | None, alone: Callable[[Any], Array]
) -> tuple[list[Array], Structure | None, Sequence[Any]]:
    """Return the arrays, the structure around them and, if there is no form, the values before their conversion.

    `alone`: function that converts `value`, if there is no form and the value is a single array.
    """
    if form is not None:
        leaves, structure = form.taken_apart(value), form.structure
    elif not trees.is_container(value):
        return [alone(value)], None, [value]
    else:
        leaves, structure = parts_of(value)
        if structure is None:
            return [alone(value)], None, [value]
    convert = array_of if form is not None else as_feature if root == "x" else as_target
    arrays = []
    for name, leaf in zip(trees.names(root, structure), leaves, strict=True):
        try:
            arrays.append(convert(leaf, name))
        except (TypeError, ValueError) as exc:
            raise SampleError(f"{name}: expected numbers: {exc}") from None
    if not arrays:
        raise SampleError(f"expected an array in {root}, got {value!r:.100}")
    return (arrays, structure, leaves) if form is None else (form.fitted(arrays), structure, ())


def features_of(arrays: Sequence[Array], structure: Structure | None, form: Form | None) -> list[Array]:
    """Return the arrays of x for many samples, with the types as from `row_of`; unchanged if a form declares types."""
    if form is not None:
        return list(arrays)
    if structure is None:
        return [as_features(array) for array in arrays]
    return [as_feature(array, name) for name, array in zip(trees.names("x", structure), arrays, strict=True)]


def fitted(row: SampleRow, forms: Forms) -> SampleRow:
    """Return the sample with each array converted to its field's type.

    Raises:
        SampleError: the sample does not fit the forms.
    """
    x = row.x if forms.x is None else forms.x.fitted(row.x)
    y = row.y if forms.y is None else forms.y.fitted(row.y)
    return row._replace(x=x, y=y)


def batch_of_rows(rows: Sequence[SampleRow], *, is_ragged: bool) -> SampleBatch:
    """Return the batch of at least one sample, all of one structure, and of one shape if `is_ragged` is False."""
    weight = None if all(row.weight == 1 for row in rows) else np.array([row.weight for row in rows], np.float32)
    group = None if all(row.group == NO_GROUP for row in rows) else np.array([row.group for row in rows], np.int64)
    if is_ragged:
        xs, ys = zip(*(row.trees for row in rows), strict=True)
        return SampleBatch(Ragged(xs), Ragged(ys), weight, group)
    first = rows[0]
    x = stacked_features([row.x for row in rows], first.x_structure)
    y = _stacked_leaves("y", [row.y for row in rows], first.y_structure, np.float64)
    return SampleBatch(tree_of(first.x_structure, x), tree_of(first.y_structure, y), weight, group)


def stacked_features(rows: Sequence[Sequence[Array]], structure: Structure | None) -> list[Array]:
    """Stack the arrays of x of several samples. A mixture of integers and floats becomes float64, and then float32.

    Raises:
        SampleError: the conversion would change an integer.
    """
    arrays = _stacked_leaves("x", rows, structure, np.float32)
    return [array.astype(np.float32) if array.dtype == np.float64 else array for array in arrays]


def _stacked_leaves(
    root: str, rows: Sequence[Sequence[Array]], structure: Structure | None, rounded: Any
) -> list[Array]:
    columns = zip(trees.names(root, structure), zip(*rows, strict=True), strict=True)
    return [stacked(column, name, rounded) for name, column in columns]


def batch_of(task: Task, samples: Iterable[Sample | list[Sample]], most: int | None = None) -> SampleBatch:
    """Return the batch of the first `most` samples, for example held-out ones. Without samples, arrays have length 0.

    Raises:
        SampleError, ValueError: the samples do not fit together.
    """
    forms = Forms.from_task(task)
    single = (sample for made in samples for sample in (made if isinstance(made, list) else [made]))
    rows = [row_of(sample, forms) for sample in islice(single, most)]
    if not rows:
        return SampleBatch(np.zeros((0,), np.float32), np.zeros((0,), np.float32))
    return batch_of_rows(rows, is_ragged=task.is_ragged)


def joined(batches: Sequence[SampleBatch]) -> SampleBatch:
    """Join several batches, at least one, into one batch."""
    if len(batches) == 1:
        return batches[0]
    x, y = trees.joined([batch.x for batch in batches]), trees.joined([batch.y for batch in batches])
    return SampleBatch(
        x, y, _column([(batch.weight, batch.num_samples) for batch in batches], 1, np.float32),
        _column([(batch.group, batch.num_samples) for batch in batches], NO_GROUP, np.int64),
    )  # fmt: skip


def _column(parts: Sequence[tuple[Array | None, int]], missing: int, dtype: Any) -> Array | None:
    """Join the weights or groups of several batches; None if no batch has any."""
    if all(array is None for array, _ in parts):
        return None
    return np.concatenate([np.full(count, missing, dtype) if array is None else array for array, count in parts])
