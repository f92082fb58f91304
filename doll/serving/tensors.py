"""The input tensors of a task's model, with their names in the Open Inference Protocol: one for each array of x.

Inputs are checked in the same way as training samples (`doll.task.forms`), so that the model gets the same inputs as in
training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from doll.errors import SampleError
from doll.records.bounded import short
from doll.task import trees
from doll.task.base import Task, described
from doll.task.batches import Forms, SampleBatch, SampleRow, batch_of, row_of, stacked_features
from doll.task.forms import NUMERIC_KINDS, Field, Form, as_features
from doll.task.trees import Array, Ragged, Structure, Tree
from doll.telemetry import get_logger

log = get_logger(__name__)

DATATYPES: Final = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "float32": "FP32", "float64": "FP64",
}  # fmt: skip
DTYPES: Final = {name: np.dtype(dtype) for dtype, name in DATATYPES.items()}
DATATYPE_OF: Final = {dtype: name for name, dtype in DTYPES.items()}  # numpy computes a dtype's name at each access


class TensorInfo(NamedTuple):
    """The metadata of a tensor; -1 in `shape` means any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class Features(NamedTuple):
    """The x of the samples of a request.

    Attributes:
        x: the arrays, as in `SampleBatch`.
        num_samples: number of samples.
        kind: requests of the same kind can be computed together.
    """

    x: Tree
    num_samples: int
    kind: tuple[Any, ...]


