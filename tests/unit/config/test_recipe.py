"""Optimizer classes, schedules, clipping and averages in a job file: read as they are meant, or refused by name."""

from __future__ import annotations

import pytest
from doll.config import TorchConfig, dump, parse
from doll.errors import ConfigError

JOB = """
job: j
task: {class: "task.py:T"}
training:
  optimizer: {class: torch.optim.AdamW, args: {lr: 3e-4, betas: [0.9, 9.5E-1]}, groups: {norm: {weight_decay: 1e-2}}}
  schedule: {class: torch.optim.lr_scheduler.OneCycleLR, args: {max_lr: [1e-3, 2.], total_steps: 100}}
  ema: {decay: 0.999}
"""
PIPELINE = ("training={policy: {name: wsp}}", "worker.pipeline={stages: 2}")


def test_numbers_are_read_as_they_are_meant() -> None:
    """YAML 1.1 takes 3e-4 for a text."""
    training = parse(JOB).training
    assert isinstance(training.optimizer, TorchConfig)
    assert training.optimizer.args == {"lr": 0.0003, "betas": [0.9, 0.95]}
    assert training.optimizer.groups == {"norm": {"weight_decay": 0.01}}
    assert [part.args for part in training.schedule] == [{"max_lr": [0.001, 2.0], "total_steps": 100}]
    assert parse(dump(parse(JOB))).training == training


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("training.optimizer={class: AdamW}", r"training\.optimizer\.class: expected module\.Class, .*got 'AdamW'"),
        ("training.optimizer={class: 'task.py:Mine'}", r"training\.optimizer\.class: expected module\.Class"),
        ("training.optimizer={name: adamw}", r"training\.optimizer\.name: expected one of sgd, adam, adagrad, class"),
        ("training.optimizer={name: class}", r"training\.optimizer\.class: expected a value, got nothing"),
        ("training.optimizer={name: adam, class: a.B}", r"training\.optimizer\.class: unknown key"),
        (
            "training.optimizer.groups={'(': {}}",
            r"optimizer\.groups: expected a regular expression, got '\('",
        ),
        ("training.schedule=[{class: a.B}, {class: a.C}]", r"schedule: expected `updates` in part 0 \(a\.B\)"),
        ("training.schedule={class: a.B, updates: 3}", r"schedule: expected no updates in its last part, got 3"),
        ("training.ema.decay=1", r"training\.ema\.decay: input should be less than 1"),
        ("training={clip_norm: 1, clip_value: 1}", r"clip_value: expected either clip_norm or clip_value, got both"),
        ("training.clip_value=0", r"training\.clip_value: input should be greater than 0"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(override: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse(JOB, [override])


@pytest.mark.parametrize(
    "override",
    [
        "training.optimizer={class: torch.optim.AdamW}",
        "training.schedule={class: torch.optim.lr_scheduler.StepLR, args: {step_size: 2}}",
        "training.clip_value=1",
    ],
)
def test_stages_of_pipelines_have_built_in_optimizers(override: str) -> None:
    parse(JOB, PIPELINE)
    with pytest.raises(ConfigError, match=r"worker\.pipeline: .*expected a built-in training\.optimizer"):
        parse(JOB, [*PIPELINE, override])
