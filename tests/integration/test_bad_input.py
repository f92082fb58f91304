"""Bad input on a running job: it is dead-lettered or refused with its reason, counted, and the job goes on."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import raw_batches
from bombs import send_bomb
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from doll.consumers.channels.kafka_channel import WorkerChannel
from doll.errors import ConfigError, ServiceUnavailableError
from doll.kafka.clients import kafka_settings
from doll.kafka.reader import Partition
from doll.process.fault_points import ENV, MARKER_ENV
from doll.ps.channels.kafka_channel import KafkaChannel
from doll.records.control import (
    Alive,
    DeadLetter,
    Evaluated,
    Hello,
    Join,
    Leave,
    Member,
    Push,
    Stop,
    Update,
    encode,
)
from doll.records.packing import pack
from format_tasks import TIMES_MS, BadRecord, bad_records, good
from job_rig import MakePipeline
from paths import SUPPORT
from pushes import push_of
from record_builders import announce, grant_of, welcome
from waiting import until

pytestmark = pytest.mark.integration

TASK = """
import json

import torch
from doll import Sample, Task


class Points(Task):
    input_shape = (3,)
    num_classes = 2

    def build_model(self):
        return torch.nn.Linear(3, 2)

    def decode(self, record):
        event = json.loads(record)
        return Sample(event["x"], event["y"])
