"""Workers whose reads of weights come many updates after their grants: they get the weights that the grants name."""

from __future__ import annotations

from collections import deque

import pytest
from doll.consumers.protocol.worker_core import Compute, Send
from doll.ps.engine import events as ev
from doll.records.control import Announce, Nack, Push
from threadless_jobs import Job, Worker

pytestmark = pytest.mark.slow  # loads torch

NEWEST = 4  # blobs.keep_versions, its default


class DistantJob(Job):
    """Worker 0 begins to compute when `delay` updates have been made since its grant came; the others at once.

    Attributes:
        misses: of each worker: grants whose weights were not there.
        most_versions: the most versions of the weights that were stored at once.
    """

    def __init__(self, policy: str, workers: int, delay: int, updates: int) -> None:
        self.delay = delay
        self.late: deque[tuple[int, Compute]] = deque()  # (version at which it came, order)
        self.pushes: deque[Push] = deque()
        self.misses = [0] * workers
        self.most_versions = 0
        super().__init__(policy, 0, workers=workers, keep_versions=NEWEST)
        while self.engine.version < updates:
            if self.late and (self.engine.version - self.late[0][0] >= delay or not self.pushes):
                self.fetch(self.workers[0], self.late.popleft()[1])
            elif self.pushes:
                self.feed(self.pushes.popleft())
                self.most_versions = max(self.most_versions, self.num_stored)

    @property
    def num_stored(self) -> int:
        return sum(":w:1:" in key for key in self.blobs.keys())  # noqa: SIM118 - not a dict

    def compute(self, worker: Worker) -> None:
        order = worker.orders.popleft()
        if worker.number:
            self.fetch(worker, order)
        else:
            self.late.append((self.engine.version, order))

    def fetch(self, worker: Worker, order: Compute) -> None:
        assert worker.core is not None
        grant = worker.core.begin(order.grant)
        assert grant is not None
        done = worker.handler.handle(grant, order.batches, lambda batch, grant_id: True)
        if done is None:
            self.misses[worker.number] += 1
            answers = worker.core.weights_missing(order.grant)
        else:
            answers = worker.core.gradient_done(order.grant, order.batches, done, 0.0)
        for action in answers:
            assert isinstance(action, Send)
            if isinstance(action.record, Push):
                self.pushes.append(action.record)
            else:
                assert isinstance(action.record, Announce | Nack)
                self.feed(action.record)

    def feed(self, event: ev.Event) -> None:
        super().feed(event)
        for worker in self.workers:
            while worker.orders:
                self.compute(worker)


@pytest.mark.parametrize(
    ("policy", "under_way"),
    [
        ("{name: asp}", 1),
        ("{name: vap, value_bound: 0.05}", 1),
        ("{name: ssp, staleness: 9, under_way: 1}", 1),
        ("{name: ssp, staleness: 9, under_way: 3}", 3),
    ],
)
def test_a_worker_that_reads_weights_after_many_updates_still_gets_them(policy: str, under_way: int) -> None:
    workers, delay = 6, 10
    job = DistantJob(policy, workers, delay, updates=50)
    assert job.misses == [0] * workers
    # With several under way a push of worker 0 comes behind as many of each other worker.
    assert job.engine.worker(0).applied >= (50 // (delay + 1) - 1 if under_way == 1 else 1)
    assert job.most_versions > NEWEST
    assert job.most_versions <= NEWEST + workers * min(2, under_way), "whatever the number of grants"
    job.host.tidy(job.engine.named_versions)
    assert job.num_stored <= NEWEST + len(job.engine.named_versions)
