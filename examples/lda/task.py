"""Topics of a stream of texts: latent Dirichlet allocation by collapsed Gibbs sampling.

The model consists of counts: a table `word_topic` with a row for each word, and `topic`, its sum over words. A worker
samples the topics of a batch's tokens; its step is the resulting change of the counts. The sum of all steps is the
counts of all texts, whatever their order is.

T. Griffiths, M. Steyvers: Finding scientific topics, PNAS 101 (2004), equation 5. Without `texts`, each text of the
stream is sampled once, given the counts of all earlier texts; then its own counts are added permanently. With `texts`,
a stream may send its texts repeatedly: a table `text_topics` keeps the topics of a text's tokens, and when the text is
sampled again, its old counts are subtracted, token by token. So further passes are further sweeps of the sampler, and a
text counts once, however often it is sent. A text must always come from the same stream (`source.numbered`), because a
worker sees its own steps at once, and other workers' steps late.

Documents that are sampled in parallel do not see each other's topics at the same place, and neither do batches on
several workers: approximate distributed LDA (D. Newman, A. Asuncion, P. Smyth, M. Welling, JMLR 10 (2009), section
3.1).
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
from doll.tables.rows import LookUp, Rows
from doll.task.text import PADDING
from torch import nn

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_WORD_TOPIC: Final = "word_topic.weight"
_TEXT_TOPICS: Final = "text_topics.weight"
_COMPLETED_TOGETHER: Final = 64  # number of documents; more need more memory than a cache has
# Topic k of a token is stored as (k + 1) times this value; 0: the token has no topic. Each change is less than 1, the
# smallest change of a count, so a policy that bounds changes (vap) bounds the changes of counts. Exact in float32.
_UNIT: Final = 2.0**-12
MAX_TOPICS: Final = 4095


class Counts(NamedTuple):
    """The tokens of each word by topic: `word_topic`, shape (V, K); and their sum over words: `topic`, shape (K,)."""

    word_topic: npt.NDArray[Any]
    topic: npt.NDArray[Any]


class Prior(NamedTuple):
    """Parameters of the symmetric Dirichlet priors: `alpha` of a document's topics, `beta` of a topic's words."""

    alpha: float
    beta: float


class Change(NamedTuple):
    """The change of the counts by a batch.

    Attributes:
        words: words of the batch, ascending, int64, shape (u,).
        word_topic: whole numbers to add to the rows of `words`, float64, shape (u, K); negative if more tokens have
            lost a topic than got it.
        topic: float64, shape (K,): the sum of `word_topic` over its rows.
    """

    words: Integers
    word_topic: Floats
    topic: Floats


class Topics(TextTask):
    """Learns topics: `word_topic`, V rows of K counts of tokens by word and topic, and `topic`, shape (K,), their sums.

    The task has no gradient, so it needs a policy whose contribution is a step. The loss is the mean negative
    log-likelihood of a token in nats, by document completion (`completion`); the metric `perplexity` is its
    exponential.

    Counts are float32. They are exact up to 2^24 tokens of one topic. Beyond this, each sum is rounded to 24 bits: the
    total of a topic then differs from the sum over its words by a share of at most 6e-8 for each update, and draws
    change as little. But an update that adds less than half of the last bit to a count adds nothing.

    Args:
        topics: K, the number of topics.
        alpha, beta: priors of a document's topics and of a topic's words (`Prior`).
        sweeps: number of times that the topic of each token of a batch is drawn, each time the batch is computed.
        text: arguments of `TextTask`. With `texts`, `text_topics` has a row of `max_tokens` for each text: the topics
            of its tokens, in units of 2^-12.
    """

    def __init__(
        self, topics: int = 50, *, alpha: float = 0.05, beta: float = 0.1, sweeps: int = 5, **text: Any
    ) -> None:
        if not 1 <= topics <= MAX_TOPICS:
            raise ValueError(f"expected 1 to {MAX_TOPICS} topics, got {topics}")
        if sweeps < 1 or not (0 < alpha < math.inf and 0 < beta < math.inf):
            raise ValueError(f"expected sweeps, alpha and beta above 0, got {sweeps}, {alpha} and {beta}")
        super().__init__(**text)
        self.num_topics = topics
        self.sweeps = sweeps
        self.prior = Prior(alpha, beta)

    def build_model(self) -> nn.Module:
        model = nn.Module()
        model.word_topic = _zero_table(self.vocabulary.size, self.num_topics)
        model.topic = nn.Parameter(torch.zeros(self.num_topics))
        if self.texts:
            model.text_topics = _zero_table(self.texts, self.max_tokens)
        self.add_checksum(model)
        return model

    def step_rows(
        self,
        weights: npt.NDArray[np.float32],
        look_up: LookUp,
        x: npt.NDArray[Any],
        y: npt.NDArray[Any],
        rng: np.random.Generator,
    ) -> tuple[npt.NDArray[np.float32], Mapping[str, Rows]]:
        """Return the changes by a batch of documents: of the counts, in whole numbers, and of the topics of its texts.

        A text that occurs in the batch several times is sampled once.

        Args:
            weights: `topic`, shape (K,).
            x: the documents, shape (n, max_tokens).
            y: the numbers of the texts, shape (n,), if the task has `texts`.

        Raises:
            TaskError: a count is negative or not finite, or the topics that are stored under a text's number belong to
                another text.
        """
        words = np.unique(x[x >= 0]).astype(np.int64)
        counts = Counts(look_up(_WORD_TOPIC, words), weights)
        values = np.append(counts.topic, counts.word_topic)
        good = np.isfinite(values) & (values >= 0)
        if not good.all():
            raise TaskError(
                f"expected finite counts >= 0, got {values[~good][0]}: the model of topics changes by adding steps "
                "only; choose a policy that adds each step as it is (no gradients, no weight decay)"
            )
        kept = None
        if self.texts:
            numbers, first = np.unique(y.astype(np.int64), return_index=True)
            x, kept = x[first], look_up(_TEXT_TOPICS, numbers)
        documents = np.where(x >= 0, np.searchsorted(words, np.maximum(x, 0)), PADDING)
        before = None if kept is None else kept_topics(kept, documents)
        sampler = Sampler(counts, documents, self.prior, num_words=self.vocabulary.size, topics=before)
        for _ in range(self.sweeps):
            sampler.sweep(rng)
        change = sampler.change()
        is_changed = change.word_topic.any(axis=1)
        rows = {_WORD_TOPIC: Rows(words[change.words[is_changed]], change.word_topic[is_changed].astype(np.float32))}
        if kept is not None:
            rows[_TEXT_TOPICS] = Rows(numbers, ((sampler.topics + 1) * _UNIT - kept).astype(np.float32))
        return change.topic.astype(np.float32), rows

    def forward(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return, for each document, the log-likelihood of every second token in nats, and their number: float64, (n,
        2).

        Raises:
            TaskError: a gradient is requested.
        """
        if torch.is_grad_enabled():
            raise TaskError("topics have no gradient: choose a policy whose contribution is a step")
        ids = x.numpy()
        words, places = np.unique(np.maximum(ids, 0), return_inverse=True)
        documents = np.where(ids >= 0, places.reshape(ids.shape), PADDING)  # rows in `words`: other rows are not needed
        word_topic = model.get_submodule("word_topic")(torch.from_numpy(words)).numpy()
        counts = Counts(word_topic, model.get_parameter("topic").detach().numpy())
        probabilities = word_probabilities(counts, self.prior, self.vocabulary.size)
        likelihoods, numbers = completion(probabilities, documents, self.prior.alpha)
        return torch.from_numpy(np.stack([likelihoods, numbers.astype(np.float64)], axis=1))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the mean over all tokens that `forward` scores; 0 without tokens."""
        return -output[:, 0].sum() / output[:, 1].sum().clamp(min=1.0)

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> Mapping[str, float]:
        return {"perplexity": math.exp(float(self.loss(output, target)))}


def _zero_table(num_rows: int, width: int) -> nn.Embedding:
    table = nn.Embedding(num_rows, width, sparse=True)
    nn.init.zeros_(table.weight)
    return table


def kept_topics(rows: npt.NDArray[np.float32], documents: npt.NDArray[Any]) -> Integers:
    """Return the topics of these documents' tokens from `text_topics`, shape (n, L); -1: no topic.

    Args:
        rows: rows of `text_topics` for the documents, shape (n, L).
        documents: as for `Sampler`.

    Raises:
        TaskError: the topics belong to other texts: some tokens of a text have a topic, and others do not.
    """
    topics: Integers = np.rint(rows / _UNIT).astype(np.int64) - 1
    has_topic, is_token = topics >= 0, documents >= 0
    if not ((has_topic == is_token).all(axis=1) | ~has_topic.any(axis=1)).all():
        raise TaskError(
            "expected one text under each number, with as many tokens whenever it comes, in one stream: set "
            "source.numbered, and keep the number of streams"
        )
    return topics


def conditional(document: Floats, word: Floats, topic: Floats, prior: Prior, num_words: int) -> Floats:
    """Return p(topic of a token | the topics of all other tokens), times a constant (equation 5).

    Args:
        document: n_dk, tokens of the document by topic, without the token, shape (..., K).
        word: n_wk, counts of its word, without the token, shape (..., K).
        topic: n_k, counts of all words, without the token, shape (..., K).
        num_words: V.
    """
    weights: Floats = (document + prior.alpha) * (word + prior.beta) / (topic + num_words * prior.beta)
    return weights


class Sampler:
    """The topics of one batch's tokens. Two equal samplers and generators draw the same topics, to the bit.

    Args:
        counts: counts of everything before the batch; they are not changed.
        documents: ids 0 .. V - 1 of the tokens, then -1 after a document's last token, shape (n, L).
        together: number of documents that are sampled in parallel; 1: one token after the other, exactly equation 5.
            None: all.
        num_words: V, if `counts.word_topic` has only the rows of some words; `documents` then numbers these rows.
        topics: topics of the tokens that `counts` includes, shape (n, L); -1: a token that it does not include. None:
            it includes none.

    Raises:
        ValueError: an id is out of range, or -1 is before a token.
    """

    def __init__(
        self,
        counts: Counts,
        documents: npt.NDArray[Any],
        prior: Prior,
        *,
        together: int | None = None,
        num_words: int | None = None,
        topics: npt.NDArray[Any] | None = None,
    ) -> None:
        num_rows, num_topics = counts.word_topic.shape
        self._num_words = num_words or num_rows
        is_token = documents >= 0
        lengths = is_token.sum(axis=1)
        if (is_token != (np.arange(documents.shape[1]) < lengths[:, None])).any():
            raise ValueError("expected the tokens of each document before its -1, got a -1 before a token")
        if documents.max(initial=-1) >= num_rows:
            raise ValueError(f"expected ids below {num_rows}, got {documents.max()}")
        self._prior = prior
        self._together = together or max(1, len(documents))
        self._order = np.argsort(-lengths, kind="stable")  # longest first, so texts with a token at a place come first
        self._lengths, is_token = lengths[self._order], is_token[self._order]
        self._words = np.zeros(documents.shape, np.int64)  # rows of `_word_topic`
        ids = documents[self._order][is_token].astype(np.int64)
        self._ids, self._words[is_token] = np.unique(ids, return_inverse=True)
        self._topics = np.full(documents.shape, -1) if topics is None else np.where(is_token, topics[self._order], -1)
        self._before = Counts(counts.word_topic[self._ids].astype(np.float64), counts.topic.astype(np.float64))
        self._word_topic, self._topic = self._before.word_topic.copy(), self._before.topic.copy()
        self._document_topic = np.zeros((len(documents), num_topics))
        rows, places = np.nonzero(self._topics >= 0)
        np.add.at(self._document_topic, (rows, self._topics[rows, places]), 1.0)

    @property
    def topics(self) -> Integers:
        """Return the topic of each token, shape (n, L); -1: there is no token, or its topic is not drawn yet."""
        topics = np.empty_like(self._topics)
        topics[self._order] = self._topics
        return topics

    def sweep(self, rng: np.random.Generator) -> None:
        """Draw each token's topic once. Tokens without a topic are not counted."""
        for first in range(0, len(self._lengths), self._together):
            lengths = self._lengths[first : first + self._together]
            for place in range(int(lengths[0])):
                self._draw(np.arange(first, first + int((lengths > place).sum())), place, rng)

    def change(self) -> Change:
        """Return the change of the counts by the batch."""
        before = self._before
        return Change(self._ids, self._word_topic - before.word_topic, self._topic - before.topic)

    def _draw(self, here: Integers, place: int, rng: np.random.Generator) -> None:
        """Draw the topics of the tokens at one place of the documents `here`, given all tokens at other places."""
        words, before = self._words[here, place], self._topics[here, place]
        has = before >= 0
        self._count(here[has], words[has], before[has], -1.0)
        weights = conditional(
            self._document_topic[here], self._word_topic[words], self._topic, self._prior, self._num_words
        )
        sums = np.cumsum(weights, axis=1)
        topics = (sums <= rng.random((len(words), 1)) * sums[:, -1:]).sum(axis=1)
        topics = np.minimum(topics, sums.shape[1] - 1)  # rounding may have given the sum of all
        self._count(here, words, topics, 1.0)
        self._topics[here, place] = topics

    def _count(self, here: Integers, words: Integers, topics: Integers, sign: float) -> None:
        """Add one token of each of the documents `here` to the counts, or subtract it."""
        self._document_topic[here, topics] += sign
        np.add.at(self._word_topic, (words, topics), sign)
        self._topic += sign * np.bincount(topics, minlength=len(self._topic))


