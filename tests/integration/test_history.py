"""The rows of a table, and then the records of a topic, become one stream of samples, each once."""

from __future__ import annotations

import functools
import json
import os
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Consumer, TopicPartition
from doll.config import JobConfig, parse
from doll.errors import ConfigError, DataLossError, DollError
from doll.kafka import topics
from doll.kafka.range_reader import RangeReader
from doll.kafka.worker_offsets import group_of
from doll.local.forks import ForkServer
from doll.producers import history
from doll.producers.history import audit_history, read_state
from doll.producers.main import run_producer
from doll.services import Services
from forked_commands import Program
from owners_topic import OwnersTopic
from safetensors.numpy import load_file
from structlog.testing import capture_logs
from waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.usefixtures("services")]

KILLS = int(os.environ.get("DOLL_KILLS", "5"))
BY_OFFSET = {"partition": "p", "offset": "o"}
BY_TIME = {"key": "x", "overlap_s": 30}
Row = tuple[int, int, int, int]  # x, at, partition, offset


@pytest.fixture
def clicks(services: Services, job_name: str) -> OwnersTopic:
    return OwnersTopic(services.kafka, f"clicks.{job_name}")


def job_of(name: str, clicks: OwnersTopic, folder: Path, handover: Any = BY_OFFSET, **more: Any) -> JobConfig:
    source = {
        "kind": "history", "table": str(folder), "topic": clicks.name, "time": "at", "columns": ["x", "at"],
        "handover": handover, **more,
    }  # fmt: skip
    job = {
        "job": name, "task": {"class": "gaussian:Gaussian"}, "data": {"workers": 2, "partitions": 4},
        "source": source, "kafka": {"replication_factor": 1},
    }  # fmt: skip
    return parse(json.dumps(job))


class Owner:
    """Writes records with numbers x = 0, 1, ... to the topic, and exports some of it as files."""

    def __init__(self, clicks: OwnersTopic, folder: Path) -> None:
        self._clicks, self._folder = clicks, folder
        self.written = self._files = 0
        self._rng = random.Random(0)

    def write(self, count: int) -> None:
        now_ms = int(time.time() * 1000)
        values = [
            json.dumps({"x": x, "at": now_ms - self._rng.randrange(5000)}).encode()
            for x in range(self.written, self.written + count)
        ]
        self._clicks.write([(str(self._rng.random()), value) for value in values])
        self.written += count

    def rows(self) -> list[Row]:
        records = sorted((at, json.loads(value)) for at, value in self._clicks.committed().items())
        return [(value["x"], value["at"], *at) for at, value in records]

    def export(self, rows: list[Row], files: int = 3, group: int = 50) -> None:
        """Write the rows into files, in the order of their offsets: the times of the files overlap."""
        self._folder.mkdir(exist_ok=True)
        for number in range(files):
            columns = list(zip(*rows[number::files], strict=True))
            table = pa.table(dict(zip(("x", "at", "p", "o"), map(list, columns), strict=True)))
            pq.write_table(table, self._folder / f"{self._files}.parquet", row_group_size=group)
            self._files += 1


def samples_of(config: JobConfig, services: Services) -> list[dict[str, Any]]:
    with RangeReader(config, services) as reader:
        topic = config.topic("samples")
        return [
            json.loads(value or b"")
            for partition in range(config.data.num_partitions)
            for _, value in reader.read(topic, partition, *reader.bounds(topic, partition))
        ]


def sent(config: JobConfig, services: Services) -> int:
    with RangeReader(config, services) as reader:
        try:
            state = read_state(config, reader)
        except DollError:
            return 0
    return state.rows + state.forwarded


def has_sent(config: JobConfig, services: Services, count: int) -> bool:
    return sent(config, services) >= count


