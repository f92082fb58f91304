"""The task of topics: steps in the model's layout, counts that add up over workers, held-out loss, refusals."""

from __future__ import annotations

import itertools
import math
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
from doll.task.base import Sample, load_task, stack
from examples.lda import task as lda
from examples.lda.task import Topics
from paths import SHARED_DATA

pytestmark = pytest.mark.slow  # loads torch

REUTERS = SHARED_DATA / "reuters21578/docs.jsonl.gz"


def _task(**arguments: object) -> Topics:
    return Topics(**({"topics": 4, "vocabulary_size": 30, "max_tokens": 12} | arguments))  # type: ignore[arg-type]


def _documents(count: int, seed: int = 0) -> npt.NDArray[np.int32]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 13, (count, 1))
    return np.where(np.arange(12) < lengths, rng.integers(30, size=(count, 12)), -1).astype(np.int32)


def _step(task: Topics, weights: npt.NDArray[np.float32], x: npt.NDArray[np.int32], seed: int = 0) -> npt.NDArray[Any]:
    return task.step(weights, x, np.zeros(len(x)), np.random.default_rng(seed))


def test_a_step_is_laid_out_as_the_model_is() -> None:
    task = _task()
    model = FlatModel(task.build_model())
    assert model.shapes == (("word_topic", (30, 4)), ("topic", (4,)))
    assert not model.flat.any()
    x = _documents(9)
    step = _step(task, model.flat.detach().numpy(), x)
    assert step.dtype == np.float32
    model.load_weights(step)
    word_topic, topic = (model.module.get_parameter(name).detach().numpy() for name in ("word_topic", "topic"))
    assert (word_topic.sum(axis=1) == np.bincount(x[x >= 0], minlength=30)).all()
    assert (word_topic.sum(axis=0) == topic).all()


def test_steps_of_several_workers_at_old_weights_add_up_to_the_counts_of_all_documents() -> None:
    """Whatever version each worker has seen, and in whatever order the server adds."""
    task, batches = _task(), [_documents(5, seed) for seed in range(12)]
    weights, versions = np.zeros(124, np.float32), [np.zeros(124, np.float32)]
    rng = np.random.default_rng(7)
    pending: list[npt.NDArray[Any]] = []
    for seed, x in enumerate(batches):
        pending.append(_step(task, versions[rng.integers(len(versions))], x, seed))
        if len(pending) > 2:
            weights = weights + pending.pop(int(rng.integers(len(pending))))
            versions.append(weights)
    weights = weights + np.sum(pending, axis=0, dtype=np.float32)
    tokens = np.concatenate(batches)
    word_topic, topic = weights[:120].reshape(30, 4), weights[120:]
    assert (word_topic.sum(axis=1) == np.bincount(tokens[tokens >= 0], minlength=30)).all()
    assert (word_topic.sum(axis=0) == topic).all()
    assert topic.min() >= 0


def test_a_batch_that_is_computed_again_gives_the_same_step() -> None:
    task, x = _task(), _documents(8)
    weights = _step(task, np.zeros(124, np.float32), _documents(20, 1))
    kept = weights.copy()
    assert _step(task, weights, x, 3).tobytes() == _step(task, weights, x, 3).tobytes()
    assert _step(task, weights, x, 3).tobytes() != _step(task, weights, x, 4).tobytes()
    assert (weights == kept).all()


def test_a_worker_draws_the_same_topics_whenever_it_computes_a_batch() -> None:
    config = job_config.parse(
        "job: t\ntraining: {policy: {name: ssp}}\ntask: {class: 'examples.lda.task:Topics', "
        "args: {topics: 4, vocabulary_size: 30, max_tokens: 12}}"
    )
    task = load_task(config)
    model = build(config, task)
    x = _documents(9)
    steps = []
    for worker, batch in ((0, 3), (0, 4), (0, 3), (1, 3)):
        gradient, bad = OwnSteps(config, task, model, worker).compute(x, np.zeros(9), batch=batch)
        assert bad == {}
        assert gradient is not None
        assert gradient.values.sum() == 2 * (x >= 0).sum()  # each token is in both tables
        assert gradient.loss_sum == pytest.approx(9 * math.log(30))
        steps.append(gradient.values.tobytes())
    assert steps[0] == steps[2]
    assert len(set(steps)) == 3


def test_documents_without_tokens_change_nothing() -> None:
    assert not _step(_task(), np.ones(124, np.float32), np.full((3, 12), -1, np.int32)).any()


@pytest.mark.parametrize(("place", "value"), [(120, -1.0), (0, -0.5), (123, np.nan), (1, np.inf)])
def test_counts_that_are_none_are_refused(place: int, value: float) -> None:
    weights = np.ones(124, np.float32)
    weights[place] = value
    with pytest.raises(TaskError, match=f"expected finite counts >= 0, got {value}.*adds each step as it is"):
        _step(_task(), weights, np.zeros((1, 12), np.int32))
    with pytest.raises(ValueError, match=r"expected weights of shape \(124,\), got \(123,\)"):
        _step(_task(), weights[1:], np.zeros((1, 12), np.int32))


def test_a_gradient_is_refused_with_what_to_choose() -> None:
    task = _task()
    computer = GradientComputer(task, FlatModel(task.build_model()))
    with pytest.raises(TaskError, match="topics have no gradient: choose a policy whose contribution is a step"):
        computer.compute(_documents(3), np.zeros(3))
    assert computer.loss(_documents(3), np.zeros(3)) == pytest.approx(math.log(30))  # before any count


def test_the_held_out_loss_is_that_of_document_completion() -> None:
    task, x = _task(), _documents(40)
    model = FlatModel(task.build_model())
    model.load_weights(_step(task, np.zeros(124, np.float32), _documents(60, 1)))
    task.holdout = lambda: [Sample(row, 0) for row in x]  # type: ignore[method-assign]
    error = HeldOut(task, 100).evaluate(model.module)
    counts = lda.Counts(*(model.module.get_parameter(name).detach().numpy() for name in ("word_topic", "topic")))
    likelihoods, numbers = lda.completion(lda.word_probabilities(counts, task.prior), x, task.prior.alpha)
    assert error.loss == pytest.approx(-likelihoods.sum() / numbers.sum())
    assert error.metrics["perplexity"] == pytest.approx(math.exp(error.loss))
    empty = torch.full((2, 12), -1)
    with torch.no_grad():
        assert float(task.loss(task.forward(model.module, empty), empty)) == 0.0


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
    model = build(config, task)
    weights = np.zeros(model.flat.numel(), np.float32)
    x, y = stack(map(task.decode, itertools.islice(sources.open_streams(config, [0])[0], 1500)))
    rng = np.random.default_rng(0)
    for first in range(0, len(x), 50):
        weights += task.step(weights, x[first : first + 50], y[first : first + 50], rng)
    model.load_weights(weights)
    error = HeldOut(task, 1000).evaluate(model.module)
    held_out, _ = stack(task.holdout())
    counts = np.bincount(x[x >= 0], minlength=8192) + 1.0
    scored = held_out[:, 1::2]
    frequencies = -np.log((counts / counts.sum())[scored[scored >= 0]]).mean()
    assert error.loss < frequencies - 0.1
