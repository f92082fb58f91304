"""SIGKILL between any two side effects, on the real broker: the successor goes on and the ledger balances.

docs/operations.md says what happens in each gap; a point that this test does not know fails it.
"""

from __future__ import annotations

import dataclasses
import re
import signal

import numpy as np
import pytest
from doll.local.forks import Role
from doll.local.supervisor import Restart, RoleSpec, Supervisor
from doll.process.fault_points import ENV, POINTS, fault_point
from job_rig import MakePipeline, Pipeline
from paths import DOCS

# What the processes of a name die at, one after the other: each process has one such point, and the last one has none.
# The hit is late enough that the process is at work, and sure to come within the next ten updates.
DEATHS: dict[str, dict[str, list[str]]] = {
    "ps, from its claim to an update": {
        "ps": ["ps.after_claim@1", "ps.after_first_checkpoint@1", "ps.after_weights@8", "ps.after_grant@9"],
    },
    "ps, from an update to its durability": {
        # Three of the five parts of a checkpoint are written.
        "ps": [
            "ps.after_apply@8", "ps.after_update@8", "ps.mid_checkpoint@3", "ps.after_checkpoint@1",
            "ps.after_durable@1",
        ],
    },
    "workers": {
        "worker-0": ["worker.after_dead_letter@1", "worker.after_announce@4", "worker.after_push@4"],
        "worker-1": ["worker.after_guard@1", "worker.after_blob@4", "worker.after_durable@1"],
    },
    "workers in a set of batches": {"worker-0": ["worker.mid_set@4"], "worker-1": ["worker.after_sum@4"]},
    # A server ends with its shard, and the next one may begin before the other shard dies.
    "shards": {"shard-0": ["shard.after_apply@4"], "shard-1": ["shard.after_part@2"]},
}  # fmt: skip
ROUND = 10  # updates
IN_SHARDS = ("ps.shards=2", "task.args.hidden=[600, 600]")
# Of both classes: for whatever the model says, one of them is wrong, and its gradient far too long.
HUGE = [np.array([3e38, 3e38, 3e38, 3e38, y], "<f4").tobytes() for y in (0, 1)]
OPERATIONS = DOCS / "operations.md"


def test_every_point_is_tested_and_explained() -> None:
    # Those of a regrid, a rollback and of doll forget: tests/e2e/test_regrid.py, test_rollback.py, test_forget.py
    tested = [death.partition("@")[0] for job in DEATHS.values() for deaths in job.values() for death in deaths]
    of_commands = ("regrid.", "rollback.", "forget.")
    assert sorted(tested) == sorted(point for point in POINTS if not point.startswith(of_commands))
    form = r"^\| `((?:worker|ps|shard|regrid|rollback|forget)\.(?:after|mid)_\w+)` \|"
    rows = re.findall(form, OPERATIONS.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(POINTS)


def test_without_the_environment_a_point_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, "")
    for point in POINTS:
        fault_point(point)


@pytest.mark.parametrize("wrong", ["ps.after_aply@1", "ps.after_apply", "ps.after_apply@x"])
def test_a_point_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    from doll.errors import ConfigError

    monkeypatch.setenv(ENV, wrong)
    with pytest.raises(ConfigError, match="expected point@count"):
        fault_point("ps.after_apply")


@pytest.mark.integration
@pytest.mark.parametrize("who", DEATHS)
def test_deaths_in_the_gaps_cost_nothing(make_pipeline: MakePipeline, who: str) -> None:
    deaths = DEATHS[who]
    rounds = max(map(len, deaths.values()))
    # In a set of several batches: a group has twice as many of them as there are workers.
    group_size, updates = (4 if who.endswith("set of batches") else 2), ROUND * (rounds + 1)
    job = make_pipeline(
        f"stop.updates={updates}", "checkpoint.every_updates=4", "checkpoint.every_s=1000",
        f"training.policy.group_size={group_size}", *(IN_SHARDS if who == "shards" else ()),
    )  # fmt: skip
    left = {name: iter(points) for name, points in deaths.items()}

    def launch(spec: RoleSpec) -> Role:
        point = next(left.get(spec.name, iter(())), "")
        role: Role = job.forks.launch(dataclasses.replace(spec, env={**spec.env, ENV: point}))
        return role

    def on_restart(restart: Restart) -> None:
        job.restarts.append(restart)
        job.supervisor.reset_failures(restart.name)  # it was killed on purpose: no longer wait than for the first

    job.supervisor = Supervisor(launch, on_restart=on_restart)
    job.start()
    poison = {}  # by the number of the sample: the even ones are worker 0's
    if who == "workers":
        poison = {0: b"poison", 1: HUGE[0], 3: HUGE[1]}
    for number in range(rounds):
        samples = job.samples(ROUND * group_size * 8)
        for at, value in poison.items() if number == 0 else ():
            samples[at] = value
        job.send(samples)
        dead = sum(min(len(points), number + 1) for points in deaths.values())
        job.until(lambda dead=dead: len(killed(job)) >= dead, f"death {number + 1} of {deaths}")  # type: ignore[misc]
    # More than the stop rule needs of both streams: one of them may be ahead when its worker dies.
    job.send(job.samples(ROUND * group_size * 8 + 160))
    job.until_finished()
    assert sorted(killed(job)) == sorted(name for name, points in deaths.items() for _ in points)
    assert len(killed(job)) == len(job.restarts)
    report = job.assert_audit_ok()
    assert report.version == updates
    assert report.applied + report.dead == updates * group_size * 8
    assert min(2, len(poison)) <= report.dead <= len(poison)
    lost = (
        1 if who == "shards" else 0
    )  # the term of the server whose shards died, or two if they died one after the other
    assert lost <= report.term - 1 - len(deaths.get("ps", [])) <= 2 * lost


def killed(job: Pipeline) -> list[str]:
    return [restart.name for restart in job.restarts if restart.exit_code == -signal.SIGKILL]
