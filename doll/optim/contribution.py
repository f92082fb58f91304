"""What one set of batches adds to an update."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

# float32, shape (numel,), laid out as `doll.model.flat_model` says: the sum of the gradients over the set's samples, or
# the sum of the steps that its worker made; float buffers as values times samples.
Contribution: TypeAlias = npt.NDArray[np.float32]
