"""A small transformer that learns to continue a text, character by character.

A. Vaswani et al.: Attention is all you need, NIPS 2017; norms before each part as in R. Xiong et al., ICML 2020.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from doll import JsonTask, Sample
from torch import nn
from torch.nn import functional as F

CHARACTERS = "\n abcdefghijklmnopqrstuvwxyz"
OTHER = len(CHARACTERS)
_IDS = np.full(128, OTHER)
_IDS[[ord(character) for character in CHARACTERS]] = np.arange(len(CHARACTERS))


class Text(msgspec.Struct):
    text: str


class Characters(JsonTask):
    """Each record is one sequence. x: ids of its characters, int64, shape (length,); y: ids of the next characters.

    Args:
        length: number of characters of a sequence. A longer text is cut; a shorter text is padded with line ends.
        width: size of the vector of a character.
        blocks, heads: number of blocks, and of attention heads in each block.
        holdout_path: file of texts, one per line.
        holdout_lines: number of its first lines that are held out.
    """

    record = Text

    def __init__(
        self, length: int = 128, width: int = 64, blocks: int = 2, heads: int = 4,
        holdout_path: str | None = None, holdout_lines: int = 0,
    ) -> None:  # fmt: skip
        if min(length, blocks, heads) < 1 or width < heads or width % heads:
            raise ValueError(
                "expected length, blocks and heads above 0 and a width that heads divides, got "
                f"{length}, {blocks}, {heads} and {width}"
            )
        self.length = length
        self.width = width
        self.blocks = blocks
        self.heads = heads
        self.input_shape = (length,)
        self._holdout = None if holdout_path is None else Path(holdout_path)
        self._holdout_lines = holdout_lines

    def build_model(self) -> nn.Module:
        return Transformer(self.length, self.width, self.blocks, self.heads)

    def samples(self, columns: Mapping[str, npt.NDArray[Any]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        ids = np.stack([ids_of(text, self.length + 1) for text in columns["text"]])
        return ids[:, :-1], ids[:, 1:]

    def forward(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next character: shape (n, length, number of characters)."""
        output: torch.Tensor = model(x)
        return output

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the mean loss per character in nats."""
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> Mapping[str, float]:
        return {"accuracy": float((output.argmax(dim=2) == target).double().mean())}

    def holdout(self) -> Iterator[Sample]:
        if self._holdout is None:
            return
        with self._holdout.open(encoding="utf-8") as lines:
            for line in itertools.islice(lines, self._holdout_lines):
                ids = ids_of(line.strip(), self.length + 1)
                yield Sample(ids[:-1], ids[1:])


class Transformer(nn.Module):
    def __init__(self, length: int, width: int, blocks: int, heads: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(OTHER + 1, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, OTHER + 1)
        nn.init.normal_(self.characters.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.characters(x) + self.positions[: x.shape[1]])
        scores: torch.Tensor = self.scores(self.norm(hidden))
        return scores


class Block(nn.Module):
    """A block of the transformer: each character attends to earlier ones, then a layer processes each separately."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.layer_norm = nn.LayerNorm(width)
        self.layer = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        n, length, width = hidden.shape
        parts = self.queries_keys_values(self.attention_norm(hidden)).view(
            n, length, 3, self.heads, width // self.heads
        )
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.mixed(seen.transpose(1, 2).reshape(n, length, width))
        result: torch.Tensor = hidden + self.layer(self.layer_norm(hidden))
        return result


def ids_of(text: str, length: int) -> npt.NDArray[np.int64]:
    """Return the ids of the first `length` characters; a shorter text is padded with line ends."""
    codes = np.array([ord(character) for character in text[:length].ljust(length, "\n")])
    return np.where(codes < len(_IDS), _IDS[np.minimum(codes, len(_IDS) - 1)], OTHER)


@torch.no_grad()
def continued(model: nn.Module, text: str, count: int, length: int = 128) -> str:
    """Return `text` with the `count` most likely characters after it."""
    for _ in range(count):
        ids = torch.from_numpy(ids_of(text[-length:], min(len(text), length)))
        text += (CHARACTERS + "?")[int(model(ids[None])[0, -1].argmax())]
    return text
