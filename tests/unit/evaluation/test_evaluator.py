"""Evaluations of models with tables, whose rows are in checkpoints only, and of averages of weights, which are too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import record_builders
import structlog
from doll.config import JobConfig, load
from doll.evaluation.evaluator import Evaluator
from doll.evaluation.stored_weights import newest_weights
from doll.model.flat_model import build, fingerprint
from doll.monitor.state.csv_file import read_rows
from doll.optim.recipe import make_optimizer
from doll.storage.checkpoints import Checkpoint
from doll.storage.stores import open_store
from doll.task.base import load_task
from memory_stores import MemoryBlobs

pytestmark = pytest.mark.slow  # loads torch

TASK = """
import torch
from doll import Sample, Task

class Bag(Task):
    num_classes = 2

    def __init__(self, sparse=True):
        self.sparse = sparse

    def build_model(self):
        return torch.nn.EmbeddingBag(10, 2, sparse=self.sparse)

    def forward(self, model, x):
        return model(x)

    def metrics(self, output, target):
        return {**super().metrics(output, target), "margin": float((output[:, 0] - output[:, 1]).abs().mean())}

    def decode(self, record):
        raise NotImplementedError

    def holdout(self):
        return [Sample([1, 2], 0), Sample([3, 4], 1)]
"""
JOB = """
job: j
task: {class: bag.py:Bag}
data: {workers: 1, batch_size: 1}
training: {policy: {name: doll, group_size: 1}}
"""


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    (tmp_path / "bag.py").write_text(TASK)
    (tmp_path / "job.yaml").write_text(JOB)
    return load(tmp_path / "job.yaml")


def test_a_machine_that_does_not_see_the_checkpoints_says_so_once(config: JobConfig, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    evaluator = Evaluator(config, MemoryBlobs(), folder)
    with structlog.testing.capture_logs() as logs:
        assert evaluator.evaluate_newest() is None
        assert logs == [], "no update, no checkpoint"
        evaluator.feed([record_builders.update(1, 1)])
        assert evaluator.evaluate_newest() is None
        assert evaluator.evaluate_newest() is None
    assert [entry["event"] for entry in logs] == ["no_checkpoint"]
    assert "set checkpoint.folder" in logs[0]["hint"]
    assert str(folder) in str(logs[0]["folder"])


@pytest.mark.parametrize("evaluates_average", [True, False])
def test_the_average_is_evaluated_at_checkpoints(config: JobConfig, tmp_path: Path, evaluates_average: bool) -> None:
    ema = f"training.ema={{decay: 0.5, evaluate: {str(evaluates_average).lower()}}}"
    config = load(config.base_folder / "job.yaml", ["task.args.sparse=false", ema])
    model = build(config, load_task(config))
    optimizer = make_optimizer(config.training, model)
    optimizer.apply([np.ones_like(optimizer.weights)], 1.0, 1)
    store = open_store(config, tmp_path)
    store.save(
        Checkpoint(
            job="j",
            fingerprint=fingerprint(config, model),
            term=store.claim_term(),
            version=1,
            state=b"",
            tensors=optimizer.tensors(),
        )
    )
    evaluator = Evaluator(config, MemoryBlobs(), tmp_path)
    evaluator.feed([record_builders.update(1, 1)])
    evaluation = evaluator.evaluate_newest()
    assert (evaluation is not None) == evaluates_average, "without one it reads published weights"
    if evaluation is not None:
        (row,) = read_rows(tmp_path / "evaluations.csv")
        assert row.items() >= {"accuracy": evaluation.error.accuracy, "version": 1, "void": 0}.items()
        assert row["margin"] == pytest.approx(evaluation.error.metrics["margin"], rel=1e-5)
        again = Evaluator(config, MemoryBlobs(), tmp_path)
        assert again.history.evaluations.row(0)["margin"] == row["margin"]
    both = [newest_weights(config, tmp_path, model, average=average) for average in (None, True, False)]
    assert [stored is not None and stored.is_average for stored in both] == [True, True, False]
    weights = [stored.weights for stored in both if stored is not None]
    assert not np.array_equal(weights[0], weights[2])
    assert weights[2].tobytes() == optimizer.weights.tobytes()
