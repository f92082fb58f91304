"""The task of topics: steps in the model's layout, counts that add up over workers, held-out loss, refusals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from doll import config as job_config
from doll.config import JobConfig
from doll.consumers.compute.gradient import GradientComputer
from doll.consumers.compute.task_steps import OwnSteps
from doll.errors import TaskError
from doll.evaluation.heldout import HeldOut
from doll.model.flat_model import FlatModel, build
from doll.producers import sources
from doll.tables.rows import Floats, Ids, Rows
from doll.task.base import Sample, load_task
from examples.lda import task as lda
from examples.lda.task import Topics
from fuzzing import seeds
from paths import SHARED_DATA
from stacked import stack

pytestmark = pytest.mark.slow  # loads torch

Step = tuple[npt.NDArray[np.float32], Mapping[str, Rows]]
REUTERS = SHARED_DATA / "reuters21578/docs.jsonl.gz"


def _task(**arguments: object) -> Topics:
    return Topics(**({"topics": 4, "vocabulary_size": 30, "max_tokens": 12} | arguments))  # type: ignore[arg-type]


def _documents(count: int, seed: int = 0) -> npt.NDArray[np.int32]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 13, (count, 1))
    return np.where(np.arange(12) < lengths, rng.integers(30, size=(count, 12)), -1).astype(np.int32)


class Counts:
    """The model of a task: all that it may look up, and what its steps have made of it."""

    def __init__(self, task: Topics) -> None:
        tables = {"word_topic.weight": (task.vocabulary.size, task.num_topics)}
        if task.texts:
            tables["text_topics.weight"] = (task.texts, task.max_tokens)
        self.task = task
        self.topic = np.zeros(task.num_topics, np.float32)
        self.rows = {name: np.zeros(shape, np.float32) for name, shape in tables.items()}

    @property
    def word_topic(self) -> npt.NDArray[np.float32]:
        return self.rows["word_topic.weight"]

    def look_up(self, name: str, ids: Ids) -> Floats:
        assert (np.diff(ids) > 0).all()
        return self.rows[name][ids]

    def step(self, x: npt.NDArray[Any], seed: int = 0, y: npt.NDArray[Any] | None = None) -> Step:
        y = np.zeros(len(x), np.int64) if y is None else y
        return self.task.step_rows(self.topic, self.look_up, x, y, np.random.default_rng(seed))

    def add(self, step: Step) -> None:
        topic, tables = step
        self.topic = self.topic + topic
        for name, (ids, values) in tables.items():
            self.rows[name] = self.rows[name].copy()
            self.rows[name][ids] += values

    def copy(self) -> Counts:
        other = Counts(self.task)
        other.topic, other.rows = self.topic, dict(self.rows)
        return other

    def module(self) -> torch.nn.Module:
        module = self.task.build_model()
        module.load_state_dict(
            {"topic": torch.from_numpy(self.topic)} | {name: torch.from_numpy(rows) for name, rows in self.rows.items()}
        )
        return module


def test_a_step_is_of_the_words_of_its_batch() -> None:
    counts, x = Counts(_task()), _documents(9)
    step = counts.step(x)
    topic, tables = step
    ids, values = tables["word_topic.weight"]
    assert (topic.dtype, values.dtype, list(tables)) == (np.float32, np.float32, ["word_topic.weight"])
    assert ids.tolist() == sorted(set(x[x >= 0].tolist()))
    counts.add(step)
    assert (counts.word_topic.sum(axis=1) == np.bincount(x[x >= 0], minlength=30)).all()
    assert (counts.word_topic.sum(axis=0) == counts.topic).all()


def test_steps_of_several_workers_at_old_weights_add_up_to_the_counts_of_all_documents() -> None:
    """Whatever version each worker has seen, and in whatever order the server adds."""
    batches = [_documents(5, seed) for seed in range(12)]
    counts = Counts(_task())
    versions = [counts.copy()]
    rng = np.random.default_rng(7)
    pending: list[Step] = []
    for seed, x in enumerate(batches):
        pending.append(versions[rng.integers(len(versions))].step(x, seed))
        if len(pending) > 2:
            counts.add(pending.pop(int(rng.integers(len(pending)))))
            versions.append(counts.copy())
    for step in pending:
        counts.add(step)
    tokens = np.concatenate(batches)
    assert (counts.word_topic.sum(axis=1) == np.bincount(tokens[tokens >= 0], minlength=30)).all()
    assert (counts.word_topic.sum(axis=0) == counts.topic).all()
    assert counts.topic.min() >= 0


def _bytes(step: Step) -> bytes:
    topic, tables = step
    return topic.tobytes() + b"".join(part.tobytes() for name in sorted(tables) for part in tables[name])


def test_a_batch_that_is_computed_again_gives_the_same_step() -> None:
    counts, x = Counts(_task()), _documents(8)
    counts.add(counts.step(_documents(20, 1)))
    kept = counts.topic.copy(), counts.word_topic.copy()
    assert _bytes(counts.step(x, 3)) == _bytes(counts.step(x, 3)) != _bytes(counts.step(x, 4))
    assert (counts.topic == kept[0]).all()
    assert (counts.word_topic == kept[1]).all()


def test_more_passes_withdraw_what_they_count_again() -> None:
    task, x = _task(texts=40, sweeps=1), _documents(40)
    counts, numbers = Counts(task), np.arange(40)
    for seed in seeds(20):
        counts.add(counts.step(x, seed, numbers))
        assert (counts.word_topic.sum(axis=1) == np.bincount(x[x >= 0], minlength=30)).all()
        assert counts.word_topic.min() >= 0
    topics = lda.kept_topics(counts.rows["text_topics.weight"], x)
    assert np.bincount(topics[x >= 0], minlength=4).tolist() == counts.topic.tolist()


def test_a_worker_draws_the_same_topics_whenever_it_computes_a_batch() -> None:
    config = job_config.parse(
        "job: t\ntraining: {policy: {name: ssp}}\ntask: {class: 'examples.lda.task:Topics', "
        "args: {topics: 4, vocabulary_size: 30, max_tokens: 12}}"
    )
    task = load_task(config)
    model = build(config, task)
    assert model.tables is not None
    model.tables.connect(lambda name, ids: np.zeros((len(ids), 4), np.float32))
    x = _documents(9)
    steps = []
    for seed in (3, 4, 3):
        gradient, bad = OwnSteps(config, task, model).compute(x, np.zeros(9), seed=seed)
        assert bad == {}
        assert gradient is not None
        values = gradient.rows["word_topic.weight"].values
        assert gradient.values.sum() == values.sum() == (x >= 0).sum()
        assert gradient.norm == pytest.approx(math.hypot(np.linalg.norm(gradient.values), np.linalg.norm(values)))
        assert gradient.loss_sum == pytest.approx(9 * math.log(30))
        steps.append(values.tobytes())
    assert steps[0] == steps[2]
    assert len(set(steps)) == 2


def test_documents_without_tokens_change_nothing() -> None:
    topic, tables = Counts(_task()).step(np.full((3, 12), -1, np.int32))
    assert not topic.any()
    assert not len(tables["word_topic.weight"].ids)


@pytest.mark.parametrize(("word", "place", "value"), [(-1, 0, -1.0), (0, 0, -0.5), (-1, 3, np.nan), (0, 1, np.inf)])
def test_counts_that_are_none_are_refused(word: int, place: int, value: float) -> None:
    counts = Counts(_task())
    (counts.topic if word < 0 else counts.word_topic[word])[place] = value
    with pytest.raises(TaskError, match=f"expected finite counts >= 0, got {value}.*adds each step as it is"):
        counts.step(np.zeros((1, 12), np.int32))


def test_a_gradient_is_refused_with_what_to_choose() -> None:
    task = _task()
    computer = GradientComputer(task, FlatModel(task.build_model()))
    with pytest.raises(TaskError, match="topics have no gradient: choose a policy whose contribution is a step"):
        computer.compute(_documents(3), np.zeros(3))
    assert computer.loss(_documents(3), np.zeros(3)) == pytest.approx(math.log(30))  # before any count


def test_the_held_out_loss_is_that_of_document_completion() -> None:
    task, x = _task(), _documents(40)
    made = Counts(task)
    made.add(made.step(_documents(60, 1)))
    module = made.module()
    task.holdout = lambda: [Sample(row, 0) for row in x]  # type: ignore[method-assign]
    error = HeldOut(task, 100).evaluate(module)
    counts = lda.Counts(made.word_topic, made.topic)
    likelihoods, numbers = lda.completion(lda.word_probabilities(counts, task.prior), x, task.prior.alpha)
    assert error.loss == pytest.approx(-likelihoods.sum() / numbers.sum())
    assert error.metrics["perplexity"] == pytest.approx(math.exp(error.loss))
    empty = torch.full((2, 12), -1)
    with torch.no_grad():
        assert float(task.loss(task.forward(module, empty), empty)) == 0.0


def _reuters() -> tuple[JobConfig, Topics]:
    path = REUTERS.resolve()
    config = job_config.parse(
        "job: t\ndata: {workers: 1}\ntraining: {policy: {name: ssp}}\n"
        f"source: {{kind: text, path: '{path}', fields: [title, body], skip: 200}}\n"
        "task: {class: 'examples.lda.task:Topics', args: {topics: 20, vocabulary_size: 8192, stop_words: english, "
        f"sweeps: 3, fields: [title, body], holdout_path: '{path}', holdout_lines: 200}}}}"
    )
    task = load_task(config)
    assert isinstance(task, Topics)
    return config, task


def test_topics_of_reuters_predict_held_out_words_better_than_their_frequencies() -> None:
    if not REUTERS.is_file():
        pytest.skip("needs the Reuters-21578 file in ../shared/data")
    config, task = _reuters()
    counts = Counts(task)
    x, y = stack(map(task.decode, itertools.islice(sources.open_streams(config, [0])[0], 1500)))
    for first in range(0, len(x), 50):
        counts.add(counts.step(x[first : first + 50], first, y[first : first + 50]))
    error = HeldOut(task, 1000).evaluate(counts.module())
    held_out, _ = stack(task.holdout())
    occur = np.bincount(x[x >= 0], minlength=8192) + 1.0
    scored = held_out[:, 1::2]
    frequencies = -np.log((occur / occur.sum())[scored[scored >= 0]]).mean()
    assert error.loss < frequencies - 0.1
