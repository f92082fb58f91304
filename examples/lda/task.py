"""Topics of a stream of texts: latent Dirichlet allocation by collapsed Gibbs sampling.

The model is two tables of counts. A worker samples the topics of a batch's tokens, and its step is what they add to the
counts. The sum of all steps is the counts of all documents, in whatever order they come.

T. Griffiths, M. Steyvers: Finding scientific topics, PNAS 101 (2004), equation 5. Each document of the stream is
sampled once, given the counts of all documents before it; then its own counts are added, and stay.

Documents that are sampled side by side do not see each other's topics of the same place. Nor do batches on several
workers: approximate distributed LDA (D. Newman, A. Asuncion, P. Smyth, M. Welling, JMLR 10 (2009), section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from doll import TextTask
from doll.errors import TaskError
from doll.task.text import PADDING
from torch import nn

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_COMPLETED_TOGETHER: Final = 64  # documents; more need more memory than a cache has


class Counts(NamedTuple):
    """How many tokens of a word have a topic: `word_topic`, shape (V, K); and its sum over words: `topic`, (K,)."""

    word_topic: npt.NDArray[Any]
    topic: npt.NDArray[Any]


class Prior(NamedTuple):
    """Parameters of the symmetric Dirichlet priors: `alpha` of a document's topics, `beta` of a topic's words."""

    alpha: float
    beta: float


class Change(NamedTuple):
    """What a batch adds to the counts.

    Attributes:
        words: int64, shape (u,): the words of the batch, rising.
        word_topic: float64, shape (u, K): whole numbers >= 0, added to the rows of `words`.
        topic: float64, shape (K,): the sum of `word_topic` over its rows.
    """

    words: Integers
    word_topic: Floats
    topic: Floats


class Topics(TextTask):
    """Learns topics: `word_topic`, shape (V, K), tokens of each word by topic, and `topic`, shape (K,), their sums.

    It has no gradient: it needs a policy whose contribution is a step. Loss is the mean negative log-likelihood of a
    token in nats, by document completion (`completion`); the metric `perplexity` is its exponential.

    Counts are float32. They are exact up to 2^24 tokens of one topic. Beyond, each sum is rounded to 24 bits: a topic's
    total then differs from the sum over its words by at most 6e-8 of it for each update, and what is drawn changes as
    little; but an update that adds less than half of the last bit to a count adds nothing.

    Args:
        topics: K.
        alpha, beta: priors of a document's topics and of a topic's words (`Prior`).
        sweeps: times that the topic of each token of a batch is drawn.
        text: as in `TextTask`.
    """

    def __init__(
        self, topics: int = 50, *, alpha: float = 0.05, beta: float = 0.1, sweeps: int = 5, **text: Any
    ) -> None:
        if topics < 1 or sweeps < 1 or not (0 < alpha < math.inf and 0 < beta < math.inf):
            raise ValueError(
                f"expected topics, sweeps, alpha and beta above 0, got {topics}, {sweeps}, {alpha} and {beta}"
            )
        super().__init__(**text)
        self.num_topics = topics
        self.sweeps = sweeps
        self.prior = Prior(alpha, beta)

    def build_model(self) -> nn.Module:
        counts = nn.Module()
        shape = (self.vocabulary.size, self.num_topics)
        counts.register_parameter("word_topic", nn.Parameter(torch.zeros(shape)))
        counts.register_parameter("topic", nn.Parameter(torch.zeros(self.num_topics)))
        self.add_checksum(counts)
        return counts

    def step(
        self, weights: npt.NDArray[np.float32], x: npt.NDArray[Any], y: npt.NDArray[Any], rng: np.random.Generator
    ) -> npt.NDArray[np.float32]:
        """What a batch of documents adds to the counts `weights`: whole numbers >= 0, float32, shape (numel,).

        Args:
            weights: of the model, laid out as `doll.model.flat_model` says.
            x: the documents, shape (n, max_tokens).
            y: not used.

        Raises:
            TaskError: a count is negative or not finite.
        """
        counts = self._counts(weights)
        values = np.append(counts.topic, counts.word_topic[np.unique(x[x >= 0])])
        good = np.isfinite(values) & (values >= 0)
        if not good.all():
            raise TaskError(
                f"expected finite counts >= 0, got {values[~good][0]}: the model of topics changes by adding steps "
                "only; choose a policy that adds each step as it is (no gradients, no weight decay)"
            )
        change = batch_change(counts, x, self.prior, sweeps=self.sweeps, rng=rng)
        step = np.zeros_like(weights)
        word_topic, topic = self._counts(step)
        word_topic[change.words] = change.word_topic
        topic[:] = change.topic
        return step

    def forward(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """For each document, the log-likelihood of every second token in nats, and their number: float64, (n, 2).

        Raises:
            TaskError: a gradient is wanted.
        """
        if torch.is_grad_enabled():
            raise TaskError("topics have no gradient: choose a policy whose contribution is a step")
        ids = x.numpy()
        words, places = np.unique(np.maximum(ids, 0), return_inverse=True)
        documents = np.where(ids >= 0, places.reshape(ids.shape), PADDING)  # in `words`: other rows are not needed
        word_topic, topic = (model.get_parameter(name).detach().numpy() for name in ("word_topic", "topic"))
        counts = Counts(word_topic[words], topic)
        probabilities = word_probabilities(counts, self.prior, self.vocabulary.size)
        likelihoods, numbers = completion(probabilities, documents, self.prior.alpha)
        return torch.from_numpy(np.stack([likelihoods, numbers.astype(np.float64)], axis=1))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean over all tokens that `forward` scores; 0 without any."""
        return -output[:, 0].sum() / output[:, 1].sum().clamp(min=1.0)

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> Mapping[str, float]:
        return {"perplexity": math.exp(float(self.loss(output, target)))}

    def _counts(self, weights: npt.NDArray[np.float32]) -> Counts:
        """Views into a vector of the model's layout."""
        size = self.vocabulary.size * self.num_topics
        if weights.shape != (size + self.num_topics,):
            raise ValueError(f"expected weights of shape ({size + self.num_topics},), got {weights.shape}")
        return Counts(weights[:size].reshape(self.vocabulary.size, self.num_topics), weights[size:])


