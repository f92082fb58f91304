"""The producer against a real broker: every sample once, on its stream, whatever happens in between."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from doll import config as job_config
from doll.config import JobConfig
from doll.errors import ConfigError
from doll.kafka import topics
from doll.kafka.clients import kafka_settings
from doll.local.kafka_broker import LocalKafka
from doll.producers.main import run_producer
from doll.producers.position import position_headers, source_name
from doll.records import control as records
from doll.records import packing
from doll.services import Services
from doll.task.base import load_task
from forked_commands import Program, environment
from paths import ROOT
from stacked import stack
from waiting import WAIT_TIMEOUT_S, until

DIGITS = "{kind: python, of: examples.digits.task:samples"
GAUSSIANS = "{kind: python, of: examples.synthetic.source:gaussians, limit_samples: 100}"

pytestmark = pytest.mark.integration


def _config(job_name: str, source: str, folder: Path, *, data: str = "workers: 3", arrivals: str = "") -> JobConfig:
    text = (
        f"job: {job_name}\ntask: {{class: 'a:B'}}\ndata: {{{data}}}\nsource: {source}\n"
        f"arrivals: {{{arrivals or 'process: asap'}}}"
    )
    return job_config.parse(text, base_folder=folder)


def _read(config: JobConfig, services: Services, topic: str | None = None) -> list[list[bytes]]:
    """Values of each partition of a topic (default: the samples), from the first offset to the present end."""
    name = topic or config.topic("samples")
    (info,) = (info for info in topics.describe(config, services) if info.name == name)
    values: list[list[bytes]] = [[] for _ in info.high]
    consumer = Consumer(kafka_settings(config, services, group_id="test", enable_auto_commit=False))
    consumer.assign([TopicPartition(name, n, info.low[n]) for n in range(info.partitions)])
    deadline_s = time.monotonic() + WAIT_TIMEOUT_S
    while sum(map(len, values)) < sum(info.high) - sum(info.low):
        assert time.monotonic() < deadline_s, f"read {list(map(len, values))} of {info.high} records"
        for message in consumer.consume(500, 0.2):
            assert message.error() is None
            values[message.partition()].append(message.value())
    consumer.close()
    return values


def _await_records(config: JobConfig, services: Services, count: int) -> None:
    """Wait until the samples topic is there and holds `count` records."""
    topics.ensure(config, services)
    consumer = Consumer(kafka_settings(config, services, group_id="test"))
    partitions = [TopicPartition(config.topic("samples"), n) for n in range(config.data.workers)]
    deadline_s = time.monotonic() + WAIT_TIMEOUT_S
    there = 0
    while there < count:
        assert time.monotonic() < deadline_s, f"{there} of {count} records"
        with contextlib.suppress(KafkaException):  # a new topic's leader may not know of it yet
            there = sum(consumer.get_watermark_offsets(partition, timeout=60)[1] for partition in partitions)
    consumer.close()


@contextlib.contextmanager
def _running(run: Callable[[threading.Event], int]) -> Iterator[list[int]]:
    """A producer in a thread, ended with the block; its exit code in the end."""
    stop, codes = threading.Event(), list[int]()
    thread = threading.Thread(target=lambda: codes.append(run(stop)))
    thread.start()
    try:
        yield codes
    finally:
        stop.set()
        thread.join(WAIT_TIMEOUT_S)


def _lines(folder: Path, count: int) -> list[bytes]:
    lines = [b"line %06d" % n for n in range(count)]
    (folder / "lines.csv").write_bytes(b"\n".join(lines))
    return lines


def test_streams_get_equal_shares_and_the_limit_is_exact(services: Services, job_name: str, tmp_path: Path) -> None:
    config = _config(job_name, f"{DIGITS}, limit_samples: 1000}}", tmp_path)
    said: list[str] = []
    assert run_producer(config, services, tmp_path, say=said.append) == 0
    streams = _read(config, services)
    assert [len(stream) for stream in streams] == [334, 333, 333]
    assert {len(value) for stream in streams for value in stream} == {65}
    assert said == ["1000 samples delivered, 0 failed"]
    counts = json.loads((tmp_path / "producer.json").read_text())
    assert counts == {"sent": 1000, "delivered": 1000, "failed": 0, "unsent": 0}


def test_a_second_run_goes_on_with_fresh_samples(services: Services, job_name: str, tmp_path: Path) -> None:
    config = _config(job_name, f"{DIGITS}, limit_samples: 600}}", tmp_path)
    for _ in range(2):
        assert run_producer(config, services) == 0
    values = [value for stream in _read(config, services) for value in stream]
    assert len(values) == len(set(values)) == 1200


def test_every_line_arrives_once_in_order_on_its_stream(services: Services, job_name: str, tmp_path: Path) -> None:
    lines = _lines(tmp_path, 1001)
    config = _config(job_name, "{kind: csv, path: lines.csv}", tmp_path)
    assert run_producer(config, services) == 0
    assert _read(config, services) == [lines[n::3] for n in range(3)]


def test_packed_records_hold_m_samples_and_the_last_pack_is_flushed(
    services: Services, job_name: str, tmp_path: Path
) -> None:
    lines = _lines(tmp_path, 1001)
    config = _config(
        job_name, "{kind: csv, path: lines.csv}", tmp_path, data="workers: 2, batch_size: 32, samples_per_record: 8"
    )
    said: list[str] = []
    assert run_producer(config, services, say=said.append) == 0
    streams = [[packing.unpack(value, 8).samples() for value in stream] for stream in _read(config, services)]
    assert [[line for pack in stream for line in pack] for stream in streams] == [lines[0::2], lines[1::2]]
    assert [{len(pack) for pack in stream[:-1]} for stream in streams] == [{8}, {8}]
    assert [len(stream[-1]) for stream in streams] == [501 % 8, 500 % 8]
    assert said == ["1001 samples delivered, 0 failed"]


def test_the_limit_counts_samples_not_records(services: Services, job_name: str, tmp_path: Path) -> None:
    data = "workers: 2, batch_size: 32, samples_per_record: 16"
    config = _config(job_name, GAUSSIANS, tmp_path, data=data)
    assert run_producer(config, services) == 0
    counts = [[packing.unpack(value, 16).num_samples for value in stream] for stream in _read(config, services)]
    assert counts == [[16, 16, 16, 2], [16, 16, 16, 2]]


def test_samples_are_sent_at_their_pace_and_measurements_are_written(
    services: Services, job_name: str, tmp_path: Path
) -> None:
    arrivals = "process: poisson, rate_per_s: [100, 300]"
    config = _config(job_name, f"{DIGITS}, limit_samples: 1000}}", tmp_path, data="workers: 2", arrivals=arrivals)
    topics.ensure(config, services)
    begin_s = time.monotonic()
    assert run_producer(config, services) == 0
    took_s = time.monotonic() - begin_s
    assert took_s > 2.0  # 1000 samples at 400 a second
    shares = [len(stream) for stream in _read(config, services)]
    assert sum(shares) == 1000
    assert shares[0] == pytest.approx(250, abs=70)  # five deviations
    (metrics,) = _read(config, services, config.topic("metrics"))
    decoded = [record for record in map(records.decode, metrics) if isinstance(record, records.Metric)]
    assert len(decoded) == len(metrics) >= 3
    assert all(record.source == "producer" for record in decoded)
    names = {"sent_total", "delivered_total", "failed_total", "rate_per_s", "behind_s"}
    assert {frozenset(record.values) for record in decoded[:-1]} == {frozenset(names)}
    assert set(decoded[-1].values) == {*names, "left"}, "it has ended by itself, and is not missed"
    totals = [record.values["sent_total"] for record in decoded]
    assert totals == sorted(totals)
    assert (totals[-1], decoded[-1].values["delivered_total"], decoded[-1].values["failed_total"]) == (1000, 1000, 0)
    assert max(record.values["rate_per_s"] for record in decoded) > 0


def test_a_stopped_producer_flushes_what_it_sent(services: Services, job_name: str, tmp_path: Path) -> None:
    data = "workers: 2, batch_size: 64, samples_per_record: 64"
    config = _config(job_name, DIGITS + "}", tmp_path, data=data, arrivals="rate_per_s: 500")
    with _running(lambda stop: run_producer(config, services, tmp_path, stop=stop)) as codes:
        _await_records(config, services, 1)
    assert codes == [0]
    counts = json.loads((tmp_path / "producer.json").read_text())
    packs = [packing.unpack(value, 64).num_samples for stream in _read(config, services) for value in stream]
    assert counts == {"sent": sum(packs), "delivered": sum(packs), "failed": 0, "unsent": 0}


def test_a_record_that_kafka_refuses_is_counted_and_told(services: Services, job_name: str, tmp_path: Path) -> None:
    good = [b"a", b"b", b"c"]
    (tmp_path / "lines.csv").write_bytes(b"\n".join([*good, b"x" * 17_000_000, b"d"]))
    config = _config(job_name, "{kind: csv, path: lines.csv}", tmp_path, data="workers: 1")
    topics.ensure(config, services)  # a topic that takes 16 MB, and a job file that allows more
    data = "workers: 1, max_record_bytes: 20000000"
    config = _config(job_name, "{kind: csv, path: lines.csv}", tmp_path, data=data)
    said: list[str] = []
    assert run_producer(config, services, tmp_path, say=said.append) == 1
    assert _read(config, services) == [[b"a", b"b", b"c", b"d"]]
    assert said[-1] == "4 samples delivered, 1 failed"
    assert "a record of 1 sample was not delivered" in said[0]
    assert json.loads((tmp_path / "producer.json").read_text()) == {"sent": 5, "delivered": 4, "failed": 1, "unsent": 0}


def test_a_source_that_breaks_in_the_middle_delivers_what_came_before(
    services: Services, job_name: str, tmp_path: Path
) -> None:
    import gzip
    import random

    noise = b"\n".join(b"%x" % random.Random(n).getrandbits(400) for n in range(3000))
    (tmp_path / "lines.csv.gz").write_bytes(gzip.compress(noise)[:-40_000])
    config = _config(job_name, "{kind: csv, path: lines.csv.gz}", tmp_path, data="workers: 1")
    said: list[str] = []
    with pytest.raises(ConfigError, match="expected a readable file of lines"):
        run_producer(config, services, say=said.append)
    (values,) = _read(config, services)
    assert 0 < len(values) < 3000
    assert values == noise.split(b"\n")[: len(values)]
    assert said == [f"{len(values)} samples delivered, 0 failed"]


PROGRAM = """
import sys
from pathlib import Path
from doll import config
from doll.producers.main import run_producer
from doll.producers.position import position_headers, source_name
from doll.services import Services
loaded = config.load(Path(sys.argv[1]))
say = lambda text: (sys.stdout.write(text + "\\n"), sys.stdout.flush())
sys.exit(run_producer(loaded, Services(sys.argv[2], sys.argv[3]), say=say))
"""


def _piped(job_name: str) -> str:
    """A job that two workers would learn from standard input."""
    return (
        f"job: {job_name}\ntask: {{class: 'a:B'}}\ndata: {{workers: 2}}\n"
        "source: {kind: stdin}\narrivals: {process: asap}\n"
    )


def _start(config_text: str, services: Services, folder: Path) -> subprocess.Popen[str]:
    (folder / "job.yaml").write_text(config_text)
    command = [sys.executable, "-c", PROGRAM, str(folder / "job.yaml"), services.kafka, services.redis]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_broker_that_dies_under_way_loses_and_doubles_nothing(
    services: Services, broker: LocalKafka, job_name: str, tmp_path: Path
) -> None:
    lines = [b"line %06d\n" % n for n in range(1600)]
    text = _piped(job_name)
    config = job_config.parse(text)
    process = _start(text, services, tmp_path)
    try:
        assert process.stdin is not None
        assert process.stdout is not None

        def feed(some: list[bytes]) -> None:
            assert process.stdin is not None
            process.stdin.write(b"".join(some).decode())
            process.stdin.flush()

        feed(lines[:200])
        _await_records(config, services, 200)
        broker.kill()
        try:
            feed(lines[200:900])  # it has something to send while nobody is there to take it
            line = process.stdout.readline()
        finally:
            broker.start()
        feed(lines[900:])
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        said = [text.rstrip() for text in (line, *process.stdout)]
        assert process.wait(WAIT_TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    assert _read(config, services) == [[line.rstrip() for line in lines[n::2]] for n in (0, 1)]
    assert [text.split(" is ")[1].split(":")[0] for text in said[:-1]] == ["unreachable", "reachable again"]
    assert said[-1] == "1600 samples delivered, 0 failed"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_pipe_is_read_as_it_comes_and_a_signal_ends_the_wait(
    services: Services, job_name: str, tmp_path: Path, number: signal.Signals
) -> None:
    text = _piped(job_name)
    config = job_config.parse(text)
    process = _start(text, services, tmp_path)
    try:
        assert process.stdin is not None
        process.stdin.write("one\ntwo\nthree\n")
        process.stdin.flush()
        _await_records(config, services, 3)
        os.kill(process.pid, number)  # the pipe stays open: only the signal can end it
        assert process.wait(WAIT_TIMEOUT_S) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "3 samples delivered, 0 failed\n"
    finally:
        process.kill()
        process.communicate()
    assert _read(config, services) == [[b"one", b"three"], [b"two"]]


def test_a_pipe_that_ends_ends_the_producer(services: Services, job_name: str, tmp_path: Path) -> None:
    text = f"job: {job_name}\ntask: {{class: 'a:B'}}\ndata: {{workers: 2}}\nsource: {{kind: stdin}}\n"
    process = _start(text + "arrivals: {rate_per_s: 1000}\n", services, tmp_path)
    out, _ = process.communicate("".join(f"{n}\n" for n in range(501)), timeout=WAIT_TIMEOUT_S)
    assert (process.returncode, out) == (0, "501 samples delivered, 0 failed\n")
    streams = _read(job_config.parse(text), services)
    assert streams == [[b"%d" % n for n in range(0, 501, 2)], [b"%d" % n for n in range(1, 501, 2)]]


def test_the_python_example_of_the_documentation_runs(
    services: Services, broker: LocalKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job_config.load(ROOT / "examples" / "stdin" / "job.yaml")
    topics.ensure(config, services)
    text = (ROOT / "docs" / "records.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    monkeypatch.setenv("DOLL_KAFKA", broker.address)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    task = load_task(config)
    streams = _read(config, services)
    assert [len(stream) for stream in streams] == [500, 500]
    assert {*stack(task.decode(value) for stream in streams for value in stream)[1].tolist()} == {0, 1}


def test_a_stream_pauses_while_its_worker_is_down(services: Services, job_name: str, tmp_path: Path) -> None:
    arrivals = "process: deterministic, rate_per_s: 200, while_down: pause"
    config = _config(job_name, DIGITS + "}", tmp_path, arrivals=arrivals)
    topics.ensure(config, services)
    producer = Producer(kafka_settings(config, services))

    def report_live(*live: int) -> None:
        workers = tuple(records.WorkerStatus(worker=n, is_live=n in live) for n in range(3))
        status = records.ServerStatus(
            term=1, time_s=time.time(), leader_since_s=0.0, pid=1, version=0, durable_version=0, samples_total=0,
            batches_total=0, waiting_batches=0, computing_batches=0, shortfall_batches=0, stalled_s=0.0,
            workers=workers,
        )  # fmt: skip
        producer.produce(config.topic("metrics"), records.encode(status))
        assert producer.flush(WAIT_TIMEOUT_S) == 0

    def grown(stream: int, count: int) -> list[int]:
        """Wait until the stream holds `count` records more; how many all hold then."""
        consumer = Consumer(kafka_settings(config, services, group_id="test"))
        goal = None
        deadline_s = time.monotonic() + WAIT_TIMEOUT_S
        while True:
            assert time.monotonic() < deadline_s, f"stream {stream} did not grow by {count}"
            ends = [
                consumer.get_watermark_offsets(TopicPartition(config.topic("samples"), n), timeout=60)[1]
                for n in range(3)
            ]
            goal = ends[stream] + count if goal is None else goal
            if ends[stream] >= goal:
                consumer.close()
                return ends

    with _running(lambda stop: run_producer(config, services, stop=stop)):
        report_live(0)
        before = grown(0, 100)
        assert before[1:] == [0, 0]  # a worker that was never reported is not live
        report_live(1, 2)
        grown(1, 100)
        # The report takes a while to arrive, in which the stream goes on.
        until(lambda: grown(1, 20)[0] == grown(1, 20)[0], "the stream to pause")
        stopped = grown(2, 1)[0]
        assert grown(1, 200)[0] == stopped
        report_live(0, 1, 2)
        grown(0, 100)


def test_a_file_goes_on_where_a_killed_producer_was(
    tmp_path: Path, services: Services, job_name: str, doll: Program
) -> None:
    """SIGKILL in mid-file, twice, with others' records and an old generation's in between: each line comes once."""
    lines = [b"line %d" % number for number in range(3001)]
    (tmp_path / "d.csv").write_bytes(b"\n".join(lines))
    # Streams of unlike rates: they are at unlike places when the producer dies.
    text = (
        f"job: {job_name}\ntask: {{class: 'a:B'}}\nsource: {{kind: csv, path: d.csv}}\n"
        "data: {workers: 3, batch_size: 4, samples_per_record: 4}\n"
        "arrivals: {process: deterministic, rate_per_s: [1000, 2000, 500]}"
    )
    (tmp_path / "job.yaml").write_text(text)
    config = job_config.parse(text, base_folder=tmp_path)
    topics.ensure(config, services)
    # What the run before has sent of this very file does not count.
    stray = Producer(kafka_settings(config, services))
    samples = config.topic("samples")
    for stream in range(3):
        stray.produce(
            samples, b"of the run before", partition=stream, headers=position_headers(source_name(config.source), 900)
        )
    started = records.TermStarted(
        term=2, resumed_version=0, origins=(1, 1, 1), records_per_batch=1, time_s=0.0, generation=2
    )
    stray.produce(config.topic("updates"), records.encode(started), partition=0)
    assert stray.flush(60) == 0
    command = ("produce", "--job", tmp_path / "job.yaml")
    for count in (300, 700):
        before = sum(map(len, _read(config, services)))
        process = doll.start(*command, **environment(services))
        try:
            # At most half of what is left, wherever the run before was when it was killed.
            left = len(lines) // 4 - before
            _await_records(config, services, before + min(count // 4, left // 2))
        finally:
            process.kill()
            process.wait()
        for stream in range(3):  # as a replayed dead letter would be
            stray.produce(samples, b"of somebody else", partition=stream)
        assert stray.flush(60) == 0
    assert doll(*command, **environment(services)).returncode == 0
    held = _read(config, services)
    ours = [
        [line for value in stream if not value.startswith(b"of ") for line in packing.unpack(value, 4).samples()]
        for stream in held
    ]
    assert ours == [lines[stream::3] for stream in range(3)]
