"""One parameter server with an event log, without Kafka: random contributions, lost blobs, workers that come again."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
from doll.config import JobConfig, dump, parse
from doll.consumers.protocol.grants import part_of
from doll.model.flat_model import build, fingerprint
from doll.ps.engine import events as ev
from doll.ps.event_log import FileEventLog
from doll.ps.model.model_host import ModelHost
from doll.ps.model.updater import make_parts
from doll.ps.server import ParameterServer
from doll.ps.start import Start, make_engine
from doll.records.control import AnyRecord, Grant, Join, ServerStatus, Welcome
from doll.storage.blobs import encode_blob, gradient_key
from doll.storage.checkpoints import CheckpointStore
from doll.task.base import load_task
from memory_stores import MemoryBlobs
from pushes import answer
from record_builders import announce

JOB = """
job: replayed
task: {class: "examples.synthetic.task:Gaussian", args: {features: 5, hidden: [7]}}
data: {workers: 3, batch_size: 4}
training: {policy: {name: doll, group_size: 2}, optimizer: {name: sgd, lr: 0.1, momentum: 0.9}}
checkpoint: {every_updates: 3, every_s: 1000, event_log: true}
"""


class Outbox:
    """Keeps what was mailed; Kafka acknowledges at once."""

    def __init__(self) -> None:
        self.commands: list[AnyRecord] = []
        self.sent = 0

    def send_command(self, worker: int, record: AnyRecord) -> None:
        self.commands.append(record)

    def send_update(self, record: AnyRecord) -> None:
        self.sent += 1

    def send_status(self, record: ServerStatus) -> None:
        pass

    def flush(self, timeout_s: float) -> int:
        return 0

    def updates_acknowledged(self) -> int:
        return self.sent


class LoggedRun:
    """One server with random gradients, random order of answers, lost blobs and workers that come again.

    Where workers send steps, some of these are a hundred times as large as others: what a worker's last step was tells
    a policy that bounds values little about the next one.
    """

    outbox_class: type[Outbox] = Outbox

    def __init__(
        self, folder: Path, store: CheckpointStore, *overrides: str, seed: int = 0, has_weights: bool = False
    ) -> None:
        """`has_weights`: of samples."""
        self.has_weights = has_weights
        self.config: JobConfig = parse(JOB, overrides)
        self.rng, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.store, self.blobs, self.outbox, self.now = store, MemoryBlobs(), self.outbox_class(), 5.0
        model = build(self.config, load_task(self.config))
        mark = fingerprint(self.config, model)
        self.updater = make_parts(self.config.training, model).updater
        term = store.claim_term()
        held = store.load_newest(mark)
        start = Start(term, self.now, (0, 10, 20)) if held is None else Start.resume(term, self.now, held)
        self.path = folder / f"ps-{term}.log"
        self.log = FileEventLog(self.path, msgspec.structs.replace(start, job=dump(self.config)))
        host = ModelHost(self.config, term, self.updater, self.blobs)
        self.server = ParameterServer(
            self.config, engine=make_engine(self.config, start, host.load, mark), host=host, store=store,
            outbox=self.outbox, clock=self.clock, event_log=self.log,
        )  # fmt: skip
        self.server.open()
        self.weights = {self.server.engine.version: self.updater.weights.tobytes()}
        self.sessions = [0] * self.config.data.workers
        self.sizes: Counter[int] = Counter()  # batches of the pushes
        for worker in range(self.config.data.workers):
            self.join(worker)

    def clock(self) -> float:
        self.now += self.rng.random() / 100
        return self.now

    def join(self, worker: int) -> None:
        self.server.feed(Join(worker=worker, process=f"{worker}-{self.rng.random()}"))
        welcome = next(record for record in reversed(self.outbox.commands) if isinstance(record, Welcome))
        self.sessions[worker] = welcome.session
        first = welcome.served[0].next_batch
        self.server.feed(announce(worker, welcome.session, first, first + 8))

    def play(self, updates: int) -> None:
        until = self.server.engine.version + updates
        while self.server.engine.version < until:
            grants = [record for record in self.outbox.commands if isinstance(record, Grant)]
            self.outbox.commands.clear()
            self.rng.shuffle(grants)
            for grant in grants:
                while grant.grant_ids:
                    grant = self.answer(grant)
            for worker in range(self.config.data.workers):
                if self.rng.random() < 0.1 or not grants:
                    self.join(worker)
            self.server.run_periodic()

    def answer(self, whole: Grant) -> Grant:
        """The push of a set of this grant's first batches, perhaps of all; what is left."""
        count = self.rng.randint(1, len(whole.grant_ids))
        grant = part_of(whole, 0, count)
        fate = self.rng.random()
        key = gradient_key(self.config.job, grant.term, grant.grant_ids[0]) if fate > 0.1 else ""
        if fate > 0.3:
            gradient = self.numbers.normal(size=self.updater.weights.size).astype(np.float32)
            if self.config.training.policy.sends_steps:
                gradient *= np.float32(self.rng.choice((0.01, 0.1, 1.0)))
            self.blobs.put(key, encode_blob(gradient, job=self.config.job, kind="g", version=grant.version), 600.0)
        if self.rng.random() < 0.1:  # the channel of grants and pushes breaks
            self.server.feed(ev.GrantsLost(worker=grant.worker))
        weight = {"weight": self.rng.uniform(0.1, 9.0)} if self.has_weights and key else {}
        push = answer(grant, grant.term, key, n_samples=4 if key else 0, loss_sum=4.0, **weight)
        self.sizes[len(push.batches)] += 1
        for _ in range(self.rng.choice((1, 1, 1, 2))):
            self.server.feed(push)
        self.weights[self.server.engine.version] = self.updater.weights.tobytes()
        return part_of(whole, count)

    def terminate(self) -> None:
        """End as on SIGTERM: with a checkpoint that no event has ordered."""
        self.server.save_now()
        self.close()

    def close(self) -> None:
        self.server.close()
        self.log.close()
