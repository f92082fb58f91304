"""The topics of a job outlive its runs: without their checkpoints a run begins only when it is told to, and once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from doll.config import StopConfig
from doll.errors import ConfigError, DollError
from doll.kafka import topics
from doll.kafka.clients import kafka_settings
from doll.kafka.publisher import Publisher
from doll.ledger.admission import AFTER_TERM_ENV, read_lineage
from doll.ledger.audit import audit
from doll.records.control import Finished
from doll.run.folder import RunFolder
from doll.run.status import require_finished
from doll.run.target import Target
from doll.services import BLOBS_ENV
from doll.storage.file_checkpoints import FileCheckpointStore
from job_rig import MakePipeline
from record_builders import term_started
from waiting import WAIT_TIMEOUT_S, until

pytestmark = pytest.mark.integration


def refused(job: Any, name: str, **env: str) -> str:
    """The last words of a parameter server that does not accept what it finds (exit code 2)."""
    role = job.forks.launch(dataclasses.replace(job.spec(name, "ps_role"), env=env))
    assert role.wait(WAIT_TIMEOUT_S) == 2, job.log(name)
    return str(job.log(name).splitlines()[-1])


def test_lost_checkpoints_a_new_generation_and_its_restart(make_pipeline: MakePipeline) -> None:
    job = make_pipeline("stop.updates=4")
    job.start()
    job.send(job.samples(64))
    job.until_finished()
    checkpoints, before = job.run / "checkpoints", job.run / "before"
    checkpoints.rename(before)

    said = refused(job, "ps-lost")
    assert "hold an earlier run (term 1, version 4, finished: updates: 4 reached)" in said
    assert "doll resume RUN" in said
    assert "--fresh" in said
    assert job.store.newest_term() == 0  # a server that may not serve claims nothing

    # The same topics from the beginning, by another model: its own 8 updates.
    longer = job.config.stop.model_copy(update={"updates": 8})
    job._write_job(job.job_path, job.config.model_copy(update={"stop": longer}))
    job.finished = None
    job.updates.clear()
    for name, role, *more in (("ps", "ps_role"), ("worker-0", "worker_role", 0), ("worker-1", "worker_role", 1)):
        job._start(dataclasses.replace(job.spec(name, role, *more), env={AFTER_TERM_ENV: "1"}))
    job.until_version(2)
    job.kill("ps")
    job.send(job.samples(64))
    job.until_finished()
    report = job.assert_audit_ok()
    assert (report.version, report.applied, report.term) == (8, 128, 3)
    assert [(started.term, started.generation, started.origins) for started in job.term_starts] == [
        (1, 0, (0, 0)), (2, 2, (0, 0)), (3, 2, (0, 0)),
    ]  # fmt: skip
    first_run, second_run, resumed_run = (started.run_id for started in job.term_starts)
    assert len({first_run, second_run, ""}) == 3, "each generation has an id of its own"
    assert resumed_run == second_run, "a server that resumes has its predecessor's"
    seen = read_lineage(job.config, job.services)
    assert (seen.newest_term, seen.generation, seen.version) == (3, 2, 8)
    assert read_lineage(job.config, job.services, tail_only=True) == seen

    # The run before can still be audited, but not gone on with.
    old = audit(job.config, job.services, FileCheckpointStore(before, job.config.job))
    assert (old.violations(), old.version, old.applied) == ([], 4, 64)
    checkpoints.rename(job.run / "after")
    before.rename(checkpoints)
    assert "a later run has begun on these topics" in refused(job, "ps-old")
    # Whoever began the generation knows of the run before it, not of its own loss.
    checkpoints.rename(before)
    assert "hold an earlier run (term 3, version 8" in refused(job, "ps-lost-again", **{AFTER_TERM_ENV: "1"})


def test_a_samples_topic_that_was_deleted_and_created_again_is_refused_by_all(make_pipeline: MakePipeline) -> None:
    job = make_pipeline()
    job.start()
    job.send(job.samples(160))
    job.until(lambda: job.store.versions()[-1:] == [(1, 10)], "version 10 in a checkpoint")
    samples = job.config.topic("samples")
    first = topics.topic_id(job.config, job.services, "samples")
    admin = AdminClient(kafka_settings(job.config, job.services))
    admin.delete_topics([samples])[samples].result(WAIT_TIMEOUT_S)

    def created() -> bool:  # the name is free a moment after the topic is gone
        try:
            admin.create_topics([NewTopic(samples, 2)])[samples].result(WAIT_TIMEOUT_S)
        except Exception:
            return False
        return True

    until(created, "the topic of the same name")
    assert topics.topic_id(job.config, job.services, "samples") not in ("", first)
    with pytest.raises(ConfigError, match=r"worker-\d "):
        job.until(lambda: False, "the end of a worker")
    log = job.log("worker-0") + job.log("worker-1")
    assert "deleted and created again" in log
    job.role("ps").kill()
    said = refused(job, "ps-2")
    assert f"topic {samples} was deleted and created again since this job began" in said
    assert "--fresh" in said
    report = job.audit()
    assert not report.ok
    assert any("deleted and created again since" in problem for problem in report.problems)

    # In containers a check comes before everything else; what it tells the user to do works.
    for name in list(job.supervisor.handles()):
        job.supervisor.release(name)[1].kill()
    checked = job.doll("ps", "--check").finished()
    assert checked.returncode == 2
    assert "FRESH=1 docker compose up" in checked.stderr
    terms = job.store.newest_term()
    assert job.doll("ps", "--check", "--fresh").wait() == 0
    assert job.store.newest_term() == terms  # nothing is claimed
    job._write_job(job.job_path, job.config.model_copy(update={"stop": StopConfig(updates=4)}))
    job.finished = None
    server = job.doll("ps", "--fresh", log="ps-fresh", **{BLOBS_ENV: job.services.blobs})
    job.start_worker(0, "worker-0-fresh")
    job.start_worker(1, "worker-1-fresh")
    job.send(job.samples(64))
    job.until(lambda: job.finished is not None, "the end of the job")
    assert server.wait(WAIT_TIMEOUT_S) == 0
    after = job.assert_audit_ok()
    assert (after.version, after.applied) == (4, 64)
    require_finished(target_of(job))


def test_a_job_that_could_not_go_on_is_told_from_one_that_has_ended(make_pipeline: MakePipeline) -> None:
    job = make_pipeline()
    target = target_of(job)
    with pytest.raises(DollError, match="has not ended"):
        require_finished(target)
    with Publisher(job.config, job.services) as publisher:
        publisher.send(job.config.topic("updates"), term_started(1))
        publisher.send(
            job.config.topic("updates"), Finished(term=1, version=0, reason="refused", time_s=0.0, error="all refused")
        )
        assert publisher.flush(WAIT_TIMEOUT_S) == 0
    with pytest.raises(DollError, match="could not go on: all refused"):
        require_finished(target)


def target_of(job: Any) -> Target:
    folder = RunFolder(job.run)
    folder.write_stack(job.services)
    return Target(job.config, folder, is_run_folder=True, path=job.job_path)
