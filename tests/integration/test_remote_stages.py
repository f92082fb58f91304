"""Workers whose stages are processes `doll stage`: whoever dies, stops or is replaced, each record is learned once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.hosts.network import why_not
from doll.consumers.pipeline.stage_places import StagePlaces
from doll.local import kafka_jars
from doll.pipeline.links.tcp import SECRET_BYTES, Address
from doll.services import Services
from doll.storage.blobs import key_prefix
from doll.storage.redis_client import connect_redis
from forked_commands import Program, environment
from job_rig import MakePipeline
from paths import ROOT, SUPPORT

from doll_lab.drill.actions import children_of

pytestmark = pytest.mark.integration

FEATURES, STAGES, WAVE = 4, 3, 4
JOB = (
    f"task.args={{features: {FEATURES}, hidden: [16, 16]}}",
    f"training.policy={{name: wsp, wave_batches: {WAVE}, clock_distance: 1}}",
    f"worker.pipeline={{stages: {STAGES}, stage_timeout_s: 4, remote: true}}",
    "training.optimizer={name: sgd, lr: 0.01, momentum: 0.9}",
)


def start(job: Any) -> None:
    job.start()
    for worker in range(job.config.data.workers):
        for stage in range(STAGES):
            job._start(job.spec(f"stage-{worker}-{stage}", "stage_role", worker, stage))


def child(job: Any, name: str) -> int:
    """The process that serves, or offers, a stage."""
    pids: list[int] = []

    def is_there() -> bool:
        pids[:] = children_of(job.role(name).pid)
        return len(pids) == 1

    job.until(is_there, f"the child of {name}")
    return pids[0]


def gangs(job: Any, worker: int) -> int:
    return str(job.log(f"worker-{worker}")).count("gang_formed")


def more(job: Any, updates: int) -> None:
    job.until_version(job.version + updates)


def test_gangs_outlive_stages_workers_and_servers(make_pipeline: MakePipeline) -> None:
    job = make_pipeline(*JOB, "stop.updates=150")
    start(job)
    job.send(job.samples(16_000))
    job.until_version(10)
    os.kill(child(job, "stage-0-1"), signal.SIGKILL)  # the process that serves
    job.until(lambda: gangs(job, 0) == 2, "the second gang")
    more(job, 5)
    job.kill("stage-1-2")  # the machine of a stage
    job.until(lambda: gangs(job, 1) == 2, "the second gang")
    more(job, 5)
    frozen = child(job, "stage-1-0")
    os.kill(frozen, signal.SIGSTOP)
    job.until(lambda: "has been silent" in job.log("worker-1"), "the end of a gang with a frozen stage")
    os.kill(frozen, signal.SIGCONT)
    job.until(lambda: gangs(job, 1) == 3, "the third gang")
    more(job, 5)
    job.kill("worker-0")
    job.until(lambda: gangs(job, 0) == 3, "the third gang")
    job.kill("ps")
    more(job, 5)
    job.until_finished()
    report = job.assert_audit_ok()
    assert report.applied > 100 * WAVE * 8
    losses = [update.loss for update in job.updates]
    assert np.mean(losses[-50:]) < np.mean(losses[:20])


def test_places_and_the_secret_are_in_redis(services: Services, job_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect_redis(services) as client:
        places, others = StagePlaces(client, job_name), StagePlaces(client, f"{job_name}-2")
        secret = places.secret()
        assert len(secret) == SECRET_BYTES
        assert places.secret() == StagePlaces(client, job_name).secret() == secret
        assert others.secret() != secret
        assert places.find(0, 2) == [None, None]
        first, second = Address("10.0.0.1", 7400), Address("host", 1)
        places.offer(0, 0, first)
        places.offer(0, 1, Address("other", 2))
        places.offer(0, 1, second)  # a spare of the same place
        places.offer(1, 0, second)
        assert places.find(0, 2) == [first, second]
        key = f"{key_prefix(job_name)}:stage:0:0"
        assert 0 < client.pttl(key) <= 3000
        monkeypatch.setenv("DOLL_GANG", "doll-digits-0-2-spot")
        of_gang = StagePlaces(client, job_name)
        assert of_gang.secret() == secret
        assert of_gang.find(0, 2) == [None, None], "these are the stages of the gang that is replaced"
        of_gang.offer(0, 0, Address("10.0.0.9", 1))
        assert (places.find(0, 2), of_gang.find(0, 1)) == ([first, second], [Address("10.0.0.9", 1)])
        for value in (b"garbage", b'{"host": 1, "port": 2}', b"\xff", b"[]"):
            client.set(key, value)
            assert places.find(0, 2) == [None, second]


def test_a_stage_of_another_kind_of_job_is_refused(
    tmp_path: Path, job_name: str, services: Services, doll: Program
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        f"job: {job_name}\ntask: {{class: 'examples.synthetic.task:Gaussian', args: {{features: 4, hidden: [8]}}}}\n"
        "data: {workers: 1, batch_size: 8}\n"
        "training: {policy: {name: wsp, wave_batches: 1, clock_distance: 1}}\n"
        "worker: {pipeline: {stages: 2}}\n"
    )
    env = environment(services)
    assert doll("topics", "job.yaml", "--create", cwd=tmp_path, **env).returncode == 0
    remote = ("--set", "worker.pipeline.remote=true")
    for more, expected in (
        ((), "expected a job with worker.pipeline.remote: true"),
        ((*remote, "--stage", "2"), "stage 0 to 1 (worker.pipeline.stages), got worker 0 and stage 2"),
        ((*remote, "--worker", "7"), "expected worker 0 to 0 (data.max_workers)"),
        ((*remote, "--listen", "0.0.0.0:0"), "expected HOST:PORT of this machine, as the worker reaches it"),
        ((*remote, "--listen", "192.0.2.1:0"), "cannot listen at 192.0.2.1:0"),
    ):
        done = doll("stage", "job.yaml", *more, cwd=tmp_path, **env)
        assert done.returncode == 2, done.stderr
        assert expected in done.stderr
        assert "Traceback" not in done.stderr


needs_hosts = pytest.mark.skipif(bool(why_not()), reason=f"no hosts: {why_not()}")


@needs_hosts
def test_three_hosts_compute_the_bits_of_one_machine(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SUPPORT / "stages_apart.py", tmp_path], capture_output=True, text=True, check=False,
        timeout=500, cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(ROOT)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "pushes.json").read_text())
    pushes = result["pushes"]
    assert pushes["here"] == pushes["apart"]
    assert len(set(pushes["here"])) == 5
    assert len({address.rpartition(":")[0] for address in result["addresses"]}) == 3
    assert sum(result["packets"].values()) > 100


@needs_hosts
@pytest.mark.skipif(kafka_jars.unavailable_reason() is not None, reason=str(kafka_jars.unavailable_reason()))
def test_a_gang_on_three_hosts_heals_from_each_fault(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.hosts.stages", "--faults", "4", "--json", str(figures)),
            *("--keep", str(tmp_path / "run")),
        ],
        capture_output=True, text=True, check=False, timeout=900, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(figures.read_text())
    assert result["ok"]
    assert ", 0 missing, 0 twice, 0 dead-lettered" in result["summary"]
    assert len(result["faults"]) == 4
