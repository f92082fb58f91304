"""Embedding layers of bounded tables. Ids may be any numbers below `num_embeddings`; unused ids take no memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from doll.tables.bounds import InitialRows
from doll.tables.rows import Ids

DEFAULT_SCALE: Final = 0.05
PARTS: Final = ("ids", "rows", "key")  # parts of a table in a module's `state_dict()`; see `BoundedLayer`


class UsedRows(NamedTuple):
    """The distinct ids of a layer's input, strictly increasing, the index of each input id among them, and the index of
    the padding id, if the input contains it."""

    ids: Ids
    places: torch.Tensor
    padding: int | None


def used_rows(name: str, num_rows: int, input: torch.Tensor, padding_idx: int | None) -> UsedRows:
    """Return the rows that `input` uses. Raises TypeError or IndexError if its values are not ids of a table with
    `num_rows` rows; the message begins with `name`."""
    if input.is_nested or input.dtype not in (torch.int32, torch.int64):
        kind = "a nested tensor" if input.is_nested else str(input.dtype)
        raise TypeError(
            f"{name}: expected ids as a tensor of int64 or int32, got {kind}: Task.forward makes floats of "
            "x by default; define it, and give the layer x.long()"
        )
    unique, places = torch.unique(input, return_inverse=True)
    ids = unique.cpu().numpy().astype(np.int64, copy=False)
    if len(ids) and not (ids[0] >= 0 and ids[-1] < num_rows):
        raise IndexError(f"{name}: expected ids of 0 to {num_rows - 1}, got {ids[0]} to {ids[-1]}")
    padding = None
    if padding_idx is not None and (at := int(np.searchsorted(ids, padding_idx))) < len(ids):
        padding = at if ids[at] == padding_idx else None
    return UsedRows(ids, places, padding)


class BoundedLayer(torch.nn.Module):
    """The base class of both layers. It has ids and rows after it has loaded a `state_dict` of `doll export` or
    `run.model()`.

    Attributes:
        ids: ids that have rows, int64, strictly increasing, shape (n,); None: nothing has been loaded.
        rows: rows of these ids, float32, shape (n, embedding_dim).
        key: key of `InitialRows`, for all other ids, as int64.
    """

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    scale: float
    ids: torch.Tensor | None
    rows: torch.Tensor | None
    key: torch.Tensor | None

    def _set_bounds(self, num_embeddings: int, scale: float) -> None:
        if not 0 < num_embeddings < 2**63:
            raise ValueError(f"num_embeddings: expected 1 to 2**63 - 1, got {num_embeddings}")
        if not 0 <= scale < 1e30:
            raise ValueError(f"scale: expected a number of 0 or more, got {scale}")
        self.num_embeddings, self.scale = num_embeddings, scale
        for part in PARTS:
            self.register_buffer(part, None)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        missing = [prefix + part for part in PARTS if prefix + part not in state_dict]
        if missing:
            missing_keys += missing
            return
        for part in PARTS:  # with the shapes that the `state_dict` has
            setattr(self, part, torch.empty_like(state_dict[prefix + part]))
        self._parameters["weight"] = None  # it has no rows
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _looked_up(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Return the index of the row of each input id, the rows, and the index of the padding id."""
        if self.ids is None or self.rows is None or self.key is None:
            raise RuntimeError(
                f"doll.{type(self).__name__}: expected a DOLL job, which has its rows, or the tensors of one: "
                'model.load_state_dict(load_file("model.safetensors")) of doll export, or run.model()'
            )
        used = used_rows(f"doll.{type(self).__name__}", self.num_embeddings, input, self.padding_idx)
        initial = InitialRows(int(self.key) % 2**64, self.embedding_dim, self.scale)
        rows = torch.from_numpy(initial.rows(used.ids)).to(self.rows)
        if len(self.ids):
            ids = torch.from_numpy(used.ids).to(self.ids.device)
            at = torch.searchsorted(self.ids, ids).clamp_(max=len(self.ids) - 1)
            known = self.ids[at] == ids
            rows[known] = self.rows[at[known]]
        rows = rows.to(input.device)
        return used.places, rows, used.padding


class BoundedEmbedding(BoundedLayer, torch.nn.Embedding):
    """An embedding of ids from a space that is too large for a row of each id, such as hashes of text.

    The parameter server has rows for at most `training.tables.*.max_rows` ids (docs/guide/model.md). Outside of a DOLL
    job, the layer computes with the rows of a `state_dict` that was loaded, and does not learn. Before this, its
    forward pass raises RuntimeError.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *, scale: float = DEFAULT_SCALE) -> None:
        """
        Args:
            num_embeddings: number of possible ids, which are 0 to num_embeddings - 1; at most 2**63 - 1.
            scale: bound of the initial rows, which are uniform from -scale up to scale.
        """
        super().__init__(1, embedding_dim, sparse=True, _weight=torch.empty(1, embedding_dim, device="meta"))
        self._set_bounds(num_embeddings, scale)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # as torch names it
        """Return the rows of these ids."""
        return functional.embedding(*self._looked_up(input))


class BoundedEmbeddingBag(BoundedLayer, torch.nn.EmbeddingBag):
    """A `BoundedEmbedding` that adds or averages the rows of each bag of ids."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, mode: str = "mean", scale: float = DEFAULT_SCALE,
        include_last_offset: bool = False, padding_idx: int | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            num_embeddings, scale: as for `BoundedEmbedding`.
            mode, include_last_offset, padding_idx: as for torch.nn.EmbeddingBag; mode is "sum" or "mean".
        """
        super().__init__(
            1, embedding_dim, mode=mode, sparse=True, _weight=torch.empty(1, embedding_dim, device="meta"),
            include_last_offset=include_last_offset,
        )  # fmt: skip
        self._set_bounds(num_embeddings, scale)
        self.padding_idx = padding_idx

    def forward(
        self, input: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sum or mean of each bag."""
        places, rows, padding = self._looked_up(input)
        return functional.embedding_bag(
            places, rows, None if offsets is None else offsets.long(), mode=self.mode,
            per_sample_weights=per_sample_weights, include_last_offset=self.include_last_offset, padding_idx=padding,
        )  # fmt: skip
