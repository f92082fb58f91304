"""Topics of a stream of texts: latent Dirichlet allocation by collapsed Gibbs sampling (`doll.tasks.lda`).

The model is two tables of counts. A worker samples the topics of a batch's tokens, and its step is what they add to the
counts. The sum of all steps is the counts of all documents, in whatever order they come.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from doll.errors import TaskError
from doll.tasks import lda
from doll.tasks.text import PADDING, TextTask

if TYPE_CHECKING:
    import torch


class Topics(TextTask):
    """Learns topics: `word_topic`, shape (V, K), tokens of each word by topic, and `topic`, shape (K,), their sums.

    It has no gradient: it needs a policy whose contribution is a step. Loss is the mean negative log-likelihood of a
    token in nats, by document completion (`lda.completion`); the metric `perplexity` is its exponential.

    Counts are float32. They are exact up to 2^24 tokens of one topic. Beyond, each sum is rounded to 24 bits: a topic's
    total then differs from the sum over its words by at most 6e-8 of it for each update, and what is drawn changes as
    little; but an update that adds less than half of the last bit to a count adds nothing.

    Args:
        topics: K.
        alpha, beta: priors of a document's topics and of a topic's words (`lda.Prior`).
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
        self.prior = lda.Prior(alpha, beta)

    def build_model(self) -> torch.nn.Module:
        import torch

        counts = torch.nn.Module()
        shape = (self.vocabulary.size, self.num_topics)
        counts.register_parameter("word_topic", torch.nn.Parameter(torch.zeros(shape)))
        counts.register_parameter("topic", torch.nn.Parameter(torch.zeros(self.num_topics)))
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
        change = lda.batch_change(counts, x, self.prior, sweeps=self.sweeps, rng=rng)
        step = np.zeros_like(weights)
        word_topic, topic = self._counts(step)
        word_topic[change.words] = change.word_topic
        topic[:] = change.topic
        return step

    def forward(self, model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """For each document, the log-likelihood of every second token in nats, and their number: float64, (n, 2).

        Raises:
            TaskError: a gradient is wanted.
        """
        import torch

        if torch.is_grad_enabled():
            raise TaskError("topics have no gradient: choose a policy whose contribution is a step")
        ids = x.numpy()
        words, places = np.unique(np.maximum(ids, 0), return_inverse=True)
        documents = np.where(ids >= 0, places.reshape(ids.shape), PADDING)  # in `words`: other rows are not needed
        word_topic, topic = (model.get_parameter(name).detach().numpy() for name in ("word_topic", "topic"))
        counts = lda.Counts(word_topic[words], topic)
        probabilities = lda.word_probabilities(counts, self.prior, self.vocabulary.size)
        likelihoods, numbers = lda.completion(probabilities, documents, self.prior.alpha)
        return torch.from_numpy(np.stack([likelihoods, numbers.astype(np.float64)], axis=1))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean over all tokens that `forward` scores; 0 without any."""
        return -output[:, 0].sum() / output[:, 1].sum().clamp(min=1.0)

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> Mapping[str, float]:
        return {"perplexity": math.exp(float(self.loss(output, target)))}

    def _counts(self, weights: npt.NDArray[np.float32]) -> lda.Counts:
        """Views into a vector of the model's layout."""
        size = self.vocabulary.size * self.num_topics
        if weights.shape != (size + self.num_topics,):
            raise ValueError(f"expected weights of shape ({size + self.num_topics},), got {weights.shape}")
        return lda.Counts(weights[:size].reshape(self.vocabulary.size, self.num_topics), weights[size:])
