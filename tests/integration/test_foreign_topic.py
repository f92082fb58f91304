"""A topic that belongs to somebody else: it is read, whatever is in it, and left as it was."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from doll.records.control import Finished, Scale, ServerStatus
from doll.services import Services
from job_policies import POLICIES
from job_rig import MakePipeline
from owners_topic import OwnersTopic, samples

pytestmark = [pytest.mark.slow, pytest.mark.integration]  # starts servers

# `DOLL_KILLS=30` kills so many processes in each run of the longest test, and runs it with every policy.
KILLS = int(os.environ.get("DOLL_KILLS", "0"))


@pytest.fixture
def owner(services: Services, job_name: str) -> OwnersTopic:
    """Its admin; the topic has no name of DOLL's."""
    return OwnersTopic(services.kafka, f"clicks.{job_name}")


def keyed(count: int) -> list[tuple[str, bytes]]:
    """Few keys have half of the records."""
    rng = random.Random(0)
    zones = [rng.choice([int(rng.paretovariate(0.7)), rng.randrange(400)]) % 400 for _ in range(count)]
    return [(f"zone-{zone}", value) for zone, value in zip(zones, samples(count), strict=True)]


def write_transactions(owner: OwnersTopic, records: list[tuple[str, bytes]]) -> int:
    """In transactions of 20; one in ten is aborted. Returns the number of committed records."""
    producer, committed = owner.transactional(f"owner-{owner.name}"), 0
    for number, at in enumerate(range(0, len(records), 20)):
        producer.begin_transaction()
        is_aborted = number % 10 == 3
        for key, value in records[at : at + 20]:
            producer.produce(owner.name, b"aborted: it would be a dead letter" if is_aborted else value, key)
        producer.flush()
        if is_aborted:
            producer.abort_transaction(60)
        else:
            producer.commit_transaction(60)
            committed += len(records[at : at + 20])
    return committed


@pytest.mark.parametrize("policy", POLICIES if KILLS else POLICIES[:1])
def test_every_committed_record_is_learned_once_while_workers_and_partitions_change(
    owner: OwnersTopic, make_pipeline: MakePipeline, services: Services, policy: str,
    record_property: Callable[[str, Any], None],
) -> None:  # fmt: skip
    """From 4 workers to 7, 2 and 5, from 12 keyed partitions to 16; one record in ten is in an aborted transaction."""
    owner.create(12, {"retention.ms": "3600000", "segment.bytes": "1048576"})
    written = write_transactions(owner, keyed(1500))
    owner.commit("somebody")
    settings, foreign = owner.settings(), owner.offsets_of("somebody")
    job = make_pipeline(
        f"data.topic={owner.name}", "data.partitions=12", "data.workers=4", "data.max_workers=7",
        f"training.policy={policy}", "checkpoint.every_s=0.3",
    )  # fmt: skip
    job.start()
    job.until(lambda: job.version >= 3, "some updates")
    started, rng, left = 4, random.Random(0), KILLS or 6
    wrote_s = 0.0

    def goes_on() -> None:
        """Some policies wait for a worker whose partitions hold no whole batch: the stream does not end."""
        nonlocal wrote_s, written
        if time.monotonic() - wrote_s > 3.0:
            written += write_transactions(owner, keyed(300))
            wrote_s = time.monotonic()

    def has_learned(updates: int) -> bool:
        goes_on()
        return len(job.updates) >= updates

    def serve(status: ServerStatus, workers: int) -> bool:
        goes_on()
        live = sum(worker.is_live for worker in status.workers)
        return live >= workers == status.num_workers and not status.moving_partitions

    for phase, workers in enumerate((4, 7, 2, 5)):
        for worker in range(started, workers):
            job.start_worker(worker)
        started = max(started, workers)
        if phase:
            job.until_status(lambda status: bool(status.run_id), "a status")
            job.control("events", Scale(workers=workers, run_id=job.last_status.run_id))
        job.until_status(partial(serve, workers=workers), "workers and their partitions")
        if phase == 2:
            owner.add_partitions(16)
        kills = left // (4 - phase)
        left -= kills
        for _ in range(kills):
            job.kill(rng.choice([*job.supervisor.handles()]))
            goal = len(job.updates) + 3
            job.until(partial(has_learned, goal), "more updates")
        job.until_status(partial(serve, workers=workers), "moved partitions")
    written += write_transactions(owner, keyed(1000))
    if "asp" in policy:
        job.until(lambda: all(line.pending < 8 for line in job.audit().partitions), "whole batches of each", 180)
    else:  # the last group, round or wave waits for others
        goal = len(job.updates) + 3
        job.until(lambda: len(job.updates) >= goal, "more updates")
    job.role("ps").terminate()
    report, ends = job.assert_audit_ok(), owner.ends()
    committed = owner.committed()
    assert len(committed) == written
    assert len(report.partitions) == 16
    for line in report.partitions:
        own = [offset for partition, offset in committed if partition == line.partition]
        assert line.produced == max(ends[line.partition], line.applied_until)
        assert line.applied == sum(offset < line.applied_until for offset in own)
        assert (line.missing, line.twice, line.dead, line.lost) == (0, 0, 0, 0)
    assert sum(line.gaps for line in report.partitions) > 100, "aborted records and markers"
    assert job.read("dead") == []
    assert (owner.settings(), owner.offsets_of("somebody")[:12]) == (settings, foreign)
    assert len({member.worker for update in job.updates for member in update.members}) > 4
    record_property("ledger", f"{report.applied} applied of {len(committed)} committed, term {report.term}")