def run_until(config: JobConfig, services: Services, count: int) -> None:
    """Send until there are `count` samples."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        producer = pool.submit(run_producer, config, services, stop=stop)
        try:
            until(lambda: producer.done() or sent(config, services) >= count, "all samples", timeout_s=60)
        finally:
            stop.set()
    assert producer.result() == 0


def require_each_once(config: JobConfig, services: Services, count: int) -> None:
    counts = Counter(sample["x"] for sample in samples_of(config, services))
    assert counts == Counter(range(count))
    report = audit_history(config, services)
    assert report.problems == [], report.text()


@pytest.mark.parametrize("handover", [BY_OFFSET, BY_TIME], ids=["offset", "time"])
def test_each_row_and_each_record_is_sent_once_through_kills(
    services: Services, job_name: str, clicks: OwnersTopic, fork_server: ForkServer, tmp_path: Path, handover: Any
) -> None:
    """`DOLL_KILLS` SIGKILLs of the producer, while rows and then records are sent."""
    clicks.create(3)
    owner = Owner(clicks, tmp_path / "table")
    owner.write(6000)
    rows = owner.rows()
    owner.write(500)
    owner.export(rows)
    config = job_of(job_name, clicks, tmp_path / "table", handover)
    (tmp_path / "job.yaml").write_text(config.model_dump_json(by_alias=True, exclude_none=True))
    topics.ensure(config, services)
    rng = random.Random(1)
    arguments = [str(tmp_path / "job.yaml"), services.kafka, services.redis, str(tmp_path)]
    for kill in range(KILLS + 1):
        role = fork_server.start_role(
            "doll.run.local.roles:producer_role", arguments, log_path=tmp_path / f"{kill}.log", name="producer"
        )
        try:
            if kill < KILLS:
                wanted = min(6000, sent(config, services) + 1)
                until(functools.partial(has_sent, config, services, wanted), "some samples")
                owner.write(rng.randrange(200))
            else:
                until(lambda: sent(config, services) >= owner.written, "all samples", timeout_s=60)
        finally:
            role.kill()
    require_each_once(config, services, owner.written)


def test_rows_wait_for_workers_that_are_far_behind(
    services: Services, job_name: str, clicks: OwnersTopic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_ROWS", 50)
    monkeypatch.setattr(history, "_BACKLOG_S", 0.0)
    monkeypatch.setattr(history, "_REPORT_S", 0.05)
    clicks.create(2)
    owner = Owner(clicks, tmp_path / "table")
    owner.write(900)
    owner.export(owner.rows())
    config = job_of(job_name, clicks, tmp_path / "table", max_unlearned=200)
    topics.ensure(config, services)
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool, capture_logs() as logs:
        producer = pool.submit(run_producer, config, services, stop=stop)
        try:
            until(lambda: any(line["event"] == "history_waits" for line in logs), "a producer that waits")
            before = sent(config, services)
            assert 150 <= before < 700, "it sees what a transaction has committed; the faster it is, the more that is"
            learn(config, services)
            until(lambda: sent(config, services) > before, "more rows")
            assert sent(config, services) < 900
            while not producer.done() and sent(config, services) < 900:
                learn(config, services)
        finally:
            stop.set()
    assert producer.result() == 0
    require_each_once(config, services, 900)


def learn(config: JobConfig, services: Services) -> None:
    """Commit, as a worker does, what the samples topic has."""
    topic = config.topic("samples")
    with RangeReader(config, services) as reader:
        ends = [reader.bounds(topic, number)[1] for number in range(config.data.num_partitions)]
    consumer = Consumer({"bootstrap.servers": services.kafka, "group.id": group_of(config.job, 1)})
    consumer.commit(offsets=[TopicPartition(topic, number, end) for number, end in enumerate(ends)], asynchronous=False)
    consumer.close()


def test_the_rows_come_in_the_order_of_their_times_and_a_second_run_sends_nothing_again(
    services: Services, job_name: str, clicks: OwnersTopic, tmp_path: Path
) -> None:
    clicks.create(2)
    owner = Owner(clicks, tmp_path / "table")
    owner.write(900)
    owner.export(owner.rows())
    config = job_of(job_name, clicks, tmp_path / "table")
    run_until(config, services, 900)
    with RangeReader(config, services) as reader:
        for partition in range(4):
            topic = config.topic("samples")
            values = [value for _, value in reader.read(topic, partition, *reader.bounds(topic, partition))]
            times = [json.loads(value or b"")["at"] for value in values]
            assert times == sorted(times)
    for file in (tmp_path / "table").iterdir():
        file.unlink()  # nothing needs the table any more
    owner.write(100)
    run_until(config, services, 1000)
    require_each_once(config, services, 1000)


def test_what_contradicts_the_beginning_is_refused_with_one_line(
    services: Services, job_name: str, clicks: OwnersTopic, tmp_path: Path
) -> None:
    clicks.create(1)
    owner = Owner(clicks, tmp_path / "table")
    owner.write(1000)
    owner.export(owner.rows()[:600])
    config = job_of(job_name, clicks, tmp_path / "table", limit_samples=300)
    with pytest.raises(ConfigError, match="correct the unit"):
        run_until(job_of(job_name, clicks, tmp_path / "table", time={"field": "at", "unit": "s"}), services, 1)
    run_until(config, services, 300)
    assert sent(config, services) == 300
    more = job_of(job_name, clicks, tmp_path / "table")
    owner.export(owner.rows()[:10], files=1)  # a new file does not count
    file = tmp_path / "table" / "1.parquet"
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(ConfigError, match=r"1\.parquet"):
        run_until(more, services, 1000)
    pq.write_table(pa.table({name: [1] for name in ("x", "at", "p", "o")}), file)
    with pytest.raises(ConfigError, match=r"file 1\.parquet was written again since the history began"):
        run_until(more, services, 1000)
    file.write_bytes(content)
    clicks.delete_records({0: 700})
    with pytest.raises(DataLossError, match="partition 0: the records 600 to 699 after the end of the history"):
        run_until(more, services, 1000)
    again = job_of(f"{job_name}-2", clicks, tmp_path / "table")
    with pytest.raises(ConfigError, match="610 rows for offsets 0 to 599: some are twice"):
        run_until(again, services, 1000)
    (tmp_path / "table" / "3.parquet").unlink()
    with pytest.raises(DataLossError, match="partition 0: the records 600 to 699 after the end of the history"):
        run_until(again, services, 1000)


COUNTED = """
import msgspec
import numpy as np
import torch
from doll import Sample, Task


