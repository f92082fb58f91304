"""The server and the workers of a job without services: production engine and worker protocol, and records between.

A worker's process is a `WorkerCore`; the server is an `Engine`. `World` does with their records and actions what the
loops of a real server and a real worker do. A subclass decides the rest: how records travel (`to_server`, `to_worker`),
what the model is (`perform`), and what a process computes. By default a record takes no time, and a checkpoint is
durable immediately. `doll_lab.simulation.timed_world` adds a virtual clock, and the random tests of the engine move a
world by dice (docs/decisions/0057).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import ClassVar, Generic, TypeVar

from doll.consumers.protocol.worker_core import (
    Acknowledge,
    Compute,
    Exit,
    OfferWeights,
    Send,
    Serve,
    StoreRest,
    WorkerAction,
    WorkerCore,
)
from doll.ps.engine.engine import Engine
from doll.ps.engine.events import CheckpointStored, EngineAction, Event, RollBack, SendHello, StoreCheckpoint
from doll.records.control import AnyRecord, Durable, Fence, Flush, Grant, Hello, Join, NewVersion, Settle, Welcome


class Process:
    """One process of a worker. It asks for its place until it is welcomed; then it has a `core`.

    Attributes:
        incarnation: of its machine; 0: nobody numbers the machines.
        orders: what it is to compute or to store, in order.
    """

    def __init__(self, worker: int, name: str, incarnation: int = 0) -> None:
        self.worker, self.name, self.incarnation = worker, name, incarnation
        self.core: WorkerCore | None = None
        self.orders: deque[Compute | StoreRest] = deque()
        self.is_dead = False

    @property
    def protocol(self) -> WorkerCore:
        """The core of a process that has been welcomed."""
        assert self.core is not None, f"process {self.name} of worker {self.worker} has no place yet"
        return self.core

    @property
    def first_order(self) -> Compute:
        """The first of `orders`, which is to be computed."""
        order = self.orders[0]
        assert isinstance(order, Compute), "nothing is held back that is to be stored"
        return order

    def join(self) -> Join:
        return Join(worker=self.worker, process=self.name, incarnation=self.incarnation)

    def offer(self, weights: NewVersion) -> None:
        """The server has published these weights."""


P = TypeVar("P", bound=Process)


class World(Generic[P]):
    """N workers and one server at a time.

    Attributes:
        now: virtual seconds since the start.
        term: of the newest server.
        engine: of the newest server, also after its end.
        is_serving: False: there is no server, and nobody reads what is sent to it.
        processes: of each worker, those that live, oldest first.
        rolled_back: servers that began again from the checkpoint because a part of the model was lost.
    """

    core_class: ClassVar[type[WorkerCore]] = WorkerCore

    engine: Engine

    def __init__(
        self,
        num_workers: int,
        *,
        make_engine: Callable[[], Engine],
        make_process: Callable[[int, str, int], P],
        max_pending: int,
    ) -> None:
        """
        Args:
            make_engine: of a new server of `term`, from what is durable.
            make_process: from the worker, the process's name, and the number of its machine.
            max_pending: batches that a worker holds at most.
        """
        self.now = 0.0
        self.term = self.num_processes = self.rolled_back = 0
        self.is_serving = False
        self.processes: list[list[P]] = [[] for _ in range(num_workers)]
        self._make_engine = make_engine
        self._make_process = make_process
        self._max_pending = max_pending

    # --- the server -------------------------------------------------------------------------------------------------

    def start_server(self) -> None:
        """A new server, from what is durable, greets the workers."""
        self.term += 1
        self.engine = self._make_engine()
        self.is_serving = True
        for worker in range(len(self.processes)):
            self.to_worker(worker, Hello(term=self.term))

    def after_event(self) -> None:
        """Called after each event that the engine has handled; tests check the engine here."""

    def handle(self, event: Event) -> None:
        """The server gets an event. It does what the engine says, with all that follows."""
        if not self.is_serving:
            return
        engine = self.engine
        events = [event]
        for next_event in events:
            if engine.finished is not None:
                break
            actions = engine.handle(next_event, self.now)
            self.after_event()
            for action in actions:
                if isinstance(action, RollBack):
                    self.roll_back(action)
                    return
                if (outcome := self.perform(action)) is not None:
                    events.append(outcome)

    def roll_back(self, action: RollBack) -> None:
        """A process is gone with a part of its steps: the next server begins again from what is durable."""
        self.rolled_back += 1
        self.start_server()

    def perform(self, action: EngineAction) -> Event | None:
        """The server does this.

        Returns:
            What came of it, for the engine.
        """
        match action:
            case Grant() | Durable() | NewVersion() | Welcome() | Settle() | Flush() | Fence():
                self.to_worker(action.worker, action)
            case SendHello(worker):
                self.to_worker(worker, Hello(term=self.term))
            case StoreCheckpoint(version):
                return CheckpointStored(version=version)
        return None

    # --- the links --------------------------------------------------------------------------------------------------

    def to_server(self, process: P, record: AnyRecord) -> None:
        """A process has sent this."""
        self.handle(record)  # type: ignore[arg-type]  # workers send nothing else

    def to_worker(self, worker: int, record: AnyRecord) -> None:
        """The server has sent this."""
        for process in tuple(self.processes[worker]):
            self.receive(process, record)

    # --- the workers ------------------------------------------------------------------------------------------------

    def live(self) -> list[P]:
        """All processes."""
        return list(chain.from_iterable(self.processes))

    def start_process(self, worker: int, incarnation: int = 0) -> P:
        """A new process of this worker, also beside one that lives, asks for the worker's place."""
        self.num_processes += 1
        process = self._make_process(worker, f"p{self.num_processes}", incarnation)
        self.processes[worker].append(process)
        self.to_server(process, process.join())
        return process

    def end(self, process: P, code: int = 0) -> None:
        """The process is gone. It ended itself with this exit code, or with 0 if something else ended it."""
        if not process.is_dead:
            process.is_dead = True
            self.processes[process.worker].remove(process)

    def receive(self, process: P, record: AnyRecord) -> None:
        """A record of the server comes to a process."""
        if process.core is not None:
            self.do(process, process.core.on_record(record, self.now))
            return
        match record:
            case Welcome() if record.process == process.name:
                process.core = self.core_class(
                    record, max_pending=self._max_pending, now=self.now, incarnation=process.incarnation
                )
            case Hello():
                self.to_server(process, process.join())
            case Fence() if record.process == process.name:
                self.end(process)

    def do(self, process: P, actions: Sequence[WorkerAction]) -> None:
        """The process does what its core says."""
        for action in actions:
            match action:
                case Send(record):
                    self.to_server(process, record)
                case Compute() | StoreRest():
                    self.order(process, action)
                case OfferWeights(weights):
                    process.offer(weights)
                case Acknowledge(partition, until):
                    self.acknowledge(process, partition, until)
                case Serve():
                    self.serve(process)
                case Exit(code, _):
                    self.end(process, code)

    def order(self, process: P, order: Compute | StoreRest) -> None:
        """The process is to compute or to store this."""
        process.orders.append(order)

    def serve(self, process: P) -> None:
        """The process serves other partitions, or reads one again: its core says from where."""

    def acknowledge(self, process: P, partition: int, until: int) -> None:
        """The batches of a partition below `until` need not be read again."""