def test_another_number_of_workers_goes_on(owner: OwnersTopic, make_pipeline: MakePipeline) -> None:
    owner.create(5)
    for partition in range(5):
        owner.fill(partition, samples(80))
    job = make_pipeline(f"data.topic={owner.name}", "data.partitions=5", "stop.updates=8")
    job.start()
    job.until_finished()
    job.resize(3, stop_updates=20)
    job.start()
    job.until_finished()
    report = job.assert_audit_ok()
    assert report.applied == 20 * 16
    assert report.produced == 400


# --- where a job begins ---------------------------------------------------------------------------------------------


def test_it_begins_where_retention_has_left_the_log(owner: OwnersTopic, make_pipeline: MakePipeline) -> None:
    owner.create(2)
    for partition in range(2):
        owner.fill(partition, samples(100))
    owner.delete_records({0: 37, 1: 90})
    job = make_pipeline(f"data.topic={owner.name}", "data.partitions=2")
    job.start()
    job.until(lambda: job.version >= 3, "three updates")
    job.role("ps").terminate()
    report = job.assert_audit_ok()
    assert [(line.origin, line.produced) for line in report.partitions] == [(37, 63), (90, 10)]


@pytest.mark.parametrize(
    ("start", "origins"),
    [
        ("latest", (100, 60)),
        ("{offsets: {0: 17, 1: 3}}", (17, 3)),
        ("{timestamp: '2026-11-01T00:00:00Z'}", (40, 60)),  # partition 1 has nothing as new as that
    ],
)
def test_a_start_is_decided_once(
    owner: OwnersTopic, make_pipeline: MakePipeline, start: str, origins: tuple[int, int]
) -> None:
    owner.create(2, {"retention.ms": "-1"})  # the records are dated weeks ago, and the broker's default is a week
    day_ms, first_ms = 86_400_000, 1_793_491_200_000  # 2026-11-01T00:00:00Z
    for partition, counts in enumerate([(40, 60), (60, 0)]):
        for count, time_ms in zip(counts, (first_ms - day_ms, first_ms), strict=True):
            owner.fill(partition, samples(count), timestamp_ms=time_ms)
    job = make_pipeline(f"data.topic={owner.name}", "data.partitions=2", f"data.start={start}")
    job.start_ps()
    job.until(lambda: bool(job.term_starts), "the server")
    job.kill("ps")  # before anything is learned
    for partition in range(2):
        owner.fill(partition, samples(64))
    job.until(lambda: len(job.term_starts) >= 2, "its successor")
    for worker in range(2):
        job.start_worker(worker)
    job.until(lambda: job.version >= 3, "three updates")
    job.role("ps").terminate()
    assert {record.origins for record in job.term_starts} == {origins}
    report = job.assert_audit_ok()
    assert tuple(line.origin for line in report.partitions) == origins
    assert [line.end for line in report.partitions] == [164, 124]


# --- what its owner may do ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("delete", "was deleted while the job was learning from it"),
        ("recreate", "was deleted and created again since this job began"),
        ("compact", "cleanup.policy is compact, expected delete: compaction removes records before they are learned"),
    ],
)
def test_what_its_owner_does_to_it_ends_the_server_with_the_remedy(
    owner: OwnersTopic, make_pipeline: MakePipeline, change: str, words: str
) -> None:
    owner.create(2)
    for partition in range(2):
        owner.fill(partition, samples(64))
    job = make_pipeline(f"data.topic={owner.name}", "data.partitions=2")
    server = job.launch("ps", "ps_role")
    workers = [job.launch(f"worker-{number}", "worker_role", number) for number in range(2)]
    job.until(lambda: job.version >= 8, "eight updates: everything")
    if change == "compact":
        owner.set(**{"cleanup.policy": "compact"})
    else:
        owner.delete()
        if change == "recreate":
            owner.create(2)
    assert server.wait(120) == 2
    for worker in workers:
        worker.kill()
    said = [line for line in job.log("ps").splitlines() if line.startswith("doll: ")]
    assert len(said) == 1
    assert words in said[0]
    assert job.checkpoint().version == job.version, "nothing that was learned is lost"
    if change == "compact":
        owner.set(**{"cleanup.policy": "delete"})
        job.assert_audit_ok()


def test_what_was_deleted_before_it_was_read_is_counted_as_lost(
    owner: OwnersTopic, make_pipeline: MakePipeline
) -> None:
    owner.create(2)
    for partition in range(2):
        owner.fill(partition, samples(40))
    job = make_pipeline(f"data.topic={owner.name}", "data.partitions=2", "data.on_data_loss=skip")
    job.start_ps()
    job.until(lambda: bool(job.term_starts), "the server, which has decided where the job begins")
    owner.delete_records({0: 11, 1: 0})
    for worker in range(2):
        job.start_worker(worker)
    job.until(lambda: job.version >= 2, "two updates")
    job.role("ps").terminate()
    report = job.audit()
    assert (report.ok, report.lost, report.lost_ranges[0][:]) == (True, 11, (0, 0, 11))


def test_it_waits_for_nothing_where_the_job_has_finished(owner: OwnersTopic, make_pipeline: MakePipeline) -> None:
    owner.create(2)
    for partition in range(2):
        owner.fill(partition, samples(64))
    job = make_pipeline(f"data.topic={owner.name}", "data.partitions=2", "stop.updates=4")
    job.start()
    job.until_finished()
    assert isinstance(job.finished, Finished)
    assert job.assert_audit_ok().applied == 64
