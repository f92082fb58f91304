"""LDA by Gibbs sampling: the conditional distribution by brute force, wrong samplers, counts, completion."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from examples.lda import task as lda
from examples.lda.task import Counts, Prior, Sampler, completion, conditional, word_probabilities
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.slow  # loads torch

PRIOR = Prior(alpha=0.4, beta=0.2)
DOCUMENTS = np.array([[0, 1, 0], [2, 1, -1]])  # 5 tokens of 3 of 12 words
BEFORE = Counts(np.zeros((12, 2)), np.array([1.0, 2.0]))  # 2 topics; 3 tokens are counted already
BEFORE.word_topic[:2] = [[1, 0], [0, 2]]
PLACES = list(zip(*np.nonzero(DOCUMENTS >= 0), strict=True))
State = tuple[int, ...]  # topic of each token


def _tables(state: State, without: int = -1) -> tuple[npt.NDArray[np.float64], Counts]:
    """n_dk, n_wk and n_k of a state, `BEFORE` included."""
    document, word, topic = np.zeros((2, 2)), BEFORE.word_topic.copy(), BEFORE.topic.copy()
    for token, ((row, place), k) in enumerate(zip(PLACES, state, strict=True)):
        if token != without:
            document[row, k] += 1
            word[DOCUMENTS[row, place], k] += 1
            topic[k] += 1
    return document, Counts(word, topic)


def _log_joint(state: State) -> float:
    """log p(tokens, topics) up to a constant: both Dirichlet distributions integrated out (equations 2 and 3)."""
    document, (word, topic) = _tables(state)
    return (
        sum(math.lgamma(n + PRIOR.alpha) for n in document.ravel())
        + sum(math.lgamma(n + PRIOR.beta) for n in word.ravel())
        - sum(math.lgamma(n + 12 * PRIOR.beta) for n in topic)
    )


def _posterior() -> dict[State, float]:
    states = list(itertools.product(range(2), repeat=len(PLACES)))
    weights = np.exp([_log_joint(state) for state in states])
    return dict(zip(states, weights / weights.sum(), strict=True))


def _chain(cls: type[Sampler], sweeps: int = 6000) -> Iterator[State]:
    sampler = cls(BEFORE, DOCUMENTS, PRIOR, together=1)
    rng = np.random.default_rng(3)
    for _ in range(sweeps):
        sampler.sweep(rng)
        yield tuple(sampler.topics[DOCUMENTS >= 0].tolist())


def _distance(cls: type[Sampler]) -> float:
    """Total variation between what a sampler visits and the posterior."""
    seen = Counter(_chain(cls))
    total = sum(seen.values())
    return sum(abs(seen[state] / total - p) for state, p in _posterior().items()) / 2


# --- the distribution ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", range(len(PLACES)))
def test_the_conditional_distribution_is_that_of_the_joint(token: int) -> None:
    row, place = PLACES[token]
    for state in itertools.product(range(2), repeat=len(PLACES)):
        options = [(*state[:token], k, *state[token + 1 :]) for k in range(2)]
        exact = np.exp([_log_joint(option) for option in options])
        document, (word, topic) = _tables(state, without=token)
        weights = conditional(document[row], word[DOCUMENTS[row, place]], topic, PRIOR, 12)
        np.testing.assert_allclose(weights / weights.sum(), exact / exact.sum(), rtol=1e-12)


def test_a_chain_visits_states_as_the_posterior_says() -> None:
    assert _distance(Sampler) < 0.03


@pytest.mark.parametrize("table", ["_document_topic", "_word_topic", "_topic"])
def test_a_sampler_that_counts_the_token_itself_is_seen(table: str) -> None:
    class CountsItself(Sampler):
        def _count(self, here: lda.Integers, words: lda.Integers, topics: lda.Integers, sign: float) -> None:
            before = getattr(self, table).copy()
            super()._count(here, words, topics, sign)
            if sign < 0:
                setattr(self, table, before)

    assert _distance(CountsItself) > 0.1


def test_a_sampler_that_forgets_how_many_words_there_are_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lda, "conditional", lambda document, word, topic, prior, _: conditional(
        document, word, topic, prior, 1))  # fmt: skip
    assert _distance(Sampler) > 0.06


def _plain(documents: npt.NDArray[np.int64], counts: Counts, sweeps: int, rng: np.random.Generator) -> list[list[int]]:
    """The same algorithm without arrays: token after token."""
    num_words, num_topics = counts.word_topic.shape
    word_topic, topic = counts.word_topic.tolist(), counts.topic.tolist()
    document_topic = [[0] * num_topics for _ in documents]
    topics = [[-1 for token in row if token >= 0] for row in documents.tolist()]
    for _ in range(sweeps):
        for d, row in enumerate(topics):
            for place, old in enumerate(row):
                w = int(documents[d, place])
                if old >= 0:
                    document_topic[d][old] -= 1
                    word_topic[w][old] -= 1
                    topic[old] -= 1
                weights = [
                    (document_topic[d][k] + PRIOR.alpha) * (word_topic[w][k] + PRIOR.beta)
                    / (topic[k] + num_words * PRIOR.beta) for k in range(num_topics)
                ]  # fmt: skip
                point = rng.random() * sum(weights)
                new = next(k for k, total in enumerate(itertools.accumulate(weights)) if point < total)
                row[place] = new
                document_topic[d][new] += 1
                word_topic[w][new] += 1
                topic[new] += 1
    return topics


def test_one_after_the_other_is_the_plain_algorithm() -> None:
    rng = np.random.default_rng(0)
    documents = rng.integers(20, size=(6, 15))
    for row, length in enumerate((15, 12, 12, 5, 1, 0)):
        documents[row, length:] = -1
    word_topic = rng.integers(9, size=(20, 4)).astype(np.float32)
    counts = Counts(word_topic, word_topic.sum(axis=0))
    sampler, generator = Sampler(counts, documents, PRIOR, together=1), np.random.default_rng(5)
    for _ in range(4):
        sampler.sweep(generator)
    plain = _plain(documents, counts, 4, np.random.default_rng(5))
    assert [row[row >= 0].tolist() for row in sampler.topics] == plain


# --- counts --------------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    together=st.one_of(st.none(), st.integers(1, 9)),
    sweeps=st.integers(1, 3),
)
def test_a_batch_adds_each_of_its_tokens_once(seed: int, lengths: list[int], together: int | None, sweeps: int) -> None:
    rng = np.random.default_rng(seed)
    documents = np.where(np.arange(9) < np.array(lengths)[:, None], rng.integers(12, size=(len(lengths), 9)), -1)
    word_topic = rng.integers(9, size=(12, 3)).astype(np.float32)
    counts = Counts(word_topic, word_topic.sum(axis=0))
    kept = Counts(*(table.copy() for table in counts))
    sampler = Sampler(counts, documents, PRIOR, together=together)
    for _ in range(sweeps):
        sampler.sweep(rng)
    change = sampler.change()
    tokens = documents[documents >= 0]
    assert change.words.tolist() == sorted(set(tokens.tolist()))
    assert change.word_topic.sum(axis=1).tolist() == [(tokens == word).sum() for word in change.words]
    assert change.topic.tolist() == change.word_topic.sum(axis=0).tolist()
    assert (change.word_topic >= 0).all()
    assert (change.word_topic == np.floor(change.word_topic)).all()
    assert ((sampler.topics >= 0) == (documents >= 0)).all()
    expected = np.bincount(sampler.topics[documents >= 0], minlength=3)
    assert change.topic.tolist() == expected.tolist()
    assert all((table == before).all() for table, before in zip(counts, kept, strict=True))


def test_a_sampler_that_goes_on_from_topics_is_the_one_that_was_not_interrupted() -> None:
    """Where all counts are there: those of the documents are withdrawn token by token."""
    rng = np.random.default_rng(1)
    documents = np.where(np.arange(12) < rng.integers(1, 13, (6, 1)), rng.integers(20, size=(6, 12)), -1)
    word_topic = rng.integers(9, size=(20, 4)).astype(np.float64)
    counts = Counts(word_topic, word_topic.sum(axis=0))
    whole, generator = Sampler(counts, documents, PRIOR), np.random.default_rng(5)
    whole.sweep(generator)
    change, topics = whole.change(), whole.topics
    whole.sweep(generator)
    later = Counts(word_topic.copy(), counts.topic + change.topic)
    later.word_topic[change.words] += change.word_topic
    generator = np.random.default_rng(5)
    generator.random((int((documents >= 0).sum()), 1))
    rest = Sampler(later, documents, PRIOR, topics=topics)
    rest.sweep(generator)
    assert rest.topics.tolist() == whole.topics.tolist()
    assert (rest.change().word_topic.sum(axis=1) == 0).all(), "as many tokens are withdrawn as are counted"
    assert rest.change().word_topic.min() < 0


def _change(counts: Counts, documents: npt.NDArray[np.int64], sweeps: int, seed: int) -> lda.Change:
    sampler, rng = Sampler(counts, documents, PRIOR), np.random.default_rng(seed)
    for _ in range(sweeps):
        sampler.sweep(rng)
    return sampler.change()


def test_one_seed_draws_one_change() -> None:
    documents = np.random.default_rng(0).integers(30, size=(5, 20))
    counts = Counts(np.zeros((30, 4)), np.zeros(4))
    changes = [_change(counts, documents, 2, seed) for seed in (1, 1, 2)]
    assert changes[0].word_topic.tobytes() == changes[1].word_topic.tobytes()
    assert changes[0].word_topic.tobytes() != changes[2].word_topic.tobytes()


def test_counts_above_2_to_the_24_are_rounded_and_still_sampled() -> None:
    """A float32 takes no single token more there: `Topics` says so. The distribution hardly changes."""
    large = np.float32(2**24)
    assert large + np.float32(1) == large
    exact = conditional(np.ones(2), np.array([2.0**24 + 1, 5e6]), np.array([2.0**25 + 1, 3e7]), PRIOR, 100)
    rounded = conditional(np.ones(2), np.array([2.0**24, 5e6]), np.array([2.0**25, 3e7]), PRIOR, 100)
    np.testing.assert_allclose(rounded, exact, rtol=1e-6)
    counts = Counts(np.full((3, 2), large), np.full(2, 3 * large))
    change = _change(counts, DOCUMENTS, 3, 0)
    assert change.word_topic.sum() == 5  # in the sampler's float64 no token is lost


@pytest.mark.parametrize(
    ("documents", "message"),
    [([[0, -1, 1]], "got a -1 before a token"), ([[0, 12, -1]], "expected ids below 12, got 12")],
)
def test_documents_that_are_none_are_refused(documents: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(BEFORE, np.array(documents), PRIOR)


# --- learning and completion ---------------------------------------------------------------------------------------


def _corpus(count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Documents of 40 tokens of 100 words: topic k of 5 has words 20 k .. 20 k + 19, equally often."""
    mixtures = rng.dirichlet(np.full(5, 0.2), count)
    topics = np.stack([rng.choice(5, 40, p=mixture) for mixture in mixtures])
    return 20 * topics + rng.integers(20, size=topics.shape)


