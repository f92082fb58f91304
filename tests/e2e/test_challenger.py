"""A drift starts a second job on the stream of a run: once, also after kills, and whatever happens to it.

The drift itself is found by the tests of `doll.evaluation.drift`; here its record is written to the topic of the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from doll.config import JobConfig
from doll.kafka.publisher import Publisher
from doll.process.metric_names import EVALUATOR
from doll.records.control import Metric
from doll.run.target import open_target
from doll.services import Services
from forked_commands import Command, Program, environment
from killed_runs import JOB, counts_of, left, version
from process_checks import is_gone
from waiting import until

pytestmark = pytest.mark.e2e

# It hardly learns, so the comparison is decided by the first records, whenever that begins.
SLOW = "training: {policy: {name: doll, group_size: 2}, optimizer: {name: sgd, lr: 1.0e-9}}"
DRIFT = "drift={challenger: {job: slow.yaml, most: 1, min_interval_s: 0, compare_after_s: 0}}"


def drifted(config: JobConfig, services: Services, noticed_at: int) -> None:
    """Write what an evaluator writes that has noticed a drift at this version."""
    facts = {"before": 0.1, "after": 0.9, "since": 1.0, "version": float(noticed_at), "index": 0.0}
    values = {f"drift_{name}_loss": value for name, value in facts.items()}
    publisher = Publisher(config, services, acks="all")
    publisher.try_send(
        config.topic("metrics"), Metric(source=EVALUATOR, values={"drift": 1.0, **values}, time_s=time.time())
    )
    publisher.close(30.0)


def challenges(run: Path) -> list[dict[str, Any]]:
    path = run / "challengers.json"
    return json.loads(path.read_text()) if path.exists() else []


def events(run: Path) -> str:
    path = run / "events.jsonl"
    return path.read_text() if path.exists() else ""


def challenger_of(process: Command) -> list[psutil.Process]:
    processes = []
    for each in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if "-m doll up" in (command := " ".join(each.cmdline())) and "-challenger-" in command:
                processes.append(each)
    return processes


def test_one_challenger_for_a_drift_that_does_not_hurt_the_job(
    tmp_path: Path, job_name: str, services: Services, doll: Program
) -> None:
    job = JOB.format(job=job_name[-30:].strip("-")).replace(
        "evaluation: {enabled: false}", "evaluation: {every_s: 600}"
    )
    (tmp_path / "job.yaml").write_text(job)
    slow = job.replace("training: {policy: {name: doll, group_size: 2}}", SLOW)
    assert slow != job
    (tmp_path / "slow.yaml").write_text(slow)
    env, err = environment(services), tmp_path / "err.txt"
    process = doll.start(
        "up", "job.yaml", "--parent-folder", tmp_path / "runs", "--set", DRIFT, cwd=tmp_path, err=err, **env
    )
    until(lambda: re.search(r"run folder (\S+)", err.read_text()) or process.poll() is not None, err.read_text)
    assert process.poll() is None, err.read_text()
    (run,) = (tmp_path / "runs").iterdir()
    until(lambda: version(run) >= 5, err.read_text)
    config = open_target(run, []).config
    for _ in range(2):  # an evaluator that was started again
        drifted(config, services, 5)
    until(lambda: challenger_of(process), err.read_text)
    own_runs = run / "challengers" / "5"
    until(lambda: list(own_runs.glob("*/checkpoints/*.doll")), err.read_text)
    until(lambda: "challenger 5 compared: " in events(run), lambda: events(run) + str(challenges(run)))
    (challenge,) = challenges(run)
    assert str(tmp_path / "slow.yaml") in challenge["command"]
    assert (challenge["metric"], challenge["version"], challenge["refusal"]) == ("loss", 5, "")
    assert re.search(r"compared: loss of (\S+ \d+): .* records: \1 is better", challenge["outcome"]), challenge
    (other,) = (path for path in own_runs.iterdir() if path.is_dir())
    until(lambda: version(other) >= 2, err.read_text)
    its = open_target(other, []).config
    assert (its.data.topic, its.drift and its.drift.challenger) == (config.topic("samples"), None)

    # Its end is an event, and the job goes on; a second drift starts no other one.
    for each in challenger_of(process):
        os.kill(each.pid, signal.SIGKILL)
    until(lambda: "challenger 5 ended with " in events(run), lambda: events(run))
    before = version(run)
    drifted(config, services, 9)
    until(lambda: len(challenges(run)) == 2, err.read_text)
    assert challenges(run)[1]["refusal"] == "drift.challenger.most is 1"
    until(lambda: version(run) > before + 10, err.read_text)

    # A run that was killed reads both drifts again.
    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    until(lambda: all(map(is_gone, started)), lambda: str(started))
    until(lambda: not left(run), lambda: "\n".join(left(run)))
    stop = counts_of(run).version + 15
    done = doll("resume", run, "--set", f"stop.updates={stop}", "--json", **env)
    assert done.returncode == 0, done.stderr
    audit = json.loads(done.stdout)["audit"]
    assert (audit["ok"], audit["missing"], audit["duplicate"]) == (True, 0, 0)
    assert len(challenges(run)) == 2
    assert len(list((run / "challengers").iterdir())) == 1
    assert len(list(own_runs.glob("*/job.yaml"))) == 1
