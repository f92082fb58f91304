"""Evaluations of models with tables, whose rows are in checkpoints only."""

from __future__ import annotations

from pathlib import Path

import pytest
import record_builders
import structlog
from doll.config import JobConfig, load
from doll.evaluation.evaluator import Evaluator
from doll.evaluation.stored_weights import newest_weights
from memory_stores import MemoryBlobs

pytestmark = pytest.mark.slow  # loads torch

TASK = """
import torch
from doll import Sample, Task

class Bag(Task):
    num_classes = 2

    def build_model(self):
        return torch.nn.EmbeddingBag(10, 2, sparse=True)

    def forward(self, model, x):
        return model(x)

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
    evaluator = Evaluator(
        config, MemoryBlobs(), lambda model, beside: newest_weights(config, folder, model, beside=beside), folder
    )
    with structlog.testing.capture_logs() as logs:
        assert evaluator.evaluate_newest() is None
        assert logs == [], "no update, no checkpoint"
        evaluator.feed([record_builders.update(1, 1)])
        assert evaluator.evaluate_newest() is None
        assert evaluator.evaluate_newest() is None
    assert [entry["event"] for entry in logs] == ["no_checkpoint"]
    assert "set checkpoint.folder" in logs[0]["hint"]
    assert str(folder) in str(logs[0]["folder"])
