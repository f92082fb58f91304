"""Features and labels of two foreign topics become one stream of samples, each record once."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from doll.config import JobConfig, parse
from doll.errors import ConfigError, DataLossError
from doll.join.audit import audit_join
from doll.join.main import run_joiner
from doll.kafka import topics
from doll.kafka.range_reader import RangeReader
from doll.local.forks import ForkServer
from doll.local.kafka_broker import LocalKafka
from doll.records.join_log import Step, decode_step
from doll.services import Services
from forked_commands import Program
from job_rig import MakePipeline
from owners_topic import OwnersTopic
from safetensors.numpy import load_file
from waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.usefixtures("services")]

WINDOW_S = 3.0


@pytest.fixture
def shown(services: Services, job_name: str) -> OwnersTopic:
    return OwnersTopic(services.kafka, f"shown.{job_name}")


@pytest.fixture
def clicks(services: Services, job_name: str) -> OwnersTopic:
    return OwnersTopic(services.kafka, f"clicks.{job_name}")


def job_of(name: str, shown: OwnersTopic, clicks: OwnersTopic, **more: Any) -> JobConfig:
    join = {
        "features": {"topic": shown.name, "key": "id", "time": "at"},
        "labels": [{"topic": clicks.name, "name": "click", "key": "id", "time": "at"}],
        "window_s": WINDOW_S, "lateness_s": 1.0, **more,
    }  # fmt: skip
    job = {
        "job": name, "task": {"class": "gaussian:Gaussian"}, "data": {"workers": 2, "partitions": 4, "join": join},
        "kafka": {"replication_factor": 1},
    }  # fmt: skip
    return parse(json.dumps(job))


def records_of(config: JobConfig, services: Services, kind: Any) -> Iterator[tuple[int, bytes]]:
    """The partition and the value of each committed record of a topic of the job."""
    with RangeReader(config, services) as reader:
        topic = config.topic(kind)
        for partition in range(config.data.num_partitions):
            for _, value in reader.read(topic, partition, *reader.bounds(topic, partition)):
                yield partition, value or b""


def steps_of(config: JobConfig, services: Services) -> list[tuple[int, Step]]:
    return [(partition, decode_step(value)) for partition, value in records_of(config, services, "joins")]


def open_keys(config: JobConfig, services: Services) -> int:
    return sum({partition: step.open for partition, step in steps_of(config, services) if step.restart}.values())


def settled_samples(config: JobConfig, services: Services) -> int:
    return sum(step.samples for _, step in steps_of(config, services))


def test_features_and_labels_of_other_partitions_are_joined_and_windows_close_without_any_record(
    services: Services, job_name: str, shown: OwnersTopic, clicks: OwnersTopic
) -> None:
    """Twelve and seven partitions; a third of the labels comes before its features, a third of the keys has none."""
    shown.create(12)
    clicks.create(7)
    config, rng = job_of(job_name, shown, clicks), random.Random(0)
    now_ms = int(time.time() * 1000)
    labelled = {f"k{number}" for number in range(300) if number % 3}
    features = [
        (key := f"k{number}", json.dumps({"id": key, "at": now_ms, "x": number}).encode()) for number in range(300)
    ]
    labels = [(str(rng.random()), json.dumps({"id": key, "at": now_ms + 500}).encode()) for key in sorted(labelled)]
    clicks.write(labels[:100])
    shown.write(features)
    clicks.write(labels[100:])
    topics.ensure(config, services)
    stop = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        joiners = [pool.submit(run_joiner, config, services, number, stop=stop) for number in range(2)]
        try:
            until(lambda: all_done(joiners) or len(list(records_of(config, services, "samples"))) == 300, "all samples")
        finally:
            stop.set()
    assert [joiner.result() for joiner in joiners] == [0, 0]
    samples = [json.loads(value) for _, value in records_of(config, services, "samples")]
    assert {sample["id"]: sample["click"] for sample in samples} == {
        f"k{number}": int(f"k{number}" in labelled) for number in range(300)
    }
    assert len(samples) == 300
    assert open_keys(config, services) == 0
    assert not [refused for _, step in steps_of(config, services) for refused in step.refused]


KILLS = int(os.environ.get("DOLL_KILLS", "5"))
MOST_KEYS = 40_000


class Joiners:
    """Processes of `doll join`, by their numbers."""

    def __init__(self, config: JobConfig, services: Services, forks: ForkServer, folder: Path) -> None:
        self._services, self._forks, self._folder = services, forks, folder
        (folder / "job.yaml").write_text(config.model_dump_json(by_alias=True, exclude_none=True))
        self.live: dict[int, Any] = {}
        self._started = 0

    def start(self, number: int) -> None:
        arguments = [
            str(self._folder / "job.yaml"),
            self._services.kafka,
            self._services.redis,
            str(self._folder),
            number,
        ]
        self._started += 1
        log = self._folder / f"joiner-{number}-{self._started}.log"
        self.live[number] = self._forks.start_role(
            "doll.run.local.roles:joiner_role", arguments, log_path=log, name=f"joiner-{number}"
        )

    def kill(self, number: int) -> None:
        self.live.pop(number).kill()

    def close(self) -> None:
        for role in self.live.values():
            role.kill()


class Owed(NamedTuple):
    """A label, or a retraction (`gone`), that is written at a time."""

    at_s: float
    key: str
    gone: bool = False


class Owner:
    """Writes features and labels in transactions, one of ten of which is aborted, and remembers what must follow.

    Some labels come before their features, twice, late, or without any features; with `retracts` some are taken back.
    """

    def __init__(self, shown: OwnersTopic, clicks: OwnersTopic, *, retracts: bool = False) -> None:
        self._shown, self._clicks, self._retracts = shown, clicks, retracts
        self._producer = shown.transactional(f"owner-{shown.name}")
        self._rng = random.Random(0)
        self._next = 0
        self._owed: list[Owed] = []
        self.label_of: dict[str, int] = {}  # by key of features: the label that it has in the end
        self._shown_ms: dict[str, int] = {}
        self.orphans = self.late = self.bad = self.unused = self.corrections = 0

    def write(self, num_features: int = 20) -> None:
        """A transaction."""
        rng, now_s = self._rng, time.time()
        now_ms, aborts = int(now_s * 1000), rng.random() < 0.1
        self._producer.begin_transaction()
        due = sorted(item for item in self._owed if item.at_s <= now_s)
        orphans: list[str] = []
        for _ in range(num_features):
            number, key = self._next, f"k{self._next}"
            self._next += 1
            self._send(self._shown, str(int(rng.paretovariate(0.5)) % 50), {"id": key, "at": now_ms, "x": number})
            if aborts:
                continue
            kind = rng.random()
            self.label_of[key], self._shown_ms[key] = 0, now_ms
            if kind < 0.3:
                self._owe(Owed(now_s + rng.random() * 0.5 * WINDOW_S, key))
            elif kind < 0.5:
                due.append(Owed(now_s, key))
                self._owe(due[-1])
            if kind < 0.02:
                orphans.append(f"orphan-{key}")
            elif kind < 0.06 and self._retracts:
                self._owe(Owed(now_s + 0.6 * WINDOW_S, key, gone=True))
            elif kind < 0.1 and self._retracts:
                self._owe(Owed(now_s + 0.6 * WINDOW_S, key))  # a second one
        for item in due:
            self._send(self._clicks, item.key, {"id": item.key, "at": now_ms, "gone": item.gone})
        for key in orphans:
            self._send(self._clicks, key, {"id": key, "at": now_ms})
        has_bad = rng.random() < 0.2
        if has_bad:
            self._send(self._shown, "bad", {"at": now_ms})
        self._producer.flush()
        if aborts:
            self._producer.abort_transaction(60)
            return
        self._producer.commit_transaction(60)
        self.bad += has_bad
        self.orphans += len(orphans)
        for item in due:
            self._owed.remove(item)
            if now_ms - self._shown_ms[item.key] > 1000 * WINDOW_S:  # this program had to wait
                self.late += 1
            elif not item.gone and self.label_of[item.key]:
                self.unused += 1
            else:
                self.corrections += item.gone
                self.label_of[item.key] = int(not item.gone)

    def _owe(self, item: Owed) -> None:
        self._owed.append(item)

    def _send(self, topic: OwnersTopic, key: str, record: Any) -> None:
        self._producer.produce(topic.name, json.dumps(record).encode(), key)

    @property
    def is_owing(self) -> bool:
        return bool(self._owed)


def test_joined_records_equal_an_offline_join_through_kills_and_changing_joiners(
    services: Services, job_name: str, shown: OwnersTopic, clicks: OwnersTopic, fork_server: ForkServer, tmp_path: Path
) -> None:
    """`DOLL_KILLS` SIGKILLs; from one joiner to three, then two; one transaction in ten of the owner is aborted."""
    shown.create(12)
    clicks.create(7)
    config = job_of(job_name, shown, clicks, lateness_s=10.0)
    topics.ensure(config, services)
    owner, rng = Owner(shown, clicks), random.Random(1)
    joiners = Joiners(config, services, fork_server, tmp_path)
    joiners.start(0)
    try:
        for kill in range(KILLS + 2):
            if kill == 1:
                joiners.start(1)
                joiners.start(2)
            if kill == KILLS:
                joiners.kill(2)
            until_s = time.monotonic() + rng.uniform(0.5, 2.5)
            while time.monotonic() < until_s:
                owner.write()
            number = rng.choice(list(joiners.live))
            joiners.kill(number)
            joiners.start(number)
        while owner.is_owing:
            owner.write(0)
        settled = len(owner.label_of)
        until(
            lambda: sum(step.samples for _, step in steps_of(config, services)) >= settled, "all samples", timeout_s=120
        )
        until(lambda: open_keys(config, services) == 0, "all windows close", timeout_s=120)
    finally:
        joiners.close()
    samples = [json.loads(value) for _, value in records_of(config, services, "samples")]
    assert len(samples) == len(owner.label_of)
    assert {sample["id"]: sample["click"] for sample in samples} == owner.label_of
    refused = Counter(item.code for _, step in steps_of(config, services) for item in step.refused)
    assert refused == +Counter({"orphan": owner.orphans, "late": owner.late, "not_json": owner.bad})
    report = audit_join(config, services)
    assert report.problems == []
    assert [counts.open + counts.unread for counts in report.topics] == [0, 0]


def all_done(futures: list[Any]) -> bool:
    for future in futures:
        if future.done():
            future.result()
    return False


COUNTED = """
import msgspec
import numpy as np
import torch
from doll import Sample, Task

