"""The part of a model that one shard of a parameter server holds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from doll.model.flat_model import FlatModel
from doll.tables.row_slices import RowSlice


class ModelSlice:
    """The part of a model that one shard holds, for an `Updater`. It has its own memory, so the model can be freed.

    Every parameter of the model has a place in `ends_of_parameters`, also if no value of it is in the slice. So a bit
    mask of parameters (`FlatModel.absent`) means the same in all shards.

    Attributes:
        rows: the rows of tables that the shard holds.
    """

    def __init__(self, model: FlatModel, shard: int) -> None:
        part = model.slices[shard]
        self.rows = RowSlice(shard, len(model.slices))
        self.flat = self.host = model.host[part.begin : part.until].clone()
        self.num_parameters, self.num_floats = part.num_parameters, part.num_floats
        self.ends_of_parameters = tuple(
            min(max(end - part.begin, 0), part.num_parameters) for end in model.ends_of_parameters
        )

    def load_weights(self, weights: npt.NDArray[np.float32]) -> None:
        """Copy `weights`, float32, shape (size,). Raises ValueError if they have another shape."""
        if weights.shape != (self.host.numel(),):
            raise ValueError(f"expected weights of shape ({self.host.numel()},), got {weights.shape}")
        self.host.copy_(torch.from_numpy(np.array(weights)))
