"""A parameter server without its transport, and workers whose gradients are chosen by the test."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from doll.config import JobConfig, parse
from doll.model.flat_model import build, fingerprint
from doll.optim.optimizer import Optimizer
from doll.ps.model.model_host import ModelHost
from doll.ps.server import ParameterServer
from doll.ps.start import Start, make_engine
from doll.records.control import (
    AnyRecord,
    Grant,
    Join,
    ServerStatus,
    Welcome,
)
from doll.storage.blobs import encode_blob, gradient_key
from doll.task.base import load_task
from memory_stores import MemoryBlobs, MemoryCheckpointStore
from pushes import answer
from record_builders import announce

JOB = """
job: unit
task: {class: "examples.synthetic.task:Gaussian", args: {features: 3}}
data: {workers: 2, batch_size: 4}
training: {policy: {name: doll, group_size: 2}, optimizer: {name: sgd, lr: 0.1, momentum: 0.9}}
checkpoint: {every_updates: 1, every_s: 1000}
"""


@dataclass
class MemoryOutbox:
    """An outbox whose Kafka acknowledges update records only as far as the test says."""

    commands: list[tuple[int, AnyRecord]] = field(default_factory=list)
    updates: list[AnyRecord] = field(default_factory=list)
    statuses: list[ServerStatus] = field(default_factory=list)
    acknowledged: int | None = None  # None: all, at once

    def send_command(self, worker: int, record: AnyRecord) -> None:
        self.commands.append((worker, record))

    def send_update(self, record: AnyRecord) -> None:
        self.updates.append(record)

    def send_status(self, record: ServerStatus) -> None:
        self.statuses.append(record)

    def updates_acknowledged(self) -> int:
        return len(self.updates) if self.acknowledged is None else self.acknowledged

    def flush(self, timeout_s: float) -> int:
        return 0

    def of(self, kind: type[Any]) -> list[Any]:
        return [record for _, record in self.commands if isinstance(record, kind)]


class Rig:
    """A server, and workers whose gradients are whatever the test says."""

    def __init__(self, *overrides: str, store: MemoryCheckpointStore | None = None) -> None:
        self.config: JobConfig = parse(JOB, overrides)
        self.now = 0.0
        self.outbox, self.blobs = MemoryOutbox(), MemoryBlobs(clock=lambda: self.now)
        self.store = store or MemoryCheckpointStore("unit")
        model = build(self.config, load_task(self.config))
        self.mark = fingerprint(self.config, model)
        self.optimizer = Optimizer(model, self.config.training.optimizer)
        self.term = self.store.claim_term()
        checkpoint = self.store.load_newest(self.mark)
        start = Start(self.term, 0.0, (100, 200)) if checkpoint is None else Start.resume(self.term, 0.0, checkpoint)
        host = ModelHost(self.config, self.term, self.optimizer, self.blobs)
        self.server = ParameterServer(
            self.config, engine=make_engine(self.config, start, host.load, self.mark), host=host, store=self.store,
            outbox=self.outbox, clock=lambda: self.now,
        )  # fmt: skip
        self.server.open()
        self.store.saved.clear()  # of version 0

    @property
    def size(self) -> int:
        return int(self.optimizer.weights.size)

    def join(self) -> None:
        for worker in (0, 1):
            self.server.feed(Join(worker=worker, process=f"i{worker}"))
        self.sessions = {record.worker: record.session for record in self.outbox.of(Welcome)}

    def announce(self, worker: int, first: int, until: int) -> None:
        self.server.feed(announce(worker, self.sessions[worker], first, until))

    def answer(self, grant: Grant, value: float = 1.0, *, store: bool = True, key: str | None = None) -> None:
        """Push a gradient of this value everywhere, as the sum over 4 samples."""
        name = gradient_key("unit", grant.term, grant.grant_ids[0]) if key is None else key
        if store and name:
            gradient = np.full(self.size, value, np.float32)
            self.blobs.put(name, encode_blob(gradient, job="unit", kind="g", version=grant.version), 60.0)
        self.server.feed(
            answer(
                grant, grant.term, name, n_samples=4 if name else 0, loss_sum=8.0 if name else 0.0,
                metric_sums={"accuracy": 2.0} if name else {}, dead=() if name else (100,),
            )
        )  # fmt: skip

    def grants(self) -> list[Grant]:
        """Those since the last call."""
        grants = self.outbox.of(Grant)[self.answered :]
        self.answered += len(grants)
        return grants

    answered = 0

    def update(self, value: float = 1.0) -> None:
        """One batch of each worker, applied."""
        at = self.server.engine.version
        for worker in (0, 1):
            self.announce(worker, at, at + 1)
        for grant in self.grants():
            self.answer(grant, value)
        assert self.server.engine.version == at + 1

    def pass_time(self, seconds: float) -> None:
        """Unless the thread that writes checkpoints is at work: its time is not the clock's."""
        if self.server.checkpoints._saving is None:
            self.now += seconds

    def turn_until(self, condition: Callable[[], bool]) -> None:
        """The checkpoint is written by a thread: give it the time that it takes."""
        deadline_s = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline_s
            self.server.run_periodic()