KEYS = 400


class Counted(Task):
    '''Its model is a weight for each key: 1 without a click, 3 with a click.'''

    def build_model(self):
        model = torch.nn.Linear(KEYS, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        return model

    def decode(self, record):
        event = msgspec.json.decode(record)
        x = np.zeros(KEYS, np.float32)
        x[event["x"]] = 1.0
        replaced = 1 + 2 * event["doll_replaced_label"] if event["doll_is_correction"] else 0
        return Sample(x, 1 + 2 * float(event["click"]) - replaced)

    def step(self, weights, x, y, rng):
        return (np.asarray(x) * np.asarray(y).reshape(-1, 1)).sum(0).astype(np.float32)
"""


def test_the_model_has_each_joined_record_once_whoever_dies(
    services: Services, broker: LocalKafka, job_name: str, shown: OwnersTopic, clicks: OwnersTopic,
    make_pipeline: MakePipeline, tmp_path: Path,
) -> None:  # fmt: skip
    """Joiners, workers, the server and the broker die; joiners go from one to three, then two; labels are retracted."""
    shown.create(12)
    clicks.create(7)
    (tmp_path / "task.py").write_text(COUNTED.replace("KEYS = 400", f"KEYS = {MOST_KEYS}"))
    label = {"topic": clicks.name, "name": "click", "key": "id", "time": "at", "retract": "gone"}
    join = job_of(job_name, shown, clicks, lateness_s=15.0, labels=[label]).data.join
    assert join is not None
    job = make_pipeline(
        "task={class: 'task.py:Counted'}", f"data.join={join.model_dump_json(by_alias=True, exclude_none=True)}",
        "data.partitions=4", "data.batch_size=10", "data.cut_after_s=1", "training.policy={name: ssp}",
        "training.optimizer={name: sgd, lr: 1}", "worker.stall_timeout_s=600",
    )  # fmt: skip
    owner, rng = Owner(shown, clicks, retracts=True), random.Random(1)

    def kill_role(name: str) -> None:
        while name not in job.supervisor.handles():  # it waits to be started again
            owner.write(5)
            job.poll()
        job.kill(name)

    job.start()
    names = ["joiner-0", "joiner-1"]
    job._start(job.spec("joiner-0", "joiner_role", 0))
    for kill in range(KILLS + 3):
        until_s = time.monotonic() + rng.uniform(0.5, 2.5)
        while time.monotonic() < until_s:
            owner.write(5)
            job.poll()
        if kill == 1:
            job._start(job.spec("joiner-1", "joiner_role", 1))
            third = job.launch("joiner-2", "joiner_role", 2)
        elif kill == KILLS + 1:
            third.kill()
        match ("joiner", "worker", "joiner", "ps", "joiner", "worker", "broker", "joiner")[kill % 8]:
            case "joiner":
                kill_role(rng.choice(names[: 1 if kill < 2 else 2]))
            case "worker":
                kill_role(f"worker-{rng.randrange(2)}")
            case "ps":
                kill_role("ps")
            case _:
                broker.kill()
                broker.start()
    while owner.is_owing:
        owner.write(0)
        job.poll()
    config = job.config
    settled = len(owner.label_of)
    job.until(lambda: settled_samples(config, services) >= settled, "all samples", timeout_s=120)
    job.until(lambda: open_keys(config, services) == 0, "all windows close", timeout_s=120)
    job.until(lambda: job.audit().pending == 0, "all records are learned", timeout_s=120)
    report = audit_join(config, services)
    assert report.problems == []
    assert [counts.open + counts.unread for counts in report.topics] == [0, 0]
    assert (report.samples, report.corrections) == (settled, owner.corrections)
    refused = Counter(item.code for _, step in steps_of(config, services) for item in step.refused)
    assert refused == +Counter(orphan=owner.orphans, late=owner.late, not_json=owner.bad, unused=owner.unused)
    audited = job.assert_audit_ok()
    assert audited.applied == settled + owner.corrections
    expected = np.zeros(MOST_KEYS, np.float32)
    for key, value in owner.label_of.items():
        expected[int(key[1:])] = 1 + 2 * value
    assert owner.corrections > 0
    np.testing.assert_array_equal(job.checkpoint().tensors["weights"], expected)


def test_a_job_learns_each_joined_record_once(
    services: Services, job_name: str, shown: OwnersTopic, clicks: OwnersTopic, doll: Program, tmp_path: Path
) -> None:
    """`doll up` starts the joiners; the model says which samples it has learned, and how often."""
    shown.create(3)
    clicks.create(2)
    now_ms = int(time.time() * 1000)
    numbers = range(400)
    shown.write([(f"k{at}", json.dumps({"id": f"k{at}", "at": now_ms, "x": at}).encode()) for at in numbers])
    clicks.write([(f"k{at}", json.dumps({"id": f"k{at}", "at": now_ms + 900}).encode()) for at in numbers if at % 3])
    (tmp_path / "task.py").write_text(COUNTED)
    job = job_of(job_name, shown, clicks, joiners=2).model_dump(mode="json", exclude_none=True, by_alias=True)
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    settings = [
        f"kafka.address={services.kafka}", f"redis.address={services.redis}", "task={class: 'task.py:Counted'}",
        "training.policy={name: ssp}", "data.batch_size=10", "data.cut_after_s=1",
        "stop.samples=400", "data.workers=2", "evaluation.enabled=false",
    ]  # fmt: skip
    chosen = [word for setting in settings for word in ("--set", setting)]
    run = doll("up", tmp_path / "job.yaml", "--parent-folder", tmp_path / "runs", *chosen, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    folder = next((tmp_path / "runs").iterdir())
    report = json.loads((folder / "report.json").read_text())
    assert report["samples"] == 400
    exported = doll("export", folder, "--out", tmp_path / "model", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    (weights,) = load_file(tmp_path / "model" / "model.safetensors").values()
    assert weights.ravel().tolist() == [3.0 if at % 3 else 1.0 for at in numbers]


def test_records_that_are_not_committed_when_partitions_move_count_once(
    services: Services, job_name: str, shown: OwnersTopic, clicks: OwnersTopic
) -> None:
    """Transactions are seconds apart, and further joiners come while records wait for one."""
    shown.create(6)
    clicks.create(6)
    config = job_of(job_name, shown, clicks, commit_every_s=2.0, lateness_s=10.0)
    topics.ensure(config, services)
    stop, keys = threading.Event(), 0
    with ThreadPoolExecutor(3) as pool:
        joiners = []
        try:
            for number in range(3):
                joiners.append(pool.submit(run_joiner, config, services, number, stop=stop))
                until_s = time.monotonic() + 6
                while time.monotonic() < until_s:
                    now_ms = int(time.time() * 1000)
                    names = [f"k{at}" for at in range(keys, keys + 20)]
                    keys += 20
                    shown.write([(name, json.dumps({"id": name, "at": now_ms}).encode()) for name in names])
                    clicks.write([(name, json.dumps({"id": name, "at": now_ms}).encode()) for name in names])
            until(lambda: all_done(joiners) or settled_samples(config, services) >= keys, "all samples", timeout_s=60)
        finally:
            stop.set()
    assert [joiner.result() for joiner in joiners] == [0, 0, 0]
    counts = Counter(json.loads(value)["id"] for _, value in records_of(config, services, "samples"))
    assert counts == Counter(f"k{at}" for at in range(keys))
    assert audit_join(config, services).problems == []


def joined_once(config: JobConfig, services: Services, shown: OwnersTopic, clicks: OwnersTopic) -> None:
    """Join ten pairs, and stop."""
    topics.ensure(config, services)
    now_ms = int(time.time() * 1000)
    for topic in (shown, clicks):
        topic.write([(f"k{at}", json.dumps({"id": f"k{at}", "at": now_ms}).encode()) for at in range(10)])
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        joiner = pool.submit(run_joiner, config, services, 0, stop=stop)
        try:
            until(lambda: joiner.done() or settled_samples(config, services) >= 10, "all samples", timeout_s=60)
        finally:
            stop.set()
        assert joiner.result() == 0


def test_a_joiner_refuses_a_topic_that_was_made_again(
    services: Services, job_name: str, shown: OwnersTopic, clicks: OwnersTopic
) -> None:
    shown.create(1)
    clicks.create(1)
    config = job_of(job_name, shown, clicks)
    joined_once(config, services, shown, clicks)
    clicks.delete()
    until(lambda: clicks.name not in clicks.admin.list_topics().topics, "the deletion")
    with pytest.raises(ConfigError, match="has no topic"):
        run_joiner(config, services, 0, stop=threading.Event())
    clicks.create(1)
    with pytest.raises(DataLossError, match=r"was deleted and created again.*begin again under another job name"):
        run_joiner(config, services, 0, stop=threading.Event())


def test_a_joiner_refuses_to_begin_again_when_kafka_has_forgotten_its_offsets(
    services: Services, job_name: str, shown: OwnersTopic, clicks: OwnersTopic
) -> None:
    """As after `offsets.retention.minutes` without a joiner."""
    shown.create(1)
    clicks.create(1)
    config = job_of(job_name, shown, clicks)
    joined_once(config, services, shown, clicks)
    group = f"doll.{config.job}.join"

    def is_deleted() -> bool:
        """The group has a static member until its session ends."""
        return shown.admin.delete_consumer_groups([group])[group].exception(60) is None

    until(is_deleted, "the group's deletion", timeout_s=60)
    with pytest.raises(DataLossError, match="no committed offset"):
        run_joiner(config, services, 0, stop=threading.Event())
    assert settled_samples(config, services) == 10
