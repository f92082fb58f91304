"""The number of shards of `ps.shards: auto`: the same in every process, and written down once."""

from __future__ import annotations

from pathlib import Path

import pytest
from doll.config import load, parse
from doll.config.fingerprint import difference, resume_refusal
from doll.config.fingerprint import parse as fields_of
from doll.errors import ConfigError
from doll.model import auto_shards as auto
from doll.model import slices as slices_module
from doll.model.flat_model import build, counted, fingerprint
from doll.ps.shard_main import run_shard
from doll.run.folder import RunFolder
from doll.run.local.roles import model_role
from doll.services import Services
from doll.task.base import load_task

pytestmark = pytest.mark.slow  # loads torch

JOB = """
job: unit
task: {class: "examples.synthetic.task:Gaussian", args: {features: 5, hidden: [3]}}
source: {kind: python, of: "examples.synthetic.source:samples"}
data: {workers: 1, batch_size: 4}
ps: {shards: auto}
arrivals: {rate_per_s: 40}
"""
MB = 250_000  # values


@pytest.mark.parametrize(
    ("values", "overrides", "shards"),
    [
        (90 * MB, [], 1),  # 10 contributions of 90 MB in each second, which one process adds
        (190 * MB, [], 1),  # more than it adds, but a slice would be below 100 MB
        (250 * MB, [], 2),
        (400 * MB, [], 4),
        (400 * MB, ["data.batch_size=40"], 1),
        (400 * MB, ["arrivals.process=asap"], 1),  # states no rate
        (3500 * MB, ["arrivals.process=asap"], 4),
        (3500 * MB, ["arrivals.process=asap", "blobs.contributions=fp16"], 1),  # cannot be divided
    ],
)
def test_the_number_follows_from_the_size_and_the_rate(values: int, overrides: list[str], shards: int) -> None:
    config = parse(JOB, overrides)
    assert auto.auto_shards(config, values, has_tables=False) == shards
    assert auto.auto_shards(config, values, has_tables=True) == 1
    assert f"auto is {shards}:" in auto.shards_text(config, shards, values)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model of the job, of 104 bytes, have two shards."""
    monkeypatch.setattr(slices_module, "BLOCK", 4)
    monkeypatch.setattr(auto, "SLICE_BYTES", 60)
    monkeypatch.setattr(auto, "LEAST_SLICE_BYTES", 30)


@pytest.mark.usefixtures("two")
def test_a_process_that_counts_agrees_with_one_that_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(JOB)
    task = load_task(config)
    model, told = build(config, task), counted(config, task)
    assert (len(model.slices), told.ps.shards) == (2, 2)
    mark = fingerprint(config, model)
    assert mark == fingerprint(told, build(told, task))
    monkeypatch.setattr(auto, "SLICE_BYTES", 40)  # as in another release
    other = fingerprint(config, build(config, task))
    assert difference(mark, other) == "ps.shards: expected 2, got 3"
    assert resume_refusal(fields_of(mark), fields_of(other)) == ""


@pytest.mark.usefixtures("two")
def test_the_trial_build_writes_the_number_to_the_job_file_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path)
    run.write_job(parse(JOB))
    assert model_role(str(run.job), str(tmp_path)) == 0
    assert load(run.job).ps.shards == 2
    monkeypatch.setattr(auto, "SLICE_BYTES", 40)
    assert model_role(str(run.job), str(tmp_path)) == 0
    assert load(run.job).ps.shards == 2, "a resume keeps it"


def test_a_shard_of_a_model_that_is_not_divided_is_refused() -> None:
    with pytest.raises(ConfigError, match="above 1, got 1"):
        run_shard(parse(JOB), Services("", ""), Path(), None)
