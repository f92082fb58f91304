"""Embedding layers of bounded tables: their ids may be any numbers below `num_embeddings`, and take no memory here."""

from __future__ import annotations

from typing import Final, TypeAlias

import torch

DEFAULT_SCALE: Final = 0.05


class BoundedEmbedding(torch.nn.Embedding):
    """An embedding of ids out of a space that is too large for a row each, such as hashes of text.

    The parameter server has rows for `training.tables.*.max_rows` ids at most (docs/guide/model.md). It works in a DOLL
    job alone: there is no weight here.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *, scale: float = DEFAULT_SCALE) -> None:
        """
        Args:
            num_embeddings: ids are 0 to num_embeddings - 1; at most 2**63 - 1.
            scale: of the initial rows, uniform from -scale up to scale.
        """
        super().__init__(1, embedding_dim, sparse=True, _weight=torch.empty(1, embedding_dim, device="meta"))
        self.num_embeddings, self.scale = _checked(num_embeddings, scale)


class BoundedEmbeddingBag(torch.nn.EmbeddingBag):
    """`BoundedEmbedding`, with the rows of each bag of ids added or averaged."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, mode: str = "mean", scale: float = DEFAULT_SCALE,
        include_last_offset: bool = False, padding_idx: int | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            num_embeddings, scale: as of `BoundedEmbedding`.
            mode, include_last_offset, padding_idx: as of torch.nn.EmbeddingBag; mode is "sum" or "mean".
        """
        super().__init__(
            1, embedding_dim, mode=mode, sparse=True, _weight=torch.empty(1, embedding_dim, device="meta"),
            include_last_offset=include_last_offset,
        )  # fmt: skip
        self.num_embeddings, self.scale = _checked(num_embeddings, scale)
        self.padding_idx = padding_idx


BOUNDED_LAYERS: Final = (BoundedEmbedding, BoundedEmbeddingBag)
BoundedLayer: TypeAlias = BoundedEmbedding | BoundedEmbeddingBag


def _checked(num_embeddings: int, scale: float) -> tuple[int, float]:
    if not 0 < num_embeddings < 2**63:
        raise ValueError(f"num_embeddings: expected 1 to 2**63 - 1, got {num_embeddings}")
    if not 0 <= scale < 1e30:
        raise ValueError(f"scale: expected a number of 0 or more, got {scale}")
    return num_embeddings, scale
