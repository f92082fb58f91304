"""The membership of worker processes: sessions, leases and fencing. Pure.

A session is the membership of one process in a worker slot. A process that joins a slot fences the slot's earlier
process. The provisioner numbers the incarnations of a worker's machine. A process of an incarnation fences all
processes of lower incarnations, whatever their sessions are.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from doll.ps.engine.batch_queue import BatchQueue
from doll.ps.engine.events import EngineAction, SendHello
from doll.ps.policies.base import BatchId
from doll.records.control import Alive, Fence, Join

# The sessions that one parameter server assigns are in [term << 20, (term + 1) << 20). So the sessions of a later
# server are always higher, even if it does not know the sessions that its predecessor assigned last.
_SESSION_BITS: Final = 20
_FENCED_REMEMBERED: Final = 16


@dataclass(slots=True, eq=False)
class Worker:
    """One worker: its slot, the process that holds the slot, and its queue of batches."""

    number: int
    queue: BatchQueue
    session: int
    process: str
    incarnation: int  # the highest incarnation that has joined; lower incarnations are fenced
    restarts: int  # number of processes that have replaced an earlier one
    applied: int = 0  # number of its batches in the model
    market: str = ""  # market of its machine, as in its last push
    fenced: deque[str] = field(default_factory=lambda: deque(maxlen=_FENCED_REMEMBERED))  # processes
    joined: bool = False  # whether this server has received its Join
    present: bool = False  # whether a message of it arrived within its lease
    left: bool = False  # whether it has sent Leave; only another Join ends this
    stalled: bool = False  # whether a grant of it has timed out; it gets no other grant until it has answered one
    last_heard_s: float = 0.0
    live_since_s: float = 0.0
    waiting: int = 0  # number of batches that may be granted now; set by `doll.ps.engine.grants`
    batch_s: float = 0.0  # time from a batch's grant to its push; 0: not known. It rises at once, and falls slowly.
    moved: float = 0.0  # see `doll.ps.policies.base.WorkerCounters`; set by the engine
    retained: int = 0  # as in its last Alive, like the next three
    lag: int = 0
    most_unread: tuple[tuple[int, int], ...] = ()
    waiting_for: str = ""
    is_done: bool = False  # see `doll.ps.policies.base.WorkerCounters`; set by `doll.ps.engine.ending`

    @property
    def is_here(self) -> bool:
        """Whether its process has joined, sends heartbeats, and has not left."""
        return self.joined and self.present and not self.left

    @property
    def is_live(self) -> bool:
        """Whether the worker sends heartbeats and serves a partition. A spare is not live: nobody waits for it."""
        return self.present and not self.left and bool(self.queue.partitions)

    def heard(self, alive: Alive) -> None:
        self.retained, self.lag, self.waiting_for = alive.retained, alive.lag, alive.waiting_for
        self.most_unread = alive.most_unread

    @property
    def held(self) -> int:
        return self.queue.held

    @property
    def first_held(self) -> BatchId:
        return self.queue.held_grants[0].batch_id

    @property
    def held_change(self) -> float:
        grants = self.queue.held_grants
        return grants[0].pushed.max_change if grants and grants[0].pushed is not None else 0.0

    @property
    def computing(self) -> int:
        return self.queue.computing

    @property
    def is_spent(self) -> bool:
        queue = self.queue
        return self.is_done and not (queue.held_grants or queue.computing_grants or queue.waiting)

    @property
    def announced(self) -> int:
        return len(self.queue.waiting)


class Membership:
    """All workers of a job. Refused messages change only a counter.

    Attributes:
        usual: the newest description of what is usual for the job's batches, as a worker sent it (`Alive.usual`).
    """

    def __init__(self, workers: Sequence[Worker], *, term: int, lease_s: float, counters: Counter[str]) -> None:
        self._workers = workers
        self._term = term
        self._lease_s = lease_s
        self._counters = counters
        self.usual: tuple[float, ...] = ()
        self._sessions = 0
        self._last_heard: OrderedDict[int, float] = OrderedDict()  # of workers with `is_here`, the oldest time first
        self._live: set[int] = set()

    @property
    def num_live(self) -> int:
        return len(self._live)

    def admit(self, event: Join, now: float, actions: list[EngineAction]) -> Worker | None:
        """Let a process join, and return its worker. Return None if the process is fenced, or no such worker exists."""
        if not 0 <= event.worker < len(self._workers):
            self._counters["refused_unknown_worker"] += 1
            return None
        worker = self._workers[event.worker]
        # A later machine replaces an older machine even if the later machine's session is lower. The older machine may
        # have got a higher session from a server that did not know the later machine.
        later = event.incarnation > worker.incarnation
        # The current process may have a session from the Welcome of an earlier server, which arrived first.
        replaced = event.process != worker.process and (
            0 < event.incarnation < worker.incarnation or (0 < event.session < worker.session and not later)
        )
        if event.process in worker.fenced or replaced:
            self._counters["refused_fenced"] += 1
            actions.append(Fence(term=self._term, worker=event.worker, process=event.process))
            return None
        worker.incarnation = max(worker.incarnation, event.incarnation)
        if event.process != worker.process:
            if worker.process:
                worker.fenced.append(worker.process)
                worker.restarts += 1
                actions.append(Fence(term=self._term, worker=event.worker, process=worker.process))
            worker.process = event.process
            worker.live_since_s = now
            worker.batch_s = 0.0
            # A process that already has a session keeps it. Its server died before a checkpoint contained the session.
            worker.session = event.session if event.session >= max(worker.session, 1) else self._new_session()
            self._counters["joined"] += 1
        elif not worker.session:
            worker.session = self._new_session()
        if not worker.is_live:
            worker.live_since_s = now
        worker.joined = worker.present = True
        worker.left = worker.stalled = False
        self._heard(worker, now)
        return worker

    def accept(self, number: int, session: int, now: float, actions: list[EngineAction]) -> Worker | None:
        """Return the sender of a message, which becomes live; None if the message is not from the current session."""
        if not 0 <= number < len(self._workers):
            self._counters["refused_unknown_worker"] += 1
            return None
        worker = self._workers[number]
        if session != worker.session or worker.left:
            self._counters["refused_fenced"] += 1
            return None
        if not worker.joined:
            # This server has restarted, and the worker has not joined yet: the Hello is being sent or was missed.
            self._counters["refused_not_joined"] += 1
            actions.append(SendHello(number))
            return None
        if not worker.present:
            worker.present = True
            worker.live_since_s = now
        self._heard(worker, now)
        return worker

    def remove(self, worker: Worker) -> None:
        """Remove a worker that has left, or whose lease has expired."""
        self._counters["workers_lost"] += 1
        worker.present = False
        self._last_heard.pop(worker.number, None)
        self._live.discard(worker.number)

    def expired(self, now: float) -> list[Worker]:
        workers = []
        for number, heard_s in self._last_heard.items():  # the least recently heard first
            if now - heard_s <= self._lease_s:
                break
            workers.append(self._workers[number])
        return workers

    def note_partitions(self, worker: Worker, now: float) -> None:
        """Note that this worker serves other partitions than before."""
        if not worker.is_live:
            self._live.discard(worker.number)
        elif worker.number not in self._live:
            self._live.add(worker.number)
            worker.live_since_s = now

    def _heard(self, worker: Worker, now: float) -> None:
        worker.last_heard_s = now
        if worker.is_live:
            self._live.add(worker.number)
        self._last_heard[worker.number] = now
        self._last_heard.move_to_end(worker.number)

    def _new_session(self) -> int:
        self._sessions += 1
        return (self._term << _SESSION_BITS) + self._sessions
