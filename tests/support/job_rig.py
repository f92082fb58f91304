"""A whole job of real processes on the real broker and Redis, that a test may feed, watch, disturb and audit."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from doll.config import JobConfig, load
from doll.kafka import topics
from doll.kafka.clients import kafka_settings
from doll.kafka.reader import Tail
from doll.ledger.audit import audit
from doll.ledger.balance import LedgerReport
from doll.local.forks import ForkServer, Role
from doll.local.supervisor import Restart, RoleSpec, Supervisor
from doll.ps.checkpointing import decode_snapshot
from doll.records.control import AnyRecord, Finished, Metric, ServerStatus, TermStarted, Update, decode, encode
from doll.services import BLOBS_ENV, Services
from doll.storage.blobs import scope_of
from doll.storage.checkpoints import Checkpoint
from doll.storage.file_checkpoints import FileCheckpointStore
from forked_commands import Command, Program, environment
from waiting import WAIT_TIMEOUT_S

FEATURES = 4
# Short leases and pauses: a test waits for what a person would wait for.
JOB = f"""
task: {{class: "examples.synthetic.task:Gaussian", args: {{features: {FEATURES}, hidden: [8]}}}}
data: {{workers: 2, batch_size: 8}}
training: {{policy: {{name: doll, group_size: 2}}, optimizer: {{name: sgd, lr: 0.05, momentum: 0.9}}}}
checkpoint: {{every_updates: 5, every_s: 0.5}}
worker: {{lease_s: 6, grant_timeout_s: 5, stall_timeout_s: 15, drain_s: 3}}
evaluation: {{enabled: false}}
"""


class Pipeline:
    """One job. `start` it, `send` samples, wait with `until`, then `audit`; the fixture ends what still runs.

    Attributes:
        updates: update records seen so far, as they stand on the topic, void ones included.
        metrics: the newest measurements of each source.
        status: what the parameter server said last.
        pids: of each supervised role when it was started first.
        restarts: of supervised roles that ended with an error.
    """

    def __init__(self, folder: Path, services: Services, forks: ForkServer, job: str, overrides: Iterable[str]) -> None:
        self.folder, self.services, self.forks = folder, services, forks
        self.job_path, self.run = folder / "job.yaml", folder / "run"
        self.job_path.write_text(f"job: {job}\n{JOB}")
        self.config: JobConfig = load(self.job_path, list(overrides))
        self._write_job(self.job_path, self.config)
        self.updates: list[Update] = []
        self.term_starts: list[TermStarted] = []
        self.finished: Finished | None = None
        self.metrics: dict[str, dict[str, float]] = {}
        self.status: ServerStatus | None = None
        self.pids: dict[str, int] = {}
        self._unsupervised: list[Role] = []
        self.restarts: list[Restart] = []
        self.supervisor = Supervisor(forks.launch, on_restart=self.restarts.append)
        self._program = Program(forks, folder / "commands")
        topics.ensure(self.config, services)
        self.tail = Tail(self.config, services, (self.config.topic("updates"), self.config.topic("metrics")))
        self._producer = Producer(
            kafka_settings(
                self.config, services, acks="all", enable_idempotence=True, message_max_bytes=32 * 1024 * 1024
            )
        )
        self._rng = np.random.default_rng(0)

    @staticmethod
    def _write_job(path: Path, config: JobConfig) -> None:
        from doll.config import dump

        path.write_text(dump(config))

    # --- processes

    def spec(self, name: str, role: str, *more: Any, job_path: Path | None = None) -> RoleSpec:
        arguments = [str(job_path or self.job_path), self.services.kafka, self.services.redis, str(self.run), *more]
        log = self.run / "logs" / f"{name}.log"
        return RoleSpec(name, f"doll.run.local.roles:{role}", log, arguments, {BLOBS_ENV: self.services.blobs})

    def start(self) -> None:
        """The parameter server with its shards, if it has any, and all workers."""
        self.start_ps()
        for number in range(self.config.ps.num_shards) if self.config.ps.num_shards > 1 else ():
            self._start(self.spec(f"shard-{number}", "shard_role", number))
        for worker in range(self.config.data.workers):
            self.start_worker(worker)

    def start_ps(self) -> None:
        self._start(self.spec("ps", "ps_role"))

    def _start(self, spec: RoleSpec) -> None:
        self.pids[spec.name] = self.supervisor.start(spec).pid

    def start_worker(self, worker: int, name: str = "") -> None:
        name = name or f"worker-{worker}"
        self._start(self.spec(name, "worker_role", worker))

    def start_producer(self) -> None:
        """The job file's own source."""
        self.supervisor.start(self.spec("producer", "producer_role"))

    def launch(self, name: str, role: str, *more: Any, job_path: Path | None = None) -> Role:
        """A role that nobody starts again."""
        self._unsupervised.append(self.forks.launch(self.spec(name, role, *more, job_path=job_path)))
        return self._unsupervised[-1]

    def doll(self, command: str, *options: str | Path, log: str = "", **env: str) -> Command:
        """Start a command of the job, whose standard error may be one of the logs."""
        arguments = (*command.split(), "--job", self.job_path, "--run-folder", self.run, *options)
        err = self.run / "logs" / f"{log}.log" if log else ""
        return self._program.start(*arguments, err=err, **environment(self.services), **env)

    def role(self, name: str) -> Role:
        handle = self.supervisor.handles()[name]
        assert isinstance(handle, Role)
        return handle

    def kill(self, name: str) -> None:
        """SIGKILL; the supervisor will start it again."""
        role = self.role(name)
        role.kill()
        assert role.wait(WAIT_TIMEOUT_S) == -signal.SIGKILL

    def log(self, name: str) -> str:
        path = self.run / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def resize(self, workers: int, *, stop_updates: int) -> None:
        """Behind the end of a run: the job file has so many workers, and a later end."""
        self.supervisor.stop(grace_s=5.0)
        self.supervisor, self.finished = Supervisor(self.forks.launch, on_restart=self.restarts.append), None
        self.config = load(self.job_path, [f"data.workers={workers}", f"stop.updates={stop_updates}"])
        self._write_job(self.job_path, self.config)

    def close(self) -> None:
        for handle in [*self.supervisor.handles().values(), *self._unsupervised]:
            handle.kill()
        self._program.close()
        self.supervisor.stop(grace_s=5.0)
        self.tail.__exit__()

    # --- the stream

    def samples(self, count: int) -> list[bytes]:
        """Records of `count` samples of the Gaussian task."""
        y = self._rng.integers(0, 2, count)
        x = self._rng.normal(size=(count, FEATURES)) + 2.0 * y[:, None] - 1.0
        rows: npt.NDArray[np.float32] = np.column_stack([x, y]).astype("<f4")
        return [row.tobytes() for row in rows]

    def send(self, values: Iterable[bytes | None], partition: int | None = None) -> None:
        """Values to one partition of the samples topic, or in turn to all."""
        for i, value in enumerate(values):
            to = i % self.config.data.num_partitions if partition is None else partition
            self.produce("samples", value, to)
        assert self._producer.flush(WAIT_TIMEOUT_S) == 0

    def produce(self, kind: Any, value: bytes | None, partition: int = 0) -> None:
        self._producer.produce(self.config.topic(kind), value, partition=partition)
        self._producer.poll(0)

    def control(self, kind: Any, record: AnyRecord | bytes, partition: int = 0) -> None:
        """A record, or any bytes, on one of the control topics."""
        self.produce(kind, record if isinstance(record, bytes) else encode(record), partition)
        assert self._producer.flush(WAIT_TIMEOUT_S) == 0

    # --- watching

    @property
    def last_status(self) -> ServerStatus:
        assert self.status is not None, "the parameter server has said nothing yet"
        return self.status

    @property
    def version(self) -> int:
        return self.updates[-1].version if self.updates else 0

    def poll(self) -> None:
        """Keep the roles running; take in what the topics say."""
        self.supervisor.poll()
        for entry in self.tail.poll(0.05):
            match entry.record:
                case Update():
                    self.updates.append(entry.record)
                case TermStarted():
                    self.term_starts.append(entry.record)
                case Finished():
                    self.finished = entry.record
                case ServerStatus():
                    self.status = entry.record
                case Metric() if entry.record.values:
                    self.metrics[entry.record.source] = dict(entry.record.values)

    def until_status(self, condition: Callable[[ServerStatus], bool], what: str) -> None:
        """Until the parameter server's own account, not older than the newest update seen, fulfils `condition`."""
        newest = (self.updates[-1].term, self.updates[-1].version) if self.updates else (0, 0)

        def is_so() -> bool:
            status = self.status
            return status is not None and (status.term, status.version) >= newest and condition(status)

        self.until(is_so, what)

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                logs = "\n".join(
                    f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
                    for path in sorted((self.run / "logs").glob("*.log"))
                )
                pytest.fail(f"not within {timeout_s:g} s: {what}; version {self.version}, {self.status}\n{logs}")
            self.poll()

    def until_version(self, version: int, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        self.until(lambda: self.version >= version, f"version {version}", timeout_s)

    def until_finished(self, timeout_s: float = 2 * WAIT_TIMEOUT_S) -> None:
        """The job has ended, and with it each of its processes."""
        self.until(lambda: self.finished is not None, "the end of the job", timeout_s)
        # Also of one that has failed meanwhile, and waits for its restart.
        self.until(lambda: None not in self.supervisor.exit_codes().values(), "the end of its processes")
        assert set(self.supervisor.exit_codes().values()) <= {0}, self.supervisor.exit_codes()

    # --- the truth

    @property
    def store(self) -> FileCheckpointStore:
        return FileCheckpointStore(self.run / "checkpoints", self.config.job, keep=self.config.checkpoint.keep)

    @property
    def scope(self) -> str:
        """What this run's blobs and control streams are named by, once its server has started."""
        return scope_of(self.config.job, decode_snapshot(self.checkpoint()).run_id)

    def checkpoint(self) -> Checkpoint:
        newest = self.store.load_newest(None)
        assert newest is not None
        return newest

    def counters(self) -> dict[str, int]:
        """What the engine had counted at the newest checkpoint: what it refused, returned, lost."""
        return decode_snapshot(self.checkpoint()).counters

    def audit(self) -> LedgerReport:
        return audit(self.config, self.services, self.store)

    def assert_audit_ok(self) -> LedgerReport:
        """0 missing, 0 twice, nothing that does not fit."""
        report = self.audit()
        assert report.violations() == []
        assert report.ok
        assert (report.missing, report.twice) == ((), ())
        assert report.applied > 0
        return report

    def read(self, kind: Any) -> list[Any]:
        """All control records of a topic with one partition."""
        consumer = Consumer(kafka_settings(self.config, self.services, group_id="test", enable_auto_commit=False))
        try:
            where = TopicPartition(self.config.topic(kind), 0, 0)
            _, high = consumer.get_watermark_offsets(where, timeout=60)
            consumer.assign([where])
            records: list[Any] = []
            deadline_s = time.monotonic() + WAIT_TIMEOUT_S
            while len(records) < high:
                assert time.monotonic() < deadline_s, f"{kind}: {len(records)} of {high} records"
                message = consumer.poll(0.2)
                if message is not None and message.error() is None:
                    records.append(decode(message.value()))
            return records
        finally:
            consumer.close()


class MakePipeline(Protocol):
    """The fixture `make_pipeline`: the standard job with overrides of its job file."""

    def __call__(self, *overrides: str) -> Pipeline: ...
