"""The section worker.pipeline: devices of stages, and what goes with the policy."""

from __future__ import annotations

import pytest
from doll.config import JobConfig, dump, parse
from doll.errors import ConfigError

JOB = """
job: pipes
task: {class: "some.module:Class"}
data: {workers: 2}
training: {policy: {name: wsp, wave_batches: 4}}
worker: {pipeline: {stages: 2}}
"""


def job(*overrides: str) -> JobConfig:
    return parse(JOB, overrides)


def test_all_stages_are_on_the_cpu_unless_devices_are_named() -> None:
    pipeline = job().worker.pipeline
    assert pipeline is not None
    assert [device.device for device in pipeline.devices_of(1)] == ["cpu", "cpu"]


def test_devices_are_the_same_for_all_workers_or_of_each() -> None:
    pipeline = job("worker.pipeline.devices=[cpu, {device: cuda:1, slowdown: 2}]").worker.pipeline
    assert pipeline is not None
    for worker in (0, 1):
        assert [(item.device, item.slowdown) for item in pipeline.devices_of(worker)] == [("cpu", 1), ("cuda:1", 2)]
    pipeline = job("worker.pipeline.devices=[[cpu, cpu], [cpu, cuda:0]]").worker.pipeline
    assert pipeline is not None
    assert [[item.device for item in pipeline.devices_of(worker)] for worker in (0, 1)] == [
        ["cpu", "cpu"],
        ["cpu", "cuda:0"],
    ]


def test_the_policy_knows_that_its_workers_are_pipelines() -> None:
    assert getattr(job().training.policy, "pipelined", None) is True


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("worker.pipeline.devices=[cpu]", "expected 2 devices, one for each stage, got 1"),
        ("worker.pipeline.devices=[cpu, cpu, cpu]", "expected 2 devices"),
        ("worker.pipeline.devices=[[cpu, cpu], [cpu, cpu], [cpu, cpu]]", r"one list of devices, or 2 \(data.workers\)"),
        ("worker.pipeline.devices=[cpu, gpu]", "devices"),
        ("worker.pipeline.layers=[[a, b]]", "expected 2 lists, one for each stage, got 1"),
        ("worker.pipeline.layers=[[a], []]", "got none in stage 2"),
        ("training.policy={name: ssp}", "expected training.policy.name: wsp, got ssp"),
        ("training.policy.wave_batches=17", "max_pending_batches of 34 at least, got 32"),
        ("worker.pipeline.stages=0", "stages"),
    ],
)
def test_what_does_not_fit_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job(override)


def test_pipelined_is_not_set_by_hand() -> None:
    text = JOB.replace("wave_batches: 4", "wave_batches: 4, pipelined: true").replace("worker: {", "# {")
    with pytest.raises(ConfigError, match=r"expected worker\.pipeline"):
        parse(text)


def test_what_is_written_to_the_run_folder_is_read_again() -> None:
    for config in (job(), job("worker.pipeline.devices=[cpu, {device: cuda:1, slowdown: 2}]")):
        assert parse(dump(config)) == config
