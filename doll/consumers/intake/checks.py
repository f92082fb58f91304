"""The checks of a sample before it is learned: finite numbers, the task's shape, a class that there is."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from doll.errors import SampleError
from doll.task import trees
from doll.task.base import Sample, Task
from doll.task.batches import Forms, SampleRow, row_of
from doll.task.forms import NUMERIC_KINDS

_MAX_SHOWN: Final = 500


def checked(task: Task, sample: Sample | tuple[Any, Any], forms: Forms) -> SampleRow:
    """The arrays of a sample that can be learned.

    Raises:
        SampleError: it cannot.
    """
    row = row_of(sample, forms)
    for root, structure, arrays in (("x", row.x_structure, row.x), ("y", row.y_structure, row.y)):
        for at, array in enumerate(arrays):
            if array.dtype.kind not in NUMERIC_KINDS:
                what = "mixed or ragged values" if array.dtype == object else f"values of type {array.dtype}"
                raise SampleError(f"expected numbers in {trees.names(root, structure)[at]}, got {what}")
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                name, problem = trees.names(root, structure)[at], "holds NaN or infinity"
                raise SampleError(f"{name} {problem if root == 'x' else 'is NaN or infinite'}")
    if task.input_shape is not None and (row.x_structure is not None or row.x[0].shape != task.input_shape):
        got = row.x[0].shape if row.x_structure is None else f"{len(row.x)} arrays"
        raise SampleError(f"expected x of shape {task.input_shape}, got {got}")
    if (classes := task.num_classes) is not None and row.y_structure is None:
        y = row.y[0]
        if y.ndim == 0:
            is_good = float(y).is_integer() and bool(0 <= y < classes)
        else:
            is_good = (forms.y is not None or forms.is_ragged) and bool(are_classes(y, classes).all())
        if not is_good:
            raise SampleError(f"expected a class 0 to {classes - 1}, got {y.tolist()!r}"[:_MAX_SHOWN])
    return row


def are_classes(y: npt.NDArray[Any], num_classes: int) -> npt.NDArray[np.bool_]:
    """The numbers that are classes 0 to `num_classes` - 1, as a mask."""
    are: npt.NDArray[np.bool_] = (y >= 0) & (y < num_classes)
    return are & (np.floor(y) == y) if y.dtype.kind == "f" else are
