"""Modules of the tasks whose parameters are tables with a row for each id: imported where a model is built."""

from __future__ import annotations

import torch
from torch import nn


class SparseLinear(nn.Module):
    """One number for each sample: a bias, a weight for each number, and a weight for each id of a table."""

    def __init__(self, numbers: int, columns: int, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(columns, 1, sparse=sparse)
        self.dense = nn.Linear(numbers, 1)
        # The loss is convex: it is learned from nothing, so that no weight is there that no sample asked for.
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Shape (n,), of `numbers`, float32 of shape (n, numbers), and `ids`, integers of shape (n, k)."""
        if self.table.sparse:
            weights = self.table(ids).squeeze(2)
        else:  # the same weights: the gradient of rows of one number takes a third of the time so
            weights = self.table.weight.view(-1).index_select(0, ids.reshape(-1)).view(ids.shape)
        logits: torch.Tensor = weights.sum(1) + self.dense(numbers).squeeze(1)
        return logits


class Factors(nn.Module):
    """Products of a vector for each user and a vector for each item, with biases or without."""

    def __init__(
        self, users: int, items: int, rank: int, *, biases: bool, mean: float, deviation: float, sparse: bool
    ) -> None:
        super().__init__()
        self.users = nn.Embedding(users, rank, sparse=sparse)
        self.items = nn.Embedding(items, rank, sparse=sparse)
        nn.init.normal_(self.users.weight, std=deviation)
        nn.init.normal_(self.items.weight, std=deviation)
        self.user_biases = nn.Embedding(users, 1, sparse=sparse) if biases else None
        self.item_biases = nn.Embedding(items, 1, sparse=sparse) if biases else None
        for table in (self.user_biases, self.item_biases):
            if table is not None:
                nn.init.zeros_(table.weight)
        self.mean = mean

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Shape (n, 2): prediction, and the sum of the squares of the parameters that it is made of.

        Args:
            ids: user and item, integers of shape (n, 2).
        """
        parts = [self.users(ids[:, 0]), self.items(ids[:, 1])]
        prediction = (parts[0] * parts[1]).sum(1) + self.mean
        if self.user_biases is not None and self.item_biases is not None:
            biases = [self.user_biases(ids[:, 0]), self.item_biases(ids[:, 1])]
            prediction = prediction + (biases[0] + biases[1]).squeeze(1)
            parts += biases
        return torch.stack([prediction, sum(((part * part).sum(1) for part in parts), torch.zeros(()))], dim=1)
