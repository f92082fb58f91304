"""Dead letters on the real broker: listed, shown, replayed once, learned when their task is corrected."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient
from doll.cli.app import app
from doll.config import JobConfig
from doll.errors import FencedError, ServiceUnavailableError
from doll.kafka.clients import kafka_settings
from doll.kafka.group_stream import Output
from doll.ledger import dead_letters
from doll.ledger.dead_letters import replay, replay_publisher
from doll.records.bounded import printable
from doll.records.control import DeadLetter
from job_rig import MakePipeline
from typer.testing import CliRunner

pytestmark = pytest.mark.integration

TASK = """
import json

import torch
from doll import Sample, Task


class Lines(Task):
    input_shape = (2,)
    num_classes = 2

    def __init__(self, lenient=False):
        self._lenient = lenient

    def build_model(self):
        return torch.nn.Linear(2, 2)

    def decode(self, record):
        if self._lenient and record.startswith(b"a;"):
            record = record.removeprefix(b"a;")
        x1, x2, y = json.loads(record)
        return Sample([x1, x2], y)
"""


def cli(*arguments: str | Path) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout) if "--json" in arguments else result.stdout


def values_at(config: JobConfig, services: Any, partition: int, low: int, high: int) -> list[bytes]:
    consumer = Consumer(kafka_settings(config, services, group_id="test"))
    consumer.assign([TopicPartition(config.topic("samples"), partition, low)])
    try:
        messages = [consumer.poll(60) for _ in range(low, high)]
        assert all(message is not None for message in messages)
        return [message.value() for message in messages]
    finally:
        consumer.close()


def ends(config: JobConfig, services: Any) -> list[int]:
    consumer = Consumer(kafka_settings(config, services, group_id="test"))
    try:
        return [
            consumer.get_watermark_offsets(TopicPartition(config.topic("samples"), n), timeout=60, cached=False)[1]
            for n in range(config.data.workers)
        ]
    finally:
        consumer.close()


def test_dead_records_are_listed_shown_replayed_once_and_then_learned(
    make_pipeline: MakePipeline, tmp_path: Path
) -> None:
    (tmp_path / "lines.py").write_text(TASK)
    task = "task={class: 'lines.py:Lines'}"
    job = make_pipeline(task)
    good = [b"[1, 0, 1]", b"[0, 1, 0]"]
    bad = {(0, 3): b"a;[1, 0, 1]", (1, 5): b"a;[0, 1, 0]", (1, 9): b"\x1b[31mno json \xff", (0, 12): b"[1, 2, 9]"}
    for partition in (0, 1):
        job.send([bad.get((partition, offset), good[offset % 2]) for offset in range(16)], partition)
    job.start()
    job.until(lambda: job.version >= 2, "two updates")
    job.until(lambda: len(job.store.versions()) > 0 and job.checkpoint().version >= 2, "a checkpoint of both")
    # A batch that waits for a group of two: its bad record is lettered, and the corrected task will decode it.
    undecided = {(0, 18): b"a;[1, 0, 1]", (0, 19): b"no json either"}
    job.send([undecided.get((0, offset), good[offset % 2]) for offset in range(16, 24)], 0)
    job.until(lambda: len(job.read("dead")) == len(bad) + len(undecided), "its letters")
    env = {"DOLL_KAFKA": job.services.kafka, "DOLL_REDIS": job.services.redis}
    at = ["--job", str(job.job_path)]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        folder = ["--run-folder", str(job.run)]
        listed = cli("dead", "list", *at, *folder, "--json")
        assert {(item["partition"], item["offset"]): item["state"] for item in listed} == {
            **dict.fromkeys(bad, "dead"), **dict.fromkeys(undecided, "pending"),
        }  # fmt: skip
        assert [item["bytes"] for item in listed] == [
            len({**bad, **undecided}[p]) for p in sorted({**bad, **undecided})
        ]
        assert {item["replayed_as"] == [] and item["whole"] for item in listed} == {True}
        text = cli("dead", "list", *at)
        assert "0/12" in text
        assert "expected a class 0 to 1" in text
        shown = cli("dead", "show", *at, "--offset", "1/9")
        assert "\\x1b[31mno json \\xff" in shown
        assert "\x1b" not in shown
        assert "1b5b3331 6d6e6f20" in shown
        (letter,) = cli("dead", "show", *at, "--offset", "0/3", "--json")
        assert bytes.fromhex(letter["payload_hex"]) == bad[0, 3]

        dry = cli("dead", "replay", *at, *folder, "--reason", "jsondecodeerror", "--dry-run")
        assert "0/18: not replayed: its batch is not in a checkpoint yet" in dry
        assert "2 of 4 would be replayed" in dry
        assert ends(job.config, job.services) == [24, 16]
        # A corrected task, and the records that it can decode: new samples at the end of their partitions.
        for name in ("ps", "worker-0", "worker-1"):
            job.role(name).terminate()
        job.until(lambda: not job.supervisor.handles(), "the end of all processes")
        (tmp_path / "lines.py").write_text(TASK.replace("lenient=False", "lenient=True"))
        job.start()
        # The other half of the group: the successor's decoding of both is what counts.
        job.send(good * 4, 1)
        job.until_version(3)
        job.until(lambda: job.checkpoint().version >= 3, "a checkpoint of the batch that was decoded again")
        done = cli("dead", "replay", *at, *folder, "--reason", "jsondecodeerror", "--json")
        assert [(item["partition"], item["offset"], item["source"], item["new_offset"]) for item in done] == [
            (0, 3, "topic", 24),
            (0, 18, None, None),
            (0, 19, "topic", 25),
            (1, 5, "topic", 24),
        ]
        assert "superseded: it was learned" in done[1]["skip_reason"]
        assert values_at(job.config, job.services, 0, 24, 26) == [bad[0, 3], undecided[0, 19]]
        once_more = cli("dead", "replay", *at, *folder, "--reason", "jsondecodeerror")
        assert "not replayed: replayed before, as offset 24" in once_more
        assert "0 of 4 replayed" in once_more
        assert ends(job.config, job.services) == [27, 26]  # with the marker of a transaction
        listed = cli("dead", "list", *at, *folder, "--json")
        assert [(item["state"], item["replayed_as"]) for item in listed] == [
            ("replayed", [24]), ("dead", []), ("superseded", []), ("replayed", [25]), ("replayed", [24]), ("dead", []),
        ]  # fmt: skip
    for partition in (0, 1):
        job.send(good * 4, partition)
    job.until_version(4)
    job.until(lambda: job.checkpoint().version >= 4, "a checkpoint of the replayed")
    report = job.assert_audit_ok()
    assert (report.applied, report.dead, report.superseded, report.gaps) == (64 - 6 - 2, 6, 1, 2)


def test_where_the_log_has_let_go_the_letter_serves_if_it_is_whole(make_pipeline: MakePipeline) -> None:
    job = make_pipeline()
    config, services = job.config, job.services
    cut = b"x" * 70_000  # a letter keeps 65,536 bytes
    bad = {1: b"whole", 2: cut, 4: b"", 7: b"still there"}
    for partition in (0, 1):
        good = job.samples(16)
        job.send([bad.get(i, good[i]) if partition == 0 else good[i] for i in range(16)], partition)
    job.start()
    job.until(lambda: len(job.store.versions()) > 0 and job.checkpoint().version >= 2, "a checkpoint")
    later = DeadLetter(worker=0, partition=0, offset=5000, reason="bad", payload=b"later", payload_bytes=5)
    applied = msgspec.structs.replace(later, offset=9)
    for letter in (later, applied):
        job.control("dead", letter)
    admin = AdminClient(kafka_settings(config, services))
    (info,) = admin.delete_records([TopicPartition(config.topic("samples"), 0, 6)]).values()
    info.result(60)
    chosen = dead_letters.dead_records(config, services, job.store)
    done = replay(config, services, chosen)
    assert [(item.dead.at[1], item.source, item.offset) for item in done if item.source] == [
        (1, "letter", 16),
        (7, "topic", 17),
    ]
    why = {item.dead.at[1]: item.skip_reason for item in done if item.skip_reason}
    assert "kept only the first 65536 of 70000 bytes" in why[2]
    assert why[4] == "it is empty"
    assert "not in a checkpoint yet" in why[5000]
    assert why[9].startswith("superseded")
    assert values_at(config, services, 0, 16, 18) == [b"whole", b"still there"]
    once_more = replay(config, services, dead_letters.dead_records(config, services, job.store), again=True)
    assert [item.offset for item in once_more if item.source] == [19, 20]


def test_a_record_that_kafka_refuses_is_an_error(make_pipeline: MakePipeline) -> None:
    job = make_pipeline()

    def dead(offset: int, payload: bytes) -> dead_letters.DeadRecord:
        letter = DeadLetter(
            worker=0, partition=0, offset=offset, reason="", payload=payload, payload_bytes=len(payload)
        )
        return dead_letters.DeadRecord(letter, offset_state="dead")

    big = dead(1, b"x" * 20_000_000)  # above max.message.bytes of the samples topic
    with pytest.raises(
        ServiceUnavailableError, match=r"does not accept a record on .*samples, partition 0: .*MSG_SIZE"
    ):
        replay(job.config, job.services, [dead(0, b"small"), big])
    assert dead_letters.dead_records(job.config, job.services, job.store) == []
    # All or none: the small one was taken back, and nothing hinders the next replay.
    (done,) = replay(job.config, job.services, [dead(0, b"small")])
    assert done.offset is not None
    assert values_at(job.config, job.services, 0, done.offset, done.offset + 1) == [b"small"]


def test_a_replay_that_was_cut_off_or_overtaken_replays_nothing_twice(make_pipeline: MakePipeline) -> None:
    job = make_pipeline()
    config, services = job.config, job.services
    letter = DeadLetter(worker=0, partition=0, offset=0, reason="bad", payload=b"once", payload_bytes=4)
    job.control("dead", letter)
    dead = dead_letters.DeadRecord(letter, offset_state="dead")
    overtaken = pytest.raises(FencedError, match="another replay of this job has begun since")
    with contextlib.closing(replay_publisher(config, services)) as first, overtaken, first.transaction():
        # The record is in the log, and its letter is not: the moment at which a process may die.
        first.deliver([Output(config.topic("samples"), 0, b"once")])
        (done,) = replay(config, services, [dead])
        assert done.offset is not None
    # `dead` was read before the second replay: it is looked up again.
    (again,) = replay(config, services, [dead])
    assert again.skip_reason.startswith("replayed before, as offset")
    consumer = Consumer(kafka_settings(config, services, group_id="test", enable_partition_eof=True))
    consumer.assign([TopicPartition(config.topic("samples"), 0, 0)])
    try:
        messages = [consumer.poll(60), consumer.poll(60)]
    finally:
        consumer.close()
    assert [(message.value(), message.offset()) for message in messages[:1]] == [(b"once", done.offset)]
    assert messages[1].error().code() == KafkaError._PARTITION_EOF


def test_what_is_printed_cannot_steer_a_terminal() -> None:
    assert printable("a\x1b]0;title\x07b\nü\u202e") == "a\\x1b]0;title\\x07b\\nü\\u202e"
