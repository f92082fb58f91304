"""Word vectors of a stream of texts: skip-gram with negative sampling.

T. Mikolov, I. Sutskever, K. Chen, G. Corrado, J. Dean: Distributed representations of words and phrases and their
compositionality, NIPS 2013. Draws depend only on the seed and on the batch's tokens: a batch that is computed again at
the same weights gives the same gradient, bit by bit.
"""

from __future__ import annotations

import zlib
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from doll import TextTask
from torch import nn
from torch.nn.functional import softplus  # softplus(-z) = -log sigmoid(z)

_POWER: Final = 0.75  # exponent of a word's count, for the distribution of noise words (section 2.2)


class Draws(NamedTuple):
    """The draws for one batch, of which t tokens are kept.

    Attributes:
        ids: the tokens, text after text, int64, shape (t,).
        texts: number of each token's text in the batch, ascending, int64, shape (t,).
        noise: ids of noise words, int64, shape (t, negatives).
    """

    ids: npt.NDArray[np.int64]
    texts: npt.NDArray[np.int64]
    noise: npt.NDArray[np.int64]


class SkipGram(TextTask):
    """Learns two vectors for each word, so that v(word) . u(context) shows which words occur near each other.

    For each token c and each token o of its text at distance d <= window, with weight (window - d + 1) / window (the
    mean of the random windows of word2vec), the loss is

        -log sigmoid(v(c) . u(o)) - sum over `negatives` noise words n of log sigmoid(-v(c) . u(n))      (equation 4)

    and the loss of a batch is its weighted mean over these pairs. All pairs of one token c share their noise words. A
    word is drawn with a probability proportional to its count to the power of 0.75. Counts are those of the
    vocabulary's file; without such counts, those of the batch: then only rows of the batch's words are read and
    changed.

    Args:
        dimensions: size of the vectors.
        window: largest distance of a context.
        negatives: number of noise words for each token.
        subsample: threshold s: for each token, a word with a share f > s of all tokens is kept with probability
            min(1, s/f + sqrt(s/f)), before windows are cut; 0: all are kept.
        seed: seed of the draws.
        sparse: whether to keep the vectors as tables at the server (see `torch.nn.Embedding`); False: in the flat
            vector.
        text: arguments of `TextTask`.
    """

    def __init__(
        self,
        dimensions: int = 32,
        *,
        window: int = 5,
        negatives: int = 5,
        subsample: float = 1e-3,
        seed: int = 0,
        sparse: bool = True,
        **text: Any,
    ) -> None:
        if min(dimensions, window, negatives) < 1 or not subsample >= 0 or seed < 0:
            raise ValueError(
                "expected dimensions, window and negatives above 0, subsample and seed >= 0, got "
                f"{dimensions}, {window}, {negatives}, {subsample} and {seed}"
            )
        super().__init__(**text)
        self.dimensions = dimensions
        self.window = window
        self.negatives = negatives
        self.subsample = subsample
        self.seed = seed
        self.sparse = sparse

    def build_model(self) -> nn.Module:
        shape = (self.vocabulary.size, self.dimensions)
        model = nn.ModuleDict({name: nn.Embedding(*shape, sparse=self.sparse) for name in ("words", "contexts")})
        # Initial values of word2vec: small words, and contexts of zero, so every pair's loss is (negatives + 1) log 2.
        nn.init.uniform_(model.get_parameter("words.weight"), -0.5 / self.dimensions, 0.5 / self.dimensions)
        nn.init.zeros_(model.get_parameter("contexts.weight"))
        self.add_checksum(model)
        return model

    def forward(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return, for each text, the weighted sum of its pairs' losses and the sum of their weights: shape (n, 2)."""
        ids, texts, noise = map(torch.from_numpy, self.draw(x.numpy()))
        words = model.get_submodule("words")(ids)
        both = model.get_submodule("contexts")(torch.cat([ids, noise.flatten()]))  # one look-up of the table for all
        contexts, against = both[: len(ids)], both[len(ids) :].view(*noise.shape, self.dimensions)
        losses = words.new_zeros(len(x))
        pairs = words.new_zeros(len(ids))  # weight of all pairs of each token
        for distance in range(1, min(self.window, len(ids) - 1) + 1):
            weight = (texts[:-distance] == texts[distance:]) * ((self.window - distance + 1) / self.window)
            after = softplus(-(words[:-distance] * contexts[distance:]).sum(dim=1))
            before = softplus(-(words[distance:] * contexts[:-distance]).sum(dim=1))
            losses = losses.index_add(0, texts[distance:], weight * (after + before))
            pairs[:-distance] += weight
            pairs[distance:] += weight
        scores = torch.matmul(against, words[:, :, None])[:, :, 0]
        losses = losses.index_add(0, texts, pairs * softplus(scores).sum(dim=1))
        return torch.stack([losses, words.new_zeros(len(x)).index_add(0, texts, pairs)], dim=1)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the weighted mean over all pairs; 0 without pairs."""
        return output[:, 0].sum() / output[:, 1].sum().clamp(min=1 / self.window)

    def draw(self, x: npt.NDArray[Any]) -> Draws:
        """Draw the tokens and the noise words for the texts `x`, shape (n, max_tokens)."""
        rng = np.random.default_rng([self.seed, zlib.crc32(x.tobytes())])
        texts, places = np.nonzero(x >= 0)
        words, at, counts = np.unique(x[texts, places].astype(np.int64), return_inverse=True, return_counts=True)
        if self.vocabulary.counts is not None:
            shares = self.vocabulary.counts[words] / self.vocabulary.counts.sum()
            words_of_noise, noise_counts = np.arange(self.vocabulary.size), self.vocabulary.counts
        else:
            shares = counts / max(1, len(at))
            words_of_noise, noise_counts = words, counts.astype(np.float64)
        if self.subsample:
            ratio = self.subsample / shares
            kept = rng.random(len(at)) < (ratio + np.sqrt(ratio))[at]
            at, texts = at[kept], texts[kept]
        sums = np.cumsum(noise_counts**_POWER)
        points = rng.random((len(at), self.negatives)) * (sums[-1] if len(at) else 0.0)
        noise = np.minimum(np.searchsorted(sums, points, side="right"), len(sums) - 1)
        return Draws(words[at], texts, words_of_noise[noise])
