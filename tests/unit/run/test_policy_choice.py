"""What `--policies` means, and what is wrong with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doll.config import load
from doll.config.policy import POLICIES
from doll.errors import ConfigError
from doll.run.policy_choice import PolicyChoice, jobs_of, parse_choices

JOB = """
job: line
task: {class: 'my_task.py:MyTask'}
data: {workers: 2, batch_size: 8}
source: {kind: python, of: examples.synthetic.source:gaussians}
training: {policy: {name: doll, group_size: 3}}
stop: {samples: 300}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def test_policies_are_told_apart_by_commas_and_options_by_colons() -> None:
    choices = parse_choices(["bsp, doll:group_size=8", "doll"])
    assert choices == [
        PolicyChoice("bsp"),
        PolicyChoice("doll", (("group_size", "8"),)),
        PolicyChoice("doll"),
    ]
    assert [choice.label for choice in choices] == ["bsp", "doll:group_size=8", "doll"]


def test_without_any_they_are_all_that_are_registered() -> None:
    assert [choice.label for choice in parse_choices([])] == list(POLICIES.names())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bps", r"expected registered policies \(doll, bsp, .*\), got 'bps' \(did you mean bsp\?\)"),
        ("", r"expected registered policies \(.*\), got ''"),
        ("bsp,", r"got ''"),
        ("doll:8", r"expected NAME or NAME:KEY=VALUE.*as in essp:staleness=7, got 'doll:8'"),
        ("doll:group_size=", r"expected NAME or NAME:KEY=VALUE"),
        ("doll:group_size={8}", r"expected NAME or NAME:KEY=VALUE"),
        ("doll:group_size=8,more=1", r"'more=1': colons stand before options, commas between policies"),
        ("doll:group_size=8:group_size=9", r"each key of the policy once, and no name, got group_size"),
        ("doll:name=bsp", r"each key of the policy once, and no name, got name"),
        ("doll,bsp,doll", r"each policy with its options once, got doll twice"),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        parse_choices([text])
    assert str(raised.value).startswith("--policies: ")


def test_the_policy_of_the_job_file_keeps_its_options(job: Path) -> None:
    choices = parse_choices(["doll,doll:group_size=5,bsp"])
    policies = [config.training.policy for config in jobs_of(job, ["data.batch_size=4"], choices)]
    assert [policy.model_dump() for policy in policies] == [
        {"name": "doll", "group_size": 3, "staleness": 0},
        {"name": "doll", "group_size": 5, "staleness": 0},
        load(job, ["training.policy={name: bsp}"]).training.policy.model_dump(),
    ]


def test_every_registered_policy_can_be_chosen(job: Path) -> None:
    configs = jobs_of(job, [], parse_choices([]))
    assert [config.training.policy.name for config in configs] == list(POLICIES.names())


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("doll:group_size=0", "training.policy.group_size: .* got 0"),
        ("doll:group=3", r"unknown key \(did you mean 'group_size'\?\)"),
        ("bsp:staleness=3", "unknown key"),
        ("doll:group_size=1000", "never come together"),
    ],
)
def test_an_option_that_a_policy_refuses_is_named_with_it(job: Path, choice: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        jobs_of(job, [], parse_choices([choice]))
    assert re.match(f"--policies: {choice}: ", str(raised.value))
