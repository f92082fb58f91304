"""Topics whose texts come again and again, in whole jobs: the counts are those of the texts that were accepted."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from doll.consumers.tables.row_cache import OpLog
from doll.errors import TaskError
from doll.tables.rows import Floats
from examples.lda import task as lda
from examples.lda.task import Topics
from fuzzing import seeds
from threadless_jobs import BATCHES, WORKERS, Job, Worker

pytestmark = pytest.mark.slow  # loads torch

WORDS, TOPICS, LONGEST, BATCH = 30, 4, 9, 8
POLICIES = {
    "bsp": "{name: bsp, contribution: step}",
    "asp": "{name: asp, contribution: step}",
    "ssp": "{name: ssp, staleness: 3}",
    "essp": "{name: essp, staleness: 3}",
    "ssp, ahead": "{name: ssp, staleness: 3, under_way: 4}",
    "essp, ahead": "{name: essp, staleness: 3, under_way: 4}",
    "vap": "{name: vap, value_bound: 40}",
    "wsp": "{name: wsp, wave_batches: 2, clock_distance: 1}",
}


def text(number: int) -> npt.NDArray[np.int64]:
    """The words of a text; one in seven has none."""
    rng = np.random.default_rng([5, number])
    words: npt.NDArray[np.int64] = rng.integers(WORDS, size=rng.integers(1, LONGEST + 1) if number % 7 else 0)
    return words


def name(word: int) -> str:
    """A token of this id: letters only."""
    return chr(ord("a") + word // 6) + chr(ord("a") + word % 6)


class Repeated(Worker):
    """Its stream has the same texts again and again, each under its number."""

    per_pass = 11  # texts: no multiple of a batch

    def numbers(self, batch: int) -> list[int]:
        offsets = range(BATCH * batch, BATCH * batch + BATCH)
        return [self.number + WORKERS * (offset % self.per_pass) for offset in offsets]

    def values(self, number: int) -> list[bytes]:
        return [
            json.dumps({"text": " ".join(map(name, text(at).tolist())), "number": at}).encode()
            for at in self.numbers(number)
        ]


class ManyTimes(Repeated):
    """A batch has the same text several times."""

    per_pass = 3


class Preempted(Job):
    """Workers are lost before a batch, or behind it with its push."""

    worker_class = Repeated
    loss = 0.3

    def step(self) -> bool:
        if not (busy := self.busy()):
            return False
        worker, draw = self._rng.choice(busy), self._rng.random()
        if draw < self.loss / 2:
            order = worker.orders.popleft()
            worker.handler.handle(order.grant, order.batches, lambda batch, grant_id: True)
        if draw < self.loss:
            self.lost = getattr(self, "lost", 0) + 1
            self.replace(worker.number, f"p{worker.number}.{self.lost}")
        else:
            self.compute(worker)
        return True


class Repeating(Job):
    worker_class = Repeated


class RepeatingInABatch(Job):
    worker_class = ManyTimes


@pytest.fixture
def vocabulary(tmp_path: Any) -> str:
    path = tmp_path / "words.txt"
    path.write_text("".join(f"{name(word)}\n" for word in range(WORDS)))
    return str(path)


def run(cls: type[Job], policy: str, seed: int, vocabulary: str) -> Job:
    args = {"topics": TOPICS, "sweeps": 1, "vocabulary_file": vocabulary, "max_tokens": LONGEST, "texts": 60}
    return cls(policy, seed, task=json.dumps({"class": "examples.lda.task:Topics", "args": args}))


def problems(job: Job) -> list[str]:
    """What of the model is not as the accepted texts and their topics say."""
    tensors = job.host.tensors()
    word_topic: Floats = tensors["table.word_topic.weight.values"]
    kept: Floats = tensors["table.text_topics.weight.values"]
    topic = job.weights[:TOPICS]
    accepted = {number for worker, batch in job.order for number in job.workers[worker].numbers(batch)}  # type: ignore[attr-defined]
    tokens = np.zeros(WORDS)
    counted = np.zeros((WORDS, TOPICS))
    wrong = []
    for number in range(len(kept)):
        words = text(number) if number in accepted else np.empty(0, np.int64)
        documents = np.full((1, LONGEST), -1)
        documents[0, : len(words)] = words
        topics = lda.kept_topics(kept[number : number + 1], documents)[0]
        if (topics >= 0).sum() != len(words):
            wrong.append(f"text {number} has {(topics >= 0).sum()} topics for {len(words)} tokens")
        np.add.at(tokens, words, 1)
        np.add.at(counted, (words, topics[: len(words)]), 1)
    if (word_topic.sum(axis=1) != tokens).any():
        wrong.append(f"{word_topic.sum()} tokens are counted of {tokens.sum()}")
    if (word_topic != counted).any():
        wrong.append("the counts are not those of the kept topics")
    if (topic != word_topic.sum(axis=0)).any():
        wrong.append("the totals are not the sums over words")
    return wrong


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("cls", [Repeating, RepeatingInABatch, Preempted])
@pytest.mark.parametrize("seed", seeds(3))
def test_counts_are_those_of_the_texts_that_were_accepted(
    cls: type[Job], policy: str, seed: int, vocabulary: str
) -> None:
    job = run(cls, policy, seed, vocabulary)
    assert sorted(job.order) == [(worker, batch) for worker in range(WORKERS) for batch in range(BATCHES)]
    assert problems(job) == []
    assert not [letter for worker in job.workers for letter in worker.channel.letters]
    if cls is Preempted:
        assert job.lost >= 3  # type: ignore[attr-defined]


def test_a_void_batch_withdraws_nothing(vocabulary: str) -> None:
    job = run(Repeating, "{name: vap, value_bound: 15}", 0, vocabulary)
    assert job.engine.counters["requeued_void"]
    assert problems(job) == []


def test_old_counts_that_stay_are_noticed(vocabulary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lda, "kept_topics", lambda rows, documents: np.full(documents.shape, -1))
    assert problems(run(Repeating, POLICIES["ssp"], 0, vocabulary))


def test_a_worker_that_does_not_see_its_own_steps_withdraws_what_is_not_there(
    vocabulary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpLog, "add_to", lambda self, ids, rows: None)
    with pytest.raises(TaskError, match="expected finite counts >= 0, got -"):
        run(Repeating, POLICIES["wsp"], 0, vocabulary)


def test_a_text_of_another_length_under_a_number_is_refused() -> None:
    rows = np.zeros((2, 4), np.float32)
    rows[1, :2] = np.array([1, 3]) / 4096
    documents = np.array([[5, 6, -1, -1], [7, 8, -1, -1]])
    assert lda.kept_topics(rows, documents).tolist() == [[-1] * 4, [0, 2, -1, -1]]
    documents[1, 2] = 9
    with pytest.raises(TaskError, match="expected one text under each number"):
        lda.kept_topics(rows, documents)


def test_a_topic_that_is_kept_changes_by_less_than_a_count() -> None:
    with pytest.raises(ValueError, match="expected 1 to 4095 topics, got 4096"):
        Topics(4096, vocabulary_size=5)