"""


def point(i: int) -> bytes:
    return json.dumps({"x": [math.sin(i), math.cos(i), i % 2], "y": i % 2}).encode()


@pytest.fixture
def points(make_pipeline: MakePipeline, tmp_path: Path) -> Any:
    (tmp_path / "points.py").write_text(TASK)
    return lambda *overrides: make_pipeline("task.class=points.py:Points", "task.args={}", *overrides)


BAD: dict[str, tuple[bytes | None, str]] = {
    "not JSON": (b"\xff\x00garbage", "UnicodeDecodeError"),
    "a key is missing": (b'{"x": [1, 2, 3]}', "KeyError: 'y'"),
    "NaN": (b'{"x": [1, NaN, 3], "y": 0}', 'x["x"] holds NaN or infinity'),
    "infinity": (b'{"x": [1, 2, 1e999], "y": 0}', 'x["x"] holds NaN or infinity'),
    "wrong shape": (b'{"x": [1, 2], "y": 0}', 'x["x"]: expected float32 of shape (3,), got int64 of shape (2,)'),
    "ragged": (b'{"x": [[1], [2, 3]], "y": 0}', "inhomogeneous"),
    "unknown class": (b'{"x": [1, 2, 3], "y": 7}', "expected a class 0 to 1, got 7"),
    "class is a fraction": (b'{"x": [1, 2, 3], "y": 0.5}', "expected a class 0 to 1, got 0.5"),
    "text for a number": (b'{"x": ["a", "b", "c"], "y": 0}', 'x["x"]: expected float32 of shape (3,), got <U1'),
    "no value": (None, "empty value: expected a sample"),
    "empty value": (b"", "empty value: expected a sample"),
    "nested 100,000 deep": (b"[" * 100_000, "RecursionError"),
}


def test_every_bad_record_is_dead_lettered_with_its_reason_and_the_rest_is_learned(
    make_pipeline: MakePipeline, tmp_path: Path
) -> None:
    """Of partition 0: one in each batch of eight, of every format; headers and times that no client writes; 10 MB."""
    source = f"import sys\n\nsys.path.append({str(SUPPORT)!r})\nfrom format_tasks import EveryFormat\n"
    (tmp_path / "formats.py").write_text(source)
    job = make_pipeline("task.class=formats.py:EveryFormat", "task.args={}", "stop.updates=100000")
    job.start()
    huge = os.urandom(10_000_000)
    expected: dict[int, BadRecord] = {}
    bad = [BadRecord(value, reason) for value, reason in BAD.values()]
    bad += [BadRecord(huge, "record of 10000000 bytes: expected at most 1048576"), *bad_records()]
    values: list[bytes | None] = []
    raw = {}
    for number, item in enumerate(bad):
        values += [point(i) if number % 2 else good("JAPCB"[(number + i) % 5], user=i) for i in range(7)]
        expected[len(values)] = item
        if item.header is not None:
            raw[len(values)] = raw_batches.record(item.value, headers=[(b"a", b"1"), (item.header, b"v")])
        values.append(item.value)
    send_from = 0
    for at, record in raw.items():
        job.send(values[send_from:at], partition=0)
        assert raw_batches.send(job.services.kafka, job.config.topic("samples"), 0, [record]) == 0
        send_from = at + 1
    values += [point(i) for i in range(-len(values) % 8)]
    job.send(values[send_from:], partition=0)
    for stamp_ms in TIMES_MS:
        records = [raw_batches.record(good("J", user=i), at=i) for i in range(8)]
        assert raw_batches.send(job.services.kafka, job.config.topic("samples"), 0, records, timestamp_ms=stamp_ms) == 0
    count = len(values) + 8 * len(TIMES_MS)
    job.send([point(i) for i in range(count)], partition=1)
    job.until_status(lambda status: status.samples_total == 2 * count - len(expected), "all good records are learned")
    job.until(lambda: job.audit().pending == 0, "all of it is durable")
    report = job.assert_audit_ok()
    assert (report.applied, report.dead, job.restarts) == (2 * count - len(expected), len(expected), [])

    letters = {letter.offset: letter for letter in job.read("dead")}
    assert sorted(letters) == sorted(expected)
    for offset, item in expected.items():
        letter = letters[offset]
        assert item.reason in letter.reason
        assert letter.reason.isprintable()
        assert (letter.partition, letter.whole, letter.samples) == (0, True, 1)
        assert letter.payload == (item.value or b"")[:65_536]
        assert letter.payload_bytes == len(item.value or b"")
    assert all(update.loss < 10 for update in job.updates)
    assert sum(job.log(f"worker-{n}").count("dead_lettered") for n in (0, 1)) == len(expected)


def test_a_packed_record_in_which_one_sample_is_bad_gives_its_others(points: Any) -> None:
    job = points("stop.updates=8", "data.samples_per_record=4")
    job.start()
    good = [pack([point(4 * i + k) for k in range(4)]) for i in range(16)]
    bad = {
        3: pack([point(0), b"not JSON", point(2), b'{"x": [1, 2, 3], "y": 9}']),
        6: pack([b"x", b"y", b"z"]),
        9: b"not packed at all",
        12: pack([point(i) for i in range(5)]),
        14: pack([point(0), point(1)])[:-1],
    }
    for at, value in bad.items():
        good[at] = value
    job.send(good, partition=0)
    job.send([pack([point(4 * i + k) for k in range(4)]) for i in range(16)], partition=1)
    job.until_finished()
    report = job.assert_audit_ok()
    assert (report.applied, report.dead, report.partly_dead_samples) == (32 - 4, 4, 2)
    letters = {letter.offset: letter for letter in job.read("dead")}
    assert {offset: (letter.whole, letter.samples) for offset, letter in letters.items()} == {
        3: (False, 2),
        6: (True, 3),
        9: (True, 1),
        12: (True, 1),
        14: (True, 1),
    }
    assert "first bytes DLPK" in letters[9].reason
    assert "expected 1 to 4 samples" in letters[12].reason
    # 15 usable records of four, less two samples; records 6, 9, 12 and 14 give none.
    assert sum(update.n_samples for update in job.updates) == 4 * 32 - 4 * 4 - 2


GARBAGE = {
    "misnamed field": (b'{"X": [1, 2, 3], "y": 0}', "KeyError: 'x'"),
    "NaN in x": (b'{"x": [1, NaN, 3], "y": 0}', "x holds NaN or infinity"),
    "label out of range": (b'{"x": [1, 2, 3], "y": 7}', "expected a class 0 to 1, got 7"),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_job_whose_records_are_all_refused_ends_with_exit_code_2_and_the_reason(points: Any, kind: str) -> None:
    record, reason = GARBAGE[kind]
    job = points("stop.updates=5", "data.on_bad_records.first_records=160")
    server = job.launch("ps", "ps_role")
    job.start_worker(0)
    job.start_worker(1)
    job.send([record] * 400)
    job.until_finished()
    assert reason in job.finished.error
    assert "doll dead list" in job.log("ps")
    assert server.wait(60.0) == 2
    assert sum(update.n_samples for update in job.updates) == 0
    assert job.status.dead_reasons[0][1] == job.status.recent_refused or job.status.recent_refused == 0
    report = job.audit()
    assert report.ok
    assert report.dead >= 160


def test_a_stream_of_nothing_but_garbage_stops_nobody(points: Any) -> None:
    """Batches without a usable sample are versions that change nothing; the other stream is learned."""
    job = points("stop.samples=80")
    job.start()
    job.send([b"garbage"] * 80, partition=0)
    job.until(lambda: len(job.read("dead")) > 0 and job.version > 0, "an update of garbage alone")
    job.send([point(i) for i in range(80)], partition=1)
    job.until_finished()
    report = job.assert_audit_ok()
    assert (report.applied, report.dead + report.pending) == (80, 80), "the job ends with the last usable sample"
    assert len(job.read("dead")) >= report.dead > 0


def test_what_came_before_the_streams_stopped_becomes_durable_though_workers_hold_parts_of_it_back(points: Any) -> None:
    """The last batch of partition 0 waits in a round for one of partition 1 that never comes."""
    job = points("training.policy={name: isp, significance: 5}", "stop.updates=1000")
    job.start()
    # A round of one worker alone would take a batch of partition 1, and another one of partition 0 would wait.
    job.until_status(lambda status: all(worker.is_live for worker in status.workers), "both workers")
    job.send([point(i) for i in range(5 * 8)], partition=0)
    job.send([point(i) for i in range(4 * 8)], partition=1)
    job.until_status(lambda status: status.samples_total == 9 * 8, "every batch is in the model")
    job.until_status(lambda status: status.durable_version == status.version, "the model is durable")
    term, session = job.status.term, job.status.workers[0].session
    job.kill("worker-0")
    job.until_status(lambda status: status.workers[0].session > session, "another process of the worker")
    assert job.status.term == term, "nothing had to be computed again"
    assert any(update.settled for update in job.updates)
    report = job.assert_audit_ok()
    assert report.applied == 9 * 8


def has_refused(job: Any, worker: int, count: int) -> bool:
    return bool(job.log(f"worker-{worker}").count("record_refused") >= count)


def test_garbage_on_the_control_topics_is_counted_and_refused(points: Any) -> None:
    job = points("stop.updates=60")
    job.start()
    job.send([point(i) for i in range(320)])
    job.until_version(5)
    forged_events = [
        b"",
        b"garbage",
        b"\xd0",
        b"\xd0\x63\x80",  # another schema version
        b"\xd0\x01" + msgspec.msgpack.encode({"type": "unknown"}),
        b"\xd0\x01" + msgspec.msgpack.encode({"type": "push", "worker": "zero"}),
        b"\xd0\x01" + b"\x91" * 10_000,
        encode(Hello(term=1)),  # belongs on the other topic
    ]
    for value in forged_events:
        job.control("events", value)
    # Well-formed and wrong: nobody's session, nobody's worker, nobody's grant.
    nonsense = [
        Join(worker=99, process="x"),
        Join(worker=-1, process="x"),
        announce(0, 12345, 0, 10**12),
        announce(7, 1, 0, 1),
        Alive(worker=1, session=1),
        Leave(worker=0, session=3, cause="forged"),
        push_of(worker=0, session=1, batch=0, term=1, grant_id=1, version=0, key="doll:x:g:1:1", n_samples=8),
        Push(worker=0, session=1, term=1, version=0, key="doll:x:g:1:1", batches=()),
        Evaluated(term=99, version=10**9, loss=0.0, accuracy=1.0),
    ]  # fmt: skip
    for record in nonsense:
        job.control("events", record)
    for n in (0, 1):
        for value in forged_events[:-1]:
            job.control("commands", value, n)
        grant = grant_of(
            term=0, worker=n, session=1, first=0, grant_ids=(1,), version=0, min_version=0, key="doll:x:w:1:0"
        )
        for record in (
            grant,
            Stop(term=0, reason="forged"),
            welcome(n, term=0, process="x", session=99, next_batch=9),
            Join(worker=n, process="x"),
        ):
            job.control("commands", record, n)
    # Headers whose keys are no text, which two client libraries fail to read.
    no_text = [raw_batches.record(b"garbage", headers=[(b"\xff\xfe", b"v")])]
    for kind, number in (("events", 0), ("commands", 0), ("commands", 1)):
        assert raw_batches.send(job.services.kafka, job.config.topic(kind), number, no_text) == 0
    for n in (0, 1):  # before the job can end
        until(partial(has_refused, job, n, len(forged_events)), f"what worker {n} refuses")
    job.send([point(i) for i in range(800)])
    job.until_finished()
    report = job.assert_audit_ok()
    assert (report.version, report.dead, job.restarts) == (60, 0, [])
    refused = job.counters()
    assert refused["refused_record"] == len(forged_events) + 1
    assert refused["refused_unknown_worker"] == 3
    assert refused["refused_fenced"] == 5
    assert refused["refused_evaluated"] == 1
    for n in (0, 1):
        assert job.log(f"worker-{n}").count("record_refused") == len(forged_events)  # all but one, and `no_text`


IDS = """
import json
import struct