def conditional(document: Floats, word: Floats, topic: Floats, prior: Prior, num_words: int) -> Floats:
    """p(topic of a token | the topics of all other tokens), times a constant (equation 5).

    Args:
        document: n_dk, the tokens of the document by topic, without the token, shape (..., K).
        word: n_wk, the counts of its word, without it, shape (..., K).
        topic: n_k, the counts of all words, without it, shape (..., K).
        num_words: V.
    """
    weights: Floats = (document + prior.alpha) * (word + prior.beta) / (topic + num_words * prior.beta)
    return weights


class Sampler:
    """The topics of one batch's tokens. Two equal samplers and generators draw the same topics, to the bit.

    Args:
        counts: of everything before the batch; it is not written to.
        documents: ids 0 .. V - 1 of the tokens, -1 behind a document's last, shape (n, L).
        together: documents that are sampled side by side; 1: one token after the other, exactly equation 5. None: all.

    Raises:
        ValueError: an id is out of range, or -1 stands before a token.
    """

    def __init__(
        self, counts: Counts, documents: npt.NDArray[Any], prior: Prior, *, together: int | None = None
    ) -> None:
        self._num_words, num_topics = counts.word_topic.shape
        is_token = documents >= 0
        lengths = is_token.sum(axis=1)
        if (is_token != (np.arange(documents.shape[1]) < lengths[:, None])).any():
            raise ValueError("expected the tokens of each document before its -1, got a -1 before a token")
        if documents.max(initial=-1) >= self._num_words:
            raise ValueError(f"expected ids below {self._num_words}, got {documents.max()}")
        self._prior = prior
        self._together = together or max(1, len(documents))
        self._order = np.argsort(-lengths, kind="stable")  # longest first: texts that have a place are the first ones
        self._lengths, is_token = lengths[self._order], is_token[self._order]
        self._words = np.zeros(documents.shape, np.int64)  # rows of `_word_topic`
        ids = documents[self._order][is_token].astype(np.int64)
        self._ids, self._words[is_token] = np.unique(ids, return_inverse=True)
        self._topics = np.where(is_token, 0, -1)
        self._before = Counts(counts.word_topic[self._ids].astype(np.float64), counts.topic.astype(np.float64))
        self._word_topic, self._topic = self._before.word_topic.copy(), self._before.topic.copy()
        self._document_topic = np.zeros((len(documents), num_topics))
        self._drawn = False

    @property
    def topics(self) -> Integers:
        """Topic of each token, -1 without a token, shape (n, L)."""
        topics = np.empty_like(self._topics)
        topics[self._order] = self._topics
        return topics

    def sweep(self, rng: np.random.Generator) -> None:
        """Draw each token's topic once. In the first sweep, tokens that have no topic yet count nowhere."""
        for first in range(0, len(self._lengths), self._together):
            lengths = self._lengths[first : first + self._together]
            for place in range(int(lengths[0])):
                self._draw(slice(first, first + int((lengths > place).sum())), place, rng)
        self._drawn = True

    def change(self) -> Change:
        """What the batch adds to the counts."""
        before = self._before
        return Change(self._ids, self._word_topic - before.word_topic, self._topic - before.topic)

    def _draw(self, here: slice, place: int, rng: np.random.Generator) -> None:
        """Draw the topics of the tokens at one place of the documents `here`, given all tokens that are not there."""
        words = self._words[here, place]
        if self._drawn:
            self._count(here, words, self._topics[here, place], -1.0)
        weights = conditional(
            self._document_topic[here], self._word_topic[words], self._topic, self._prior, self._num_words
        )
        sums = np.cumsum(weights, axis=1)
        topics = (sums <= rng.random((len(words), 1)) * sums[:, -1:]).sum(axis=1)
        topics = np.minimum(topics, sums.shape[1] - 1)  # where rounding has given the sum of all
        self._count(here, words, topics, 1.0)
        self._topics[here, place] = topics

    def _count(self, here: slice, words: Integers, topics: Integers, sign: float) -> None:
        """Count one token of each of the documents `here`, or take it out of the counts."""
        self._document_topic[np.arange(here.start, here.stop), topics] += sign
        np.add.at(self._word_topic, (words, topics), sign)
        self._topic += sign * np.bincount(topics, minlength=len(self._topic))