class Counted(Task):
    '''Its model is a weight for each record: how often it has been learned.'''

    def build_model(self):
        model = torch.nn.Linear(400, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        return model

    def decode(self, record):
        x = np.zeros(400, np.float32)
        x[msgspec.json.decode(record)["x"]] = 1.0
        return Sample(x, 0.0)

    def step(self, weights, x, y, rng):
        return np.asarray(x).sum(0).astype(np.float32)
"""


def test_a_job_learns_each_row_and_each_record_once(
    services: Services, job_name: str, clicks: OwnersTopic, doll: Program, tmp_path: Path
) -> None:
    """`doll up` starts the producer; the model says which samples it has learned, and how often."""
    clicks.create(3)
    owner = Owner(clicks, tmp_path / "table")
    owner.write(300)
    owner.export(owner.rows())
    owner.write(100)
    (tmp_path / "task.py").write_text(COUNTED)
    job = job_of(job_name, clicks, tmp_path / "table", limit_samples=400)
    (tmp_path / "job.yaml").write_text(json.dumps(job.model_dump(mode="json", exclude_none=True, by_alias=True)))
    settings = [
        f"kafka.address={services.kafka}", f"redis.address={services.redis}", "task={class: 'task.py:Counted'}",
        "training.policy={name: ssp}", "data.batch_size=10", "data.cut_after_s=1",
        "stop.samples=400", "data.workers=2", "evaluation.enabled=false",
    ]  # fmt: skip
    chosen = [word for setting in settings for word in ("--set", setting)]
    run = doll("up", tmp_path / "job.yaml", "--parent-folder", tmp_path / "runs", *chosen, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    folder = next((tmp_path / "runs").iterdir())
    exported = doll("export", folder, "--out", tmp_path / "model", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    (weights,) = load_file(tmp_path / "model" / "model.safetensors").values()
    assert weights.ravel().tolist() == [1.0] * 400
    audited = doll("audit", folder, cwd=tmp_path)
    assert audited.returncode == 0, audited.stderr
    assert "300 rows" in audited.stdout