import torch
from doll import Sample, Task


class Ids(Task):
    num_classes = 2

    def build_model(self):
        return torch.nn.ModuleDict({"table": torch.nn.Embedding(20, 4), "plane": torch.nn.Linear(4 + 2, 2)})

    def decode(self, record):
        id, a, b, y = struct.unpack("<qffi", record)
        return Sample([id, *memoryview(struct.pack("<ff", a, b)).cast("i")], y)

    def forward(self, model, x):
        numbers = x[:, 1:].to(torch.int32).contiguous().view(torch.float32)
        return model["plane"](torch.cat([model["table"](x[:, 0]), numbers], dim=1))
"""


def test_samples_that_would_break_the_model_go_and_no_others(make_pipeline: MakePipeline, tmp_path: Path) -> None:
    """Well-formed records, of one producer among many: an id out of range, features that destroy the weights, that have
    no gradient. The worker dies once with its letters written and its gradient not pushed."""
    (tmp_path / "ids.py").write_text(IDS)

    def sample(i: int, id: int | None = None, at: tuple[float, float] | None = None, y: int | None = None) -> bytes:
        a, b = (math.sin(i), math.cos(3 * i)) if at is None else at
        return struct.pack("<qffi", i % 20 if id is None else id, a, b, int(a + b > 0) if y is None else y)

    # Both classes: whatever the model thinks, one of the two is wrong for it.
    bad = {
        21: (sample(21, id=20), "IndexError"),
        83: (sample(83, at=(3e38, -3e38), y=0), ""),
        84: (sample(84, at=(3e38, -3e38), y=1), ""),
        131: (sample(131, id=-(1 << 62)), "IndexError"),
    }
    values = [bad.get(i, (sample(i), ""))[0] for i in range(400)]
    job = make_pipeline("task.class=ids.py:Ids", "task.args={}", "stop.updates=50", "checkpoint.every_updates=5")
    job.start_ps()
    marker = tmp_path / "died"
    fault = {ENV: "worker.after_guard@2", MARKER_ENV: str(marker)}
    job.pids["worker-0"] = job.supervisor.start(
        dataclasses.replace(job.spec("worker-0", "worker_role", 0), env=fault)
    ).pid
    job.start_worker(1)
    job.send(values, partition=0)
    job.send([sample(7 * i) for i in range(400)], partition=1)
    job.until_finished()
    assert marker.exists()
    report = job.assert_audit_ok()
    dead = {offset for update in job.updates for member in update.members for offset in member.dead}
    assert {21, 131} <= dead
    assert len(dead & {83, 84}) >= 1
    assert dead <= set(bad)
    assert report.dead == len(dead)
    letters = {letter.offset: letter for letter in job.read("dead")}
    for offset in dead:
        assert bad[offset][1] in letters[offset].reason
        assert letters[offset].payload == bad[offset][0]
    assert max(update.loss for update in job.updates) < 5
    assert np.mean([update.loss for update in job.updates[-10:]]) < np.mean(
        [update.loss for update in job.updates[:10]]
    )


def test_a_task_that_fails_on_every_sample_ends_the_job_with_its_words(
    make_pipeline: MakePipeline, tmp_path: Path
) -> None:
    """No sample is refused for it, and no process is started again in vain."""
    (tmp_path / "broken.py").write_text(
        TASK.replace("torch.nn.Linear(3, 2)", "torch.nn.Linear(4, 2)").replace("Points", "Broken")
    )
    job = make_pipeline("task.class=broken.py:Broken", "task.args={}", "training.policy.group_size=1")
    job.start()
    job.send([point(i) for i in range(16)])
    with pytest.raises(
        ConfigError, match=r"broken\.py:Broken fails on every sample of its first batch.*shapes cannot be multiplied"
    ):
        job.until(lambda: False, "an end")
    assert job.restarts == []
    assert job.read("dead") == []


def test_a_dead_letter_that_kafka_refuses_is_not_taken_for_stored(make_pipeline: MakePipeline) -> None:
    """An update would count the record as dead, and nobody could ever read it."""
    job = make_pipeline()
    set_topic(job, "dead", "max.message.bytes", "100")
    worker = WorkerChannel(job.config, job.services, 0)
    letter = DeadLetter(worker=0, partition=0, offset=3, reason="bad", payload=b"x" * 5000, payload_bytes=5000)
    try:
        with pytest.raises(ServiceUnavailableError, match=r"refused a dead letter on doll\..*\.dead: .*too large"):
            worker.send_dead_letters([letter])
    finally:
        worker.close()


def test_an_update_of_nothing_but_bad_records_fits_into_its_topic(make_pipeline: MakePipeline) -> None:
    """Somebody upstream has changed the format: every offset of a large group is named."""
    job = make_pipeline()
    first = 5_000_000_000
    dead = tuple(range(first, first + 200_000))
    member = Member(
        worker=0, partition=0, batch=0, lo=first, hi=first + 200_000, n_samples=0, base_version=0, dead=dead
    )
    update = Update(term=1, version=1, members=(member,), n_samples=0, loss=0.0, samples_total=0)
    server = KafkaChannel(job.config, job.services)
    worker = WorkerChannel(job.config, job.services, 0)
    push = push_of(worker=0, session=1, batch=0, term=1, grant_id=1, version=0, key="", dead=dead)
    try:
        server.send_update(update)
        worker.send(push)
        assert server.flush(60.0) == 0
        worker.flush(60.0)
        assert server.updates_acknowledged() == 1
        job.until(lambda: encode(push) in server.poll(0.2), "the push")
    finally:
        server.close()
        worker.close()


@pytest.mark.parametrize("codec", ["zstd", "gzip"])
def test_a_batch_that_unpacks_to_too_much_is_dead_and_the_job_goes_on(make_pipeline: MakePipeline, codec: str) -> None:
    """The client bounds zstd by itself, gzip where the broker packs it again: what docs/security.md says of it."""
    job = make_pipeline()
    if codec != "zstd":
        set_topic(job, "samples", "compression.type", "zstd")
    job.send(job.samples(20), 0)
    send_bomb(
        job.config,
        job.services,
        Partition(job.config.topic("samples"), 0),
        codec=codec,
        size_bytes=1_000_000,
        records=140,
    )
    job.send(job.samples(20), 0)
    job.send(job.samples(160), 1)
    job.start()
    job.until(lambda: len(job.store.versions()) > 0 and job.audit().dead == 140, "the dead letters of the batch")
    job.until(lambda: job.audit().pending < 32, "what is behind it")
    job.assert_audit_ok()
    letters = [record for record in job.read("dead") if isinstance(record, DeadLetter)]
    assert sorted({letter.offset for letter in letters}) == [*range(20, 160)]
    assert {letter.code for letter in letters} == {"unreadable"}


def set_topic(job: Any, kind: str, setting: str, value: str) -> None:
    topic = ConfigResource(ResourceType.TOPIC, job.config.topic(kind))
    topic.add_incremental_config(ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET))
    admin = AdminClient(kafka_settings(job.config, job.services))
    for done in admin.incremental_alter_configs([topic]).values():
        done.result(60.0)
