"""The evaluator on a real broker and a real Redis, fed with records and weights that the test writes itself."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import record_builders
from confluent_kafka import Producer
from doll.config import JobConfig, load
from doll.kafka import topics
from doll.kafka.clients import kafka_settings
from doll.kafka.reader import Tail
from doll.ledger.admission import ENDED_TERM_ENV
from doll.local.forks import ForkServer, Role
from doll.local.kafka_broker import LocalKafka
from doll.local.redis_server import LocalRedis
from doll.monitor.state.csv_file import read_rows
from doll.records.control import AnyRecord, Evaluated, Finished, Metric, TermStarted, Update, encode
from doll.services import Services
from doll.storage.blobs import Latest, encode_blob, encode_latest, latest_key, weights_key
from doll.storage.checkpoints import Checkpoint
from doll.storage.file_checkpoints import FileCheckpointStore
from doll.storage.redis_blobs import RedisBlobs
from doll.storage.redis_client import connect_redis
from waiting import WAIT_TIMEOUT_S, until

pytestmark = pytest.mark.integration

TASK = '''
import numpy as np
import torch
from doll import Sample, Task


class Line(Task):
    """One weight and one bias; held out: points of y = 3 x, whose mean square error is known in closed form."""

    def __init__(self, held_out=True):
        self.held_out = held_out

    def build_model(self):
        return torch.nn.Linear(1, 1)

    def decode(self, record):
        raise NotImplementedError

    def metrics(self, output, target):
        return {"accuracy": float(((output.reshape(-1) - target).abs() < 0.5).double().mean())}

    def holdout(self):
        return (Sample([x], 3.0 * x) for x in np.linspace(0, 1, 601)) if self.held_out else ()
'''
JOB = """
job: {job}
task: {{class: line.py:Line, args: {{held_out: {held_out}}}}}
data: {{workers: 1, batch_size: 8}}
training: {{policy: {{name: doll, group_size: 1}}}}
evaluation: {{every_s: 0.05, max_samples: 601}}
"""
XS = np.linspace(0, 1, 601)


def loss_of(weight: float) -> float:
    """Mean of ((weight - 3) x)^2 over the held-out points."""
    return float(np.mean(((weight - 3) * XS) ** 2))


class Rig:
    """A job whose parameter server is the test."""

    def __init__(self, folder: Path, job: str, services: Services, forks: ForkServer, *, held_out: bool = True) -> None:
        (folder / "line.py").write_text(TASK)
        (folder / "job.yaml").write_text(JOB.format(job=job, held_out=str(held_out).lower()))
        self.config: JobConfig = load(folder / "job.yaml")
        self.services, self.run = services, folder / "run"
        self._forks, self._job_path = forks, folder / "job.yaml"
        topics.ensure(self.config, services)
        self.blobs = RedisBlobs(connect_redis(services))
        self._producer = Producer(kafka_settings(self.config, services, acks="all"))
        self._seen = Tail(self.config, services, (self.config.topic("events"), self.config.topic("metrics")))
        self.evaluated: dict[tuple[int, int], Evaluated] = {}
        self.metrics: list[Metric] = []

    def start(self, **env: str) -> Role:
        arguments = [str(self._job_path), self.services.kafka, self.services.redis, str(self.run)]
        return self._forks.start_role(
            "doll.run.local.roles:evaluator_role", arguments, log_path=self.run / "evaluator.log", name="evaluator",
            env=env,
        )  # fmt: skip

    def say(self, *records: AnyRecord) -> None:
        for record in records:
            self._producer.produce(self.config.topic("updates"), encode(record))
        assert self._producer.flush(WAIT_TIMEOUT_S) == 0

    def publish(self, term: int, version: int, weight: float) -> None:
        """Weights first, then the pointer, as the parameter server does."""
        key = weights_key(self.config.job, term, version)
        vector = np.array([weight, 0.0], dtype=np.float32)
        self.blobs.put(key, encode_blob(vector, job=self.config.job, kind="w", version=version), 600)
        pointer = Latest(term=term, version=version, key=key)
        self.blobs.put(latest_key(self.config.job), encode_latest(pointer), 600)

    def wait_evaluated(self, term: int, version: int, timeout_s: float = WAIT_TIMEOUT_S) -> Evaluated:
        deadline_s = time.monotonic() + timeout_s
        while (term, version) not in self.evaluated:
            assert time.monotonic() < deadline_s, f"never evaluated; {(self.run / 'evaluator.log').read_text()}"
            for timed_record in self._seen.poll(0.2):
                if isinstance(timed_record.record, Evaluated):
                    self.evaluated[timed_record.record.term, timed_record.record.version] = timed_record.record
                elif isinstance(timed_record.record, Metric) and timed_record.record.values:
                    self.metrics.append(timed_record.record)
        return self.evaluated[term, version]

    def rows(self, name: str) -> list[dict[str, float]]:
        return read_rows(self.run / name)

    def close(self) -> None:
        self._seen.__exit__()
        self.blobs.close()


def term_started(number: int, resumed: int = 0) -> TermStarted:
    return record_builders.term_started(number, resumed, origins=(0,), time_s=time.time())


def update(number: int, version: int, loss: float = 1.0) -> Update:
    return record_builders.update(
        number, version, (0, version - 1), compute_s=0.01, loss=loss, samples_total=8 * version,
        metrics={"accuracy": 0.5}, time_s=time.time(),
    )  # fmt: skip


@pytest.fixture
def make_rig(tmp_path: Path, job_name: str, services: Services, fork_server: ForkServer) -> Iterator[Any]:
    made: list[Rig] = []

    def make(**options: bool) -> Rig:
        made.append(Rig(tmp_path, job_name, services, fork_server, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def test_it_measures_versions_follows_a_restart_and_ends_with_the_last_version(make_rig: Any) -> None:
    rig: Rig = make_rig()
    role = rig.start()
    rig.publish(1, 1, weight=1.0)
    rig.say(term_started(1), update(1, 1, loss=4.0))
    first = rig.wait_evaluated(1, 1)
    assert first.loss == pytest.approx(loss_of(1.0), rel=1e-5)
    assert first.accuracy == pytest.approx(np.mean(np.abs(2 * XS) < 0.5), abs=2e-3)

    rig.publish(1, 2, weight=9.0)
    rig.say(update(1, 2, loss=100.0))
    rig.wait_evaluated(1, 2)
    rig.publish(2, 2, weight=2.0)
    rig.say(term_started(2, resumed=1), update(2, 2, loss=2.0))
    rig.wait_evaluated(2, 2)
    rig.publish(2, 3, weight=2.9)
    rig.say(update(2, 3, loss=1.0), Finished(term=2, version=3, reason="updates", time_s=time.time()))
    last = rig.wait_evaluated(2, 3)
    assert last.loss == pytest.approx(loss_of(2.9), rel=1e-4)
    assert role.wait(WAIT_TIMEOUT_S) == 0

    updates = [(row["term"], row["version"], row["void"]) for row in rig.rows("updates.csv")]
    assert updates == [(1, 1, 0), (1, 2, 1), (2, 2, 0), (2, 3, 0)]
    evaluations = [(row["term"], row["version"], row["void"]) for row in rig.rows("evaluations.csv")]
    assert evaluations == [(1, 1, 0), (1, 2, 1), (2, 2, 0), (2, 3, 0)]
    shown = [metric.values for metric in rig.metrics if metric.source == "evaluator"]
    assert {"version", "loss", "accuracy", "term"} <= shown[0].keys()
    assert shown[0]["loss"] == pytest.approx(first.loss)


def test_the_end_of_a_run_that_is_resumed_is_no_end(make_rig: Any) -> None:
    """The server that resumes it may need minutes to load its model."""
    rig: Rig = make_rig()
    role = rig.start(**{ENDED_TERM_ENV: "1"})
    rig.publish(1, 1, weight=1.0)
    rig.say(term_started(1), update(1, 1), Finished(term=1, version=1, reason="updates", time_s=time.time()))
    rig.wait_evaluated(1, 1)
    rig.publish(2, 2, weight=2.0)
    rig.say(term_started(2, resumed=1), update(2, 2), Finished(term=2, version=2, reason="updates", time_s=time.time()))
    rig.wait_evaluated(2, 2)
    assert role.wait(WAIT_TIMEOUT_S) == 0


def test_it_waits_for_redis_and_takes_a_lost_last_version_from_the_checkpoint(
    make_rig: Any, redis_server: LocalRedis
) -> None:
    from doll.model.flat_model import build, fingerprint
    from doll.task.base import load_task

    rig: Rig = make_rig()
    role = rig.start()
    rig.say(term_started(1), update(1, 1))
    rig.publish(1, 1, weight=1.0)
    rig.wait_evaluated(1, 1)

    redis_server.kill()
    rig.say(update(1, 2))
    try:
        log = rig.run / "evaluator.log"
        until(lambda: "redis_unavailable" in log.read_text(), "the evaluator to notice")
    finally:
        redis_server.start()
    rig.publish(1, 2, weight=2.0)
    rig.wait_evaluated(1, 2)
    assert log.read_text().count("redis_unavailable") == 1, "it says so once"

    redis_server.restart()
    model = build(rig.config, load_task(rig.config))
    store = FileCheckpointStore(rig.run / "checkpoints", rig.config.job)
    weights = np.array([2.5, 0.0], dtype=np.float32)
    store.save(
        Checkpoint(
            job=rig.config.job,
            fingerprint=fingerprint(rig.config, model),
            term=store.claim_term(),
            version=3,
            state=b"",
            tensors={"weights": weights},
        )
    )
    rig.say(update(1, 3), Finished(term=1, version=3, reason="updates", time_s=time.time()))
    assert rig.wait_evaluated(1, 3).loss == pytest.approx(loss_of(2.5), rel=1e-4)
    assert role.wait(WAIT_TIMEOUT_S) == 0


def test_it_goes_on_after_the_broker_was_killed(make_rig: Any, broker: LocalKafka) -> None:
    rig: Rig = make_rig()
    role = rig.start()
    rig.say(term_started(1), update(1, 1))
    rig.publish(1, 1, weight=1.0)
    rig.wait_evaluated(1, 1)
    broker.kill()
    broker.start()
    rig.publish(1, 2, weight=2.0)
    rig.say(update(1, 2), Finished(term=1, version=2, reason="updates", time_s=time.time()))
    rig.wait_evaluated(1, 2)
    assert role.wait(WAIT_TIMEOUT_S) == 0
    assert [row["version"] for row in rig.rows("updates.csv")] == [1, 2]


def test_a_killed_evaluator_goes_on_with_its_files_and_ends_on_sigterm(make_rig: Any) -> None:
    rig: Rig = make_rig()
    role = rig.start()
    rig.say(term_started(1), update(1, 1))
    rig.publish(1, 1, weight=1.0)
    rig.wait_evaluated(1, 1)
    role.kill()
    role.wait(WAIT_TIMEOUT_S)
    rig.say(update(1, 2))
    rig.publish(1, 2, weight=2.0)
    role = rig.start()
    rig.wait_evaluated(1, 2)
    until(lambda: len(rig.rows("evaluations.csv")) == 2 and len(rig.rows("updates.csv")) == 2, "two rows in each file")
    role.terminate()
    assert role.wait(WAIT_TIMEOUT_S) == 0
    assert [row["version"] for row in rig.rows("evaluations.csv")] == [1, 2]


def test_without_held_out_samples_it_shows_prequential_error_only(make_rig: Any) -> None:
    rig: Rig = make_rig(held_out=False)
    role = rig.start()
    rig.say(term_started(1), update(1, 1, loss=4.0), update(1, 2, loss=2.0))
    rig.publish(1, 2, weight=2.0)
    log = rig.run / "evaluator.log"
    # A Finished that is there when the evaluator starts may be an earlier run's: say it when it has started.
    until(
        lambda: log.exists() and "no_held_out_samples" in log.read_text() and (rig.run / "updates.csv").exists(),
        "the evaluator to start",
    )
    rig.say(Finished(term=1, version=2, reason="updates", time_s=time.time()))
    assert role.wait(WAIT_TIMEOUT_S) == 0
    assert [row["prequential_loss"] for row in rig.rows("updates.csv")] == [4.0, 2.0]
    assert not any(math.isnan(value) for row in rig.rows("updates.csv") for value in row.values())