def _learned(documents: npt.NDArray[np.int64], together: int | None, sweeps: int = 5) -> Counts:
    counts, prior, rng = Counts(np.zeros((100, 10)), np.zeros(10)), Prior(0.2, 0.1), np.random.default_rng(1)
    for first in range(0, len(documents), 25):
        sampler = Sampler(counts, documents[first : first + 25], prior, together=together)
        for _ in range(sweeps):
            sampler.sweep(rng)
        change = sampler.change()
        counts.word_topic[change.words] += change.word_topic
        counts.topic[:] += change.topic
    return counts


def _perplexity(probabilities: npt.NDArray[np.float64], documents: npt.NDArray[np.int64]) -> float:
    likelihoods, numbers = completion(probabilities, documents, 0.2)
    return float(np.exp(-likelihoods.sum() / numbers.sum()))


def test_topics_are_found_side_by_side_as_well_as_one_after_the_other() -> None:
    rng = np.random.default_rng(0)
    documents, held_out = _corpus(300, rng), _corpus(100, rng)
    true = np.zeros((100, 5))
    for topic in range(5):
        true[20 * topic : 20 * topic + 20, topic] = 1 / 20
    best = _perplexity(true + 1e-12, held_out)
    exact, parallel = (
        _perplexity(word_probabilities(_learned(documents, together), Prior(0.2, 0.1)), held_out)
        for together in (1, None)
    )
    assert best < 50
    assert exact < 1.2 * best  # 100 words without topics
    assert parallel == pytest.approx(exact, rel=0.05)


def test_completion_scores_every_second_token() -> None:
    words = np.array([[0.5, 0.0], [0.5, 0.0], [0.0, 1.0]])  # two words of topic 0, one of topic 1
    documents = np.array([[0, 1, 0, 0, 1], [0, 2, -1, -1, -1], [2, -1, -1, -1, -1], [-1] * 5])
    likelihoods, numbers = completion(words, documents, alpha=0.5)
    assert numbers.tolist() == [2, 1, 0, 0]
    share = (3 + 0.5) / (3 + 1)  # of topic 0, after three tokens that only it has
    assert likelihoods[0] == pytest.approx(2 * math.log(share / 2))
    assert likelihoods[1] == pytest.approx(math.log(0.5 / 2))
    assert likelihoods[2:].tolist() == [0.0, 0.0]


def test_completion_does_not_depend_on_the_other_documents() -> None:
    rng = np.random.default_rng(0)
    documents, words = rng.integers(50, size=(150, 12)), rng.dirichlet(np.ones(50), 4).T
    together = completion(words, documents, 0.3)[0]
    alone = [completion(words, documents[[row]], 0.3)[0][0] for row in range(150)]
    np.testing.assert_allclose(together, alone, rtol=1e-12)