def word_probabilities(counts: Counts, prior: Prior, num_words: int | None = None) -> Floats:
    """Return p(word | topic), shape (V, K): the mean of its posterior, given the topics of all tokens.

    Args:
        num_words: V, if `counts.word_topic` has only the rows of some words; the result then is for these words.
    """
    probabilities: Floats = (counts.word_topic.astype(np.float64) + prior.beta) / (
        counts.topic.astype(np.float64) + (num_words or len(counts.word_topic)) * prior.beta
    )
    return probabilities


def completion(
    probabilities: Floats, documents: npt.NDArray[Any], alpha: float, *, iterations: int = 50
) -> tuple[Floats, Integers]:
    """Score documents by completion: how likely the second, fourth, ... token is, given the other tokens.

    H. Wallach, I. Murray, R. Salakhutdinov, D. Mimno: Evaluation methods for topic models, ICML 2009, section 5. The
    document's mixture of topics is estimated from its first, third, ... token, with mean-field iterations from the
    uniform mixture: (alpha + expected tokens of the topic) / (K alpha + tokens).

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
    """Return p(topic | document), shape (n, K), for tokens with p(word | topic) `words`, shape (n, l, K)."""
    num_topics = words.shape[2]
    mixture = np.full((len(words), num_topics), 1 / num_topics)
    total = (num_topics * alpha + is_token.sum(axis=1))[:, None]
    for _ in range(iterations):
        likely = np.matmul(words, mixture[:, :, None])[:, :, 0]
        shares = np.divide(is_token, likely, out=np.zeros_like(likely), where=is_token)
        mixture = (alpha + mixture * np.matmul(shares[:, None, :], words)[:, 0, :]) / total
    return mixture
