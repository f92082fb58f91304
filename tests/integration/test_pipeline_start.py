"""What hinders a start is said at once, with what was expected, what came and what to do."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from doll.consumers.channels import kafka_channel
from doll.kafka import reader
from doll.local.processes import free_port
from doll.producers.main import run_producer
from doll.records.control import Finished, Hello, Stop
from doll.services import Services
from forked_commands import Program, environment
from job_rig import MakePipeline
from record_builders import term_started
from waiting import WAIT_TIMEOUT_S, until

pytestmark = pytest.mark.integration

JOB = """
job: {job}
task: {{class: "examples.synthetic.task:Gaussian", args: {{features: 4, hidden: [8]}}}}
data: {{workers: 2, batch_size: 8}}
"""


def test_kafka_and_redis_are_not_there(tmp_path: Path, job_name: str, doll: Program) -> None:
    (tmp_path / "job.yaml").write_text(JOB.format(job=job_name))
    kafka, redis = f"127.0.0.1:{free_port()}", f"redis://127.0.0.1:{free_port()}/0"
    env = environment(Services(kafka, redis))
    for role in [doll.start(name, "job.yaml", cwd=tmp_path, **env) for name in ("worker", "ps")]:
        done = role.finished()
        assert done.returncode == 1
        assert f"Kafka at {kafka}" in done.stderr
        assert f"Redis at {redis} does not answer" in done.stderr
        assert "Traceback" not in done.stderr
        assert "start it" in done.stderr


def test_only_redis_is_not_there(tmp_path: Path, job_name: str, services: Services, doll: Program) -> None:
    (tmp_path / "job.yaml").write_text(JOB.format(job=job_name))
    redis = f"redis://127.0.0.1:{free_port()}/0"
    done = doll("ps", "job.yaml", cwd=tmp_path, **environment(Services(services.kafka, redis)))
    assert done.returncode == 1
    assert f"Redis at {redis} does not answer" in done.stderr
    assert "Kafka" not in done.stderr


def test_a_topic_has_too_few_partitions(tmp_path: Path, job_name: str, services: Services, doll: Program) -> None:
    (tmp_path / "job.yaml").write_text(JOB.format(job=job_name))
    topic = f"doll.{job_name}.samples"
    admin = AdminClient({"bootstrap.servers": services.kafka})
    admin.create_topics([NewTopic(topic, 1)])[topic].result(WAIT_TIMEOUT_S)
    done = doll("ps", "job.yaml", cwd=tmp_path, **environment(services))
    assert done.returncode == 2
    assert f"topic {topic}: expected 2 partitions, found 1" in done.stderr
    assert "set data.partitions to 1" in done.stderr


def started(job: Any, name: str, role: str, *more: Any, job_path: Path | None = None) -> tuple[int, str]:
    """Exit code and log of a role that does not come up."""
    code = job.launch(name, role, *more, job_path=job_path).wait(WAIT_TIMEOUT_S)
    assert code is not None
    return code, job.log(name)


def other(job: Any, *overrides: str) -> Path:
    """The job file with some values changed."""
    from doll.config import dump, load

    path: Path = job.folder / "other.yaml"
    path.write_text(dump(load(job.job_path, overrides)))
    return path


def test_a_checkpoint_of_another_model_is_refused_with_the_difference(make_pipeline: MakePipeline) -> None:
    job = make_pipeline("stop.updates=4")
    job.start()
    job.send(job.samples(64))
    job.until_finished()
    weights = job.checkpoint().tensors["weights"]

    code, log = started(job, "ps-other", "ps_role", job_path=other(job, "task.args.hidden=[9]", "data.batch_size=16"))
    assert code == 1
    said = log.splitlines()[-1]
    assert "parameters: expected 58, got 65" in said
    assert "data.batch_size: expected 8, got 16" in said
    assert "workers" not in said
    assert "rename the job" in said
    # The claim of a term is for servers that can go on: the one that runs must not be fenced by a wrong job file.
    assert job.store.newest_term() == 1

    folder = f"checkpoint.folder={job.run / 'checkpoints'}"
    code, log = started(job, "ps-job", "ps_role", job_path=other(job, f"job={job.config.job}-2", folder))
    assert code == 1
    assert f"expected a checkpoint of job '{job.config.job}-2', got one of job '{job.config.job}'" in log
    assert "give each job its own checkpoint.folder" in log
    np.testing.assert_array_equal(job.checkpoint().tensors["weights"], weights)


def test_a_worker_of_another_job_file_is_refused_with_the_difference(make_pipeline: MakePipeline) -> None:
    job = make_pipeline("stop.updates=4")
    job.start_ps()
    for change, said in (
        ("data.batch_size=16", "data.batch_size: expected 8, got 16"),
        ("training.optimizer.lr=7", "training.optimizer.lr: expected 0.05, got 7.0"),
    ):
        code, log = started(job, "worker-other", "worker_role", 0, job_path=other(job, change))
        assert code == 2
        assert log.splitlines()[-1] == f"doll: the parameter server runs another job file: {said}"
    # It was welcomed before it knew. The right one takes its place.
    job.start_worker(0)
    job.start_worker(1)
    job.send(job.samples(64))
    job.until_finished()
    job.assert_audit_ok()


TASKS = {
    "import no_such_library\n": "cannot import '{file}': ModuleNotFoundError: No module named 'no_such_library'",
    "def broken(:\n": "cannot import '{file}': SyntaxError",
    "class Other: ...\n": "'{file}' has no class 'Mine'",
    "class Mine: ...\n": "expected a subclass of doll.Task",
    "from doll import Task\nclass Mine(Task): ...\n": "must define build_model()",
}


def test_a_task_that_does_not_load(make_pipeline: MakePipeline) -> None:
    job = make_pipeline("task.class=mine.py:Mine", "task.args={}")
    for number, (text, said) in enumerate(TASKS.items()):
        (job.folder / f"mine{number}.py").write_text(text)
        job_path = other(job, f"task.class=mine{number}.py:Mine")
        for name, role, more in (("ps", "ps_role", ()), ("worker-0", "worker_role", (0,))):
            code, log = started(job, f"{name}-{number}", role, *more, job_path=job_path)
            assert code == 2, text
            assert said.format(file=f"mine{number}.py") in log.splitlines()[-1]


def test_a_worker_that_starts_after_the_end_of_the_job_is_told_so(
    make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its predecessor died on the last message: without this it would wait for a server that never comes."""
    job = make_pipeline("ps.lease_s=2")
    monkeypatch.setattr(kafka_channel, "RESUME_GRACE_S", 0.0)
    job.control("commands", Stop(term=1, reason="updates: 20 reached"), partition=1)
    late = kafka_channel.WorkerChannel(job.config, job.services, 1)
    try:
        with pytest.raises(kafka_channel.JobEndedError, match="updates: 20 reached"):
            late.join("late", lambda: False)
        polls = iter([False] * 20)  # of a new generation: that was the end of the run before
        assert late.join("new", lambda: next(polls, True), after_term=1) is None
    finally:
        late.close()
    monkeypatch.setattr(reader, "RESUME_GRACE_S", 0.0)
    assert not reader.has_finished(job.config, job.services, lambda: False), "it has not begun"
    job.control("updates", Finished(term=1, version=20, reason="updates: 20 reached", time_s=0.0))
    assert run_producer(job.config, job.services, until_finished=True, stop=threading.Event(), say=print) == 0
    job.control("updates", term_started(2, 20))
    assert not reader.has_finished(job.config, job.services, lambda: False), "it was resumed"


def test_a_server_whose_shards_take_long_tells_the_workers_that_it_lives(make_pipeline: MakePipeline) -> None:
    job = make_pipeline("ps.lease_s=2", "ps.shards=2", "task.args.hidden=[600, 600]")
    job.control("commands", Stop(term=1, reason="updates: 20 reached"), partition=1)
    job.start_ps()
    commands = reader.Partition(job.config.topic("commands"), 1)
    with reader.Reader(job.config, job.services, "watch", [commands], lambda _, low, high: high) as watch:
        until(lambda: Hello in {type(timed.record) for timed in watch.poll(0.2)}, lambda: job.log("ps"))


def test_a_job_that_ended_and_was_resumed_has_not_ended(
    make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_pipeline("ps.lease_s=2")
    monkeypatch.setattr(kafka_channel, "RESUME_GRACE_S", 0.0)
    job.control("commands", Stop(term=1, reason="updates: 20 reached"), partition=1)
    job.control("commands", Hello(term=2), partition=1)
    worker = kafka_channel.WorkerChannel(job.config, job.services, 1)
    polls = iter([False] * 20)
    try:
        assert worker.join("worker", lambda: next(polls, True)) is None
    finally:
        worker.close()
