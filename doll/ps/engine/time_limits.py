"""The time limits of pushes, which depend on the time that a worker's batches have taken so far. Pure."""

from __future__ import annotations

from collections import OrderedDict

from doll.ps.engine.batch_queue import ActiveGrant
from doll.ps.engine.membership import Worker
from doll.ps.policies.base import Policy


class TimeLimits:
    """The start times of the workers' computations, and their time limits. Times are in seconds."""

    def __init__(self, policy: Policy, *, grant_timeout_s: float, set_limit_s: float) -> None:
        self._batches_per_push = policy.batches_per_push
        self._takes_sets = policy.exact_version
        self._grant_timeout_s = grant_timeout_s
        self._set_limit_s = set_limit_s
        self._batch_s = 0.0  # mean time of one batch, over all workers
        # The workers whose first grant has no push yet, with the start of that grant's time, the earliest first.
        self._since_s: OrderedDict[Worker, float] = OrderedDict()

    def limit_s(self, worker: Worker) -> float:
        """Return the time limit of a push of this worker, in seconds; for a set, `set_limit_s` is added to it."""
        return max(self._least_s, 2.0 * worker.batch_s * self._batches_per_push)

    @property
    def _least_s(self) -> float:
        return max(self._grant_timeout_s, 5.0 * self._batch_s) * self._batches_per_push

    def granted(self, worker: Worker, grant: ActiveGrant, now: float) -> None:
        """Note that the worker has got this grant, which is its last one."""
        if grant is worker.queue.computing_grants[0]:
            self._since_s[worker] = now
        elif worker in self._since_s and (grant.batch + 1) % self._batches_per_push == 0:
            # No push was due before this grant, because the worker may have waited for the grant.
            self._since_s[worker] = now
            self._since_s.move_to_end(worker)

    def answered(self, worker: Worker) -> None:
        """Note that the worker's first grants have a push."""
        del self._since_s[worker]

    def next_began(self, worker: Worker, now: float) -> None:
        """Note that a set of the worker is held. The time of the worker's next set begins now."""
        if worker.computing:
            self._since_s[worker] = now

    def taken_back(self, worker: Worker) -> None:
        """Note that grants of the worker have been taken back."""
        if not worker.computing:
            self._since_s.pop(worker, None)

    def learn_from(self, worker: Worker, num_batches: int, now: float) -> None:
        """Record the time per batch of a push in which the worker answers its first `num_batches` grants."""
        self.learn(worker, (now - self._since_s[worker]) / num_batches)

    def learn(self, worker: Worker, batch_s: float) -> None:
        """Note that a batch of this worker has taken `batch_s` seconds."""
        self._batch_s += 0.2 * (batch_s - self._batch_s)
        worker.batch_s = max(batch_s, worker.batch_s + 0.2 * (batch_s - worker.batch_s))

    def overdue(self, now: float) -> list[tuple[Worker, float]]:
        """Return the workers whose first push is overdue, each with the start of its time.

        A worker ends a set after the batch that is being computed at `set_limit_s`. So the limit of a set includes one
        more batch. A worker does not end a wave early, so its limit includes all of its batches.
        """
        overdue = []
        least_s = self._least_s
        for worker, since_s in self._since_s.items():
            if now - since_s <= least_s:
                break
            is_set = self._takes_sets and worker.computing > 1
            limit_s = self.limit_s(worker) + (self._set_limit_s if is_set else 0.0)
            if now - since_s > limit_s and self._is_push_due(worker):
                overdue.append((worker, since_s))
        return overdue

    def _is_push_due(self, worker: Worker) -> bool:
        """Return whether the worker has all grants of its next push (`PolicyConfig.batches_per_push`)."""
        queue, size = worker.queue, self._batches_per_push
        return size == 1 or queue.granted // size > queue.received // size