class Signature:
    """The inputs of a task's model, and its outputs after the first computation.

    Attributes:
        outputs: metadata of the outputs; empty before the first computation.
    """

    def __init__(self, task: Task) -> None:
        """Raises:
        ConfigError: `Task.spec` is not valid.
        """
        forms = Forms.from_task(task)
        self._is_ragged = forms.is_ragged
        self.example = _example(task)
        self._form = forms.x
        # If the task states no type for its one array: integers stay as they are, other types become float32.
        self._is_open = forms.x is None and (self.example is None or self.example.x_structure is None)
        if self._form is None and self.example is not None:
            row = self.example
            self._form = Form.seen("x", row.x_structure, [row.x], of_any_length=self._is_ragged)
        elif self._form is None and task.input_shape is not None:
            self._form = Form("x", None, [Field("float32", tuple(task.input_shape))])
        self._names = trees.dotted_names("x", self._structure)
        self._name_set = set(self._names)
        self.outputs: tuple[TensorInfo, ...] = ()

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """The inputs of the model."""
        if self._form is None:
            return (TensorInfo("x", "FP32", (-1, -1)),)
        return tuple(
            TensorInfo(
                name, DATATYPES.get(field.dtype, field.dtype),
                (-1, *(-1 if size is None else size for size in field.shape)),
            )
            for name, field in zip(self._names, self._form.fields, strict=True)
        )  # fmt: skip

    def of_tensors(self, tensors: Mapping[str, Array]) -> Features:
        """Return x from the tensors of a request; the first dimension of each tensor is the sample.

        Raises:
            SampleError: the tensors are not valid inputs of the model; the message names the tensor.
        """
        if tensors.keys() != self._name_set:
            raise SampleError(f"expected the inputs {', '.join(self._names)}, got {', '.join(tensors) or 'none'}")
        arrays = [tensors[name] for name in self._names]
        for name, array in zip(self._names, arrays, strict=True):
            if not array.ndim or len(array) != len(arrays[0]) or not len(array):
                expected = f"{len(arrays[0])} samples, as in {self._names[0]}" if array is not arrays[0] else "samples"
                raise SampleError(f"{name}: expected {expected}, in a first dimension, got shape {array.shape}")
        alone = self._structure is None and self._is_open
        leaves = self._checked([as_features(array, self._names[0]) for array in arrays] if alone else arrays, lead=1)
        if not self._is_ragged:
            return _features(self._structure, leaves)
        rows = [trees.tree_of(self._structure, list(row)) for row in zip(*leaves, strict=True)]
        return Features(Ragged(rows), len(rows), ())

    def of_records(self, xs: Sequence[Any]) -> Features:
        """Return x from samples in the form of `Task.decode_features`, at least one.

        Raises:
            SampleError: the samples are not valid inputs of the model.
        """
        rows = [self._row(x) for x in xs]
        if self._is_ragged:
            return Features(Ragged(trees.tree_of(self._structure, row) for row in rows), len(rows), ())
        try:
            return _features(self._structure, stacked_features(rows, self._structure))
        except ValueError as exc:
            raise SampleError(f"expected records of one shape: {exc}") from None

    def _row(self, x: Any) -> list[Array]:
        try:
            row = row_of((x, 0), Forms() if self._is_open else Forms(self._form))
        except (TypeError, ValueError, OverflowError, RecursionError) as exc:
            raise SampleError(f"{self._names[0]}: expected an array of numbers: {short(exc)}") from None
        if row.x_structure != self._structure:
            got = ", ".join(trees.names("x", row.x_structure))
            raise SampleError(f"expected {', '.join(trees.names('x', self._structure))}, got {got}")
        return self._checked(row.x, lead=0)

    def batch(self, parts: Sequence[Features]) -> SampleBatch:
        """Return the samples of several requests of one kind as one batch, in order. Their y is a placeholder."""
        x = trees.joined([part.x for part in parts]) if len(parts) > 1 else parts[0].x
        if not isinstance(x, Ragged):
            return SampleBatch(x, x)  # y is not used
        # `Task.collate` reads targets: any valid target is sufficient.
        y = 0.0 if self.example is None else self.example.trees[1]
        return SampleBatch(x, Ragged([y] * len(x)))

    def example_features(self) -> Features | None:
        """Return x of a sample for a trial of the model; None if no sample is known."""
        if self.example is not None:
            return self.of_records([self.example.trees[0]])
        if self._form is None:
            return None
        sizes = [tuple(1 if size is None else size for size in field.shape) for field in self._form.fields]
        arrays = [np.zeros(size, field.dtype) for size, field in zip(sizes, self._form.fields, strict=True)]
        return self.of_records([trees.tree_of(self._structure, arrays)])

    def saw_outputs(self, leaves: Sequence[Array], structure: Structure | None) -> None:
        """Store the metadata of outputs of the model."""
        names = trees.dotted_names("output", structure)
        self.outputs = tuple(
            TensorInfo(name, DATATYPES.get(leaf.dtype.name, leaf.dtype.name), (-1, *leaf.shape[1:]))
            for name, leaf in zip(names, leaves, strict=True)
        )

    @property
    def _structure(self) -> Structure | None:
        return None if self._form is None else self._form.structure

    def _checked(self, leaves: list[Array], lead: int) -> list[Array]:
        """Return the arrays after their check; `lead` is the number of dimensions before those of a sample."""
        if self._form is not None:
            if self._is_open:
                shape = self._form.fields[0].shape
                got = leaves[0].shape[lead:]
                sizes = zip(shape, got, strict=False)
                if len(got) != len(shape) or any(wanted not in (None, size) for wanted, size in sizes):
                    raise SampleError(f"{self._names[0]}: expected shape {shape} of a sample, got {got}")
            else:
                leaves = self._form.fitted(leaves, lead)
        for name, leaf in zip(self._names, leaves, strict=True):
            if leaf.dtype.kind not in NUMERIC_KINDS:
                raise SampleError(f"{name}: expected numbers, got other values")
            if leaf.dtype.kind in "fc" and not np.isfinite(leaf).all():
                raise SampleError(f"{name}: expected finite numbers, got NaN or an infinite one")
        return leaves


def _features(structure: Structure | None, leaves: list[Array]) -> Features:
    kind = tuple((leaf.dtype.num, leaf.shape[1:]) for leaf in leaves)
    return Features(trees.tree_of(structure, leaves), len(leaves[0]), kind)


def _example(task: Task) -> SampleRow | None:
    """Return a held-out sample of the task; None if it has none."""
    try:
        samples = batch_of(task, task.holdout(), 1)
        return samples.rows(1)[0] if samples.num_samples else None
    except Exception as exc:  # the user's code may raise anything: its data need not be on this machine
        log.warning("no_held_out_sample", reason=described(exc), action="inputs are known as far as the task says them")
        return None
