"""`doll compare` without services: wrong flags, and comparisons in virtual time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import doll
from doll.config.policy import POLICIES

JOB = """
job: line
task: {class: 'my_task.py:MyTask'}
data: {workers: 3, batch_size: 8}
source: {kind: python, of: examples.synthetic.source:gaussians}
arrivals: {rate_per_s: [40.0, 80.0, 120.0]}
training: {policy: {name: doll, group_size: 2}}
plan: {on_demand_usd_per_h: 0.36}
stop: {samples: 4800}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "my_task.py").write_text("from doll import Task\n\n\nclass MyTask(Task):\n    pass\n")
    path = tmp_path / "my.yaml"
    path.write_text(JOB)
    return path


def test_every_registered_policy_is_simulated_on_the_same_stream(job: Path) -> None:
    result = doll("compare", job, "--simulate", "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    rows = {row["policy"]: row for row in content["policies"]}
    assert list(rows) == list(POLICIES.names())
    for row in rows.values():
        assert row["ok"]
        assert row["seconds"] == pytest.approx(4800 / 240)
        assert row["usd"] == pytest.approx(3 * 0.36 * 20 / 3600)
        assert 0 < row["samples"] < 1.1 * 4800  # arrivals are random
        assert row["final_loss"] is None
    assert set(rows["bsp"]["staleness"]["histogram"]) == {"-1"}
    assert rows["bsp"]["blocked_share"] > 0.5 > rows["asp"]["blocked_share"], "the slowest stream sets the pace of bsp"
    assert rows["asp"]["updates"] > rows["doll"]["updates"] > rows["bsp"]["updates"]


def test_the_same_seed_gives_the_same_table(job: Path) -> None:
    first, again, other = (
        doll("compare", job, "--simulate", "--policies", "doll,asp", "--set", f"seed={seed}").stdout
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert first.splitlines()[0] == "line: no loss"
    columns = ["policy", "step", "time", "samples", "updates", "staleness", "blocked", "USD"]
    assert first.splitlines()[1].split() == columns
    assert "simulated: no gradients are computed" in first


def test_each_policy_runs_with_the_same_seeds(job: Path) -> None:
    arguments = ("--policies", "bsp,asp", "--set", "seed=5", "--seeds", "3", "--json")
    content = json.loads(doll("compare", job, "--simulate", *arguments).stdout)
    assert [(row["seed"], row["policy"]) for row in content["policies"]] == [
        (seed, policy) for seed in (5, 6, 7) for policy in ("bsp", "asp")
    ]
    assert content["seeds"] == [5, 6, 7]
    (alone,) = json.loads(doll("compare", job, "--simulate", "--policies", "asp", "--set", "seed=6", "--json").stdout)[
        "policies"
    ]
    assert alone == content["policies"][3]
    # The limit is a time in the simulation, so no policy is faster or cheaper.
    assert [(best["by"], best["alike"]) for best in content["best"]] == [("time", ["asp"]), ("USD", ["asp"])]
    assert "within 4.3 of its standard errors" in content["conclusion"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "Invalid value for '--seeds'"),
        (["--policies", "spp"], "--policies: expected registered policies"),
        (["--policies", "doll:group_size=0"], "--policies: doll:group_size=0: "),
        (["--set", "source={kind: stdin}"], "expected one that can be sent again"),
        (["--set", "stop={accuracy: 0.9}"], "stop: expected a limit"),
        (["--simulate", "--set", "stop={accuracy: 0.9}"], "stop: expected a limit"),
        (["--simulate", "--set", "arrivals={process: asap}"], "arrivals.process is asap"),
        (["--set", "task.class=gone.py:MyTask"], "gone.py does not exist"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(
    job: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = doll("compare", job, "--parent-folder", tmp_path / "runs", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "runs").exists()
