"""Records of one label byte and height x width grey bytes: the decoding that the image tasks share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from doll.errors import SampleError
from doll.task.base import Sample, Task


class GreyImageTask(Task):
    """Grey images of `input_shape` (height, width), values 0..255, with a class in 0 .. num_classes - 1."""

    input_shape: tuple[int, ...]
    num_classes: int

    def decode(self, record: bytes) -> Sample:
        height, width = self.input_shape
        if len(record) != 1 + height * width:
            raise SampleError(
                f"expected {1 + height * width} bytes (class, then {height}x{width} grey values), got {len(record)}"
            )
        if record[0] >= self.num_classes:
            raise SampleError(f"expected a class in 0..{self.num_classes - 1} in the first byte, got {record[0]}")
        return Sample(np.frombuffer(record, np.uint8, offset=1).reshape(height, width), record[0])

    def decode_block(self, block: memoryview, width: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
        height, columns = self.input_shape
        if width != 1 + height * columns:
            return None
        rows = np.frombuffer(block, np.uint8).reshape(-1, width)
        if len(rows) and rows[:, 0].max() >= self.num_classes:
            return None  # one by one, `decode` names the record and the reason
        # A copy: torch refuses to write to the bytes of a record.
        return rows[:, 1:].copy().reshape(-1, height, columns), rows[:, 0].astype(np.int64)
