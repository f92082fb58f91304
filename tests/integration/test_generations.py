"""The topics of a job outlive its runs: without their checkpoints a run begins only when it is told to, and once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from doll.errors import ConfigError
from doll.kafka import topics
from doll.kafka.clients import kafka_settings
from doll.ledger.admission import AFTER_TERM_ENV, read_lineage
from doll.ledger.audit import audit
from doll.storage.file_checkpoints import FileCheckpointStore
from waiting import WAIT_TIMEOUT_S, until

pytestmark = pytest.mark.integration


def refused(job: Any, name: str, **env: str) -> str:
    """The last words of a parameter server that does not accept what it finds (exit code 2)."""
    role = job.forks.launch(dataclasses.replace(job.spec(name, "ps_role"), env=env))
    assert role.wait(WAIT_TIMEOUT_S) == 2, job.log(name)
    return str(job.log(name).splitlines()[-1])


def test_lost_checkpoints_a_new_generation_and_its_restart(make_pipeline: Any) -> None:
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


def test_a_samples_topic_that_was_deleted_and_created_again_is_refused_by_all(make_pipeline: Any) -> None:
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
