"""`doll profile` on a small job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from doll.cli.app import app
from doll.pipeline.profiling.profile import Profile
from typer.testing import CliRunner

pytestmark = pytest.mark.slow  # loads torch

JOB = """
job: small
task: {class: "examples.digits.task:Digits", args: {hidden: [16], holdout_samples: 20}}
data: {batch_size: 8}
training: {policy: {name: wsp}}
worker: {pipeline: {stages: 2, profile: new/profile.json}}
"""


def test_a_profile_is_written_drawn_and_used(tmp_path: Path) -> None:
    job, out, plot = tmp_path / "job.yaml", tmp_path / "new" / "profile.json", tmp_path / "profile.png"
    job.write_text(JOB)
    result = CliRunner().invoke(app, ["profile", str(job), "--out", str(out), "--plot", str(plot), "--repeats", "1"])
    assert result.exit_code == 0, result.output
    profile = Profile.load(out)
    assert [layer.name for layer in profile.layers] == ["0", "1", "2", "3"]
    assert profile.batch_size == 8
    assert plot.read_bytes().startswith(b"\x89PNG")
    lines = result.stdout.splitlines()
    assert "4 layers, 8 samples, on cpu" in lines[0]
    assert [line.split()[0] for line in lines[2:7]] == ["0", "1", "2", "3", "all"]
    checked = CliRunner().invoke(app, ["config", "check", str(job), "--build-model"])
    assert checked.exit_code == 0, checked.output


def test_json_and_errors(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    result = CliRunner().invoke(app, ["profile", str(job), "--json", "--repeats", "1"])
    assert len(json.loads(result.stdout)["layers"]) == 4
    refused = CliRunner().invoke(app, ["profile", str(job), "--device", "cuda:99"])
    assert refused.exit_code == 2
    assert "cuda:99: expected cpu, or one of" in refused.output
    (tmp_path / "file").touch()
    for option in ("--out", "--plot"):
        unwritable = tmp_path / "file" / "profile"
        refused = CliRunner().invoke(app, ["profile", str(job), "--repeats", "1", option, str(unwritable)])
        assert refused.exit_code == 2
        assert f"cannot write {unwritable}" in refused.output.replace("\n", "")