def batch_change(
    counts: Counts, documents: npt.NDArray[Any], prior: Prior, *, sweeps: int, rng: np.random.Generator
) -> Change:
    """What a batch of documents adds to the counts, after so many sweeps over it (`Sampler`)."""
    sampler = Sampler(counts, documents, prior)
    for _ in range(sweeps):
        sampler.sweep(rng)
    return sampler.change()


def word_probabilities(counts: Counts, prior: Prior, num_words: int | None = None) -> Floats:
    """p(word | topic), shape (V, K): the mean of its posterior, given the topics of all tokens.

    Args:
        num_words: V, where `counts.word_topic` has the rows of some words only; of these is the result.
    """
    probabilities: Floats = (counts.word_topic.astype(np.float64) + prior.beta) / (
        counts.topic.astype(np.float64) + (num_words or len(counts.word_topic)) * prior.beta
    )
    return probabilities


def completion(
    probabilities: Floats, documents: npt.NDArray[Any], alpha: float, *, iterations: int = 50
) -> tuple[Floats, Integers]:
    """Document completion: how likely the second, fourth, ... token of each document is, given its other tokens.

    H. Wallach, I. Murray, R. Salakhutdinov, D. Mimno: Evaluation methods for topic models, ICML 2009, section 5. The
    document's mixture of topics is estimated from its first, third, ... token, by iterations of the mean field from
    the uniform mixture: (alpha + expected tokens of the topic) / (K alpha + tokens).

    Args:
        probabilities: p(word | topic), shape (V, K).
        documents: as for `Sampler`.

    Returns:
        Log-likelihood of the second, fourth, ... tokens in nats, and their number, both of shape (n,).
    """
    likelihoods, numbers = np.zeros(len(documents)), np.zeros(len(documents), np.int64)
    for first in range(0, len(documents), _COMPLETED_TOGETHER):
        here = slice(first, first + _COMPLETED_TOGETHER)
        given, scored = documents[here, ::2], documents[here, 1::2]
        numbers[here] = (scored >= 0).sum(axis=1)
        mixture = _mixture(probabilities[given], given >= 0, alpha, iterations)
        likely = np.matmul(probabilities[scored], mixture[:, :, None])[:, :, 0]
        likelihoods[here] = np.log(likely, out=np.zeros_like(likely), where=scored >= 0).sum(axis=1)
    return likelihoods, numbers


def _mixture(words: Floats, is_token: npt.NDArray[np.bool_], alpha: float, iterations: int) -> Floats:
    """p(topic | document), shape (n, K), of documents whose tokens have p(word | topic) `words`, shape (n, l, K)."""
    num_topics = words.shape[2]
    mixture = np.full((len(words), num_topics), 1 / num_topics)
    total = (num_topics * alpha + is_token.sum(axis=1))[:, None]
    for _ in range(iterations):
        likely = np.matmul(words, mixture[:, :, None])[:, :, 0]
        shares = np.divide(is_token, likely, out=np.zeros_like(likely), where=is_token)
        mixture = (alpha + mixture * np.matmul(shares[:, None, :], words)[:, 0, :]) / total
    return mixture
