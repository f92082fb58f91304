"""The server and the workers of a job without services: the production engine and worker protocol, and their records.

A worker's process is a `WorkerCore`; the server is an `Engine`. `World` handles their records and actions as the loops
of a real server and a real worker do. A subclass defines the rest: how records travel (`to_server`, `to_worker`), what
the model is (`perform`), and what a process computes. By default, records take no time, and a checkpoint is durable
immediately. `doll_lab.simulation.timed_world` adds a virtual clock; the random tests of the engine choose the next
event at random (docs/decisions/0057).
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
        incarnation: number of its machine; 0: machines are not numbered.
        orders: orders to compute or to store, in order.
    """

    def __init__(self, worker: int, name: str, incarnation: int = 0) -> None:
        self.worker, self.name, self.incarnation = worker, name, incarnation
        self.core: WorkerCore | None = None
        self.orders: deque[Compute | StoreRest] = deque()
        self.is_dead = False

    @property
    def protocol(self) -> WorkerCore:
        """Return the core of a process that has been welcomed."""
        assert self.core is not None, f"process {self.name} of worker {self.worker} has no place yet"
        return self.core

    @property
    def first_order(self) -> Compute:
        """Return the first of `orders`, which must be computed."""
        order = self.orders[0]
        assert isinstance(order, Compute), "nothing is held back that is to be stored"
        return order

    def join(self) -> Join:
        return Join(worker=self.worker, process=self.name, incarnation=self.incarnation)

    def offer(self, weights: NewVersion) -> None:
        """Offer these weights, which the server has published."""


P = TypeVar("P", bound=Process)


class World(Generic[P]):
    """N workers and one server at a time.

    Attributes:
        now: virtual seconds since the start.
        term: term of the newest server.
        engine: engine of the newest server, also after its end.
        is_serving: False: there is no server, and records to it are not read.
        processes: living processes of each worker, oldest first.
        rolled_back: number of servers that began again from the checkpoint because a part of the model was lost.
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
            make_engine: function that makes the engine of a new server of `term`, from the durable state.
            make_process: function (worker, name of the process, number of its machine) that makes a process.
            max_pending: maximum number of batches that a worker holds.
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
        """Start a new server from the durable state; it greets the workers."""
        self.term += 1
        self.engine = self._make_engine()
        self.is_serving = True
        for worker in range(len(self.processes)):
            self.to_worker(worker, Hello(term=self.term))

    def after_event(self) -> None:
        """Check the engine in tests; called after each event that the engine has handled."""

    def handle(self, event: Event) -> None:
        """Handle an event of the server: perform the engine's actions, and all that follows."""
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
        """Begin again with the next server, from the durable state: a process is gone with a part of its steps."""
        self.rolled_back += 1
        self.start_server()

    def perform(self, action: EngineAction) -> Event | None:
        """Perform an action of the server.

        Returns:
            The result of the action for the engine, or None.
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
        """Send a record of a process to the server."""
        self.handle(record)  # type: ignore[arg-type]  # workers send nothing else

    def to_worker(self, worker: int, record: AnyRecord) -> None:
        """Send a record of the server to a worker."""
        for process in tuple(self.processes[worker]):
            self.receive(process, record)

    # --- the workers ------------------------------------------------------------------------------------------------

    def live(self) -> list[P]:
        """Return all processes."""
        return list(chain.from_iterable(self.processes))

    def start_process(self, worker: int, incarnation: int = 0) -> P:
        """Start a process of this worker, also beside a living one; it asks for the worker's place."""
        self.num_processes += 1
        process = self._make_process(worker, f"p{self.num_processes}", incarnation)
        self.processes[worker].append(process)
        self.to_server(process, process.join())
        return process

    def end(self, process: P, code: int = 0) -> None:
        """End the process. `code`: the exit code if it ended itself; 0 if something else ended it."""
        if not process.is_dead:
            process.is_dead = True
            self.processes[process.worker].remove(process)

    def receive(self, process: P, record: AnyRecord) -> None:
        """Receive a record of the server in a process."""
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
        """Perform the actions of a process's core."""
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
        """Add an order to compute or to store to a process."""
        process.orders.append(order)

    def serve(self, process: P) -> None:
        """Serve other partitions, or read a partition again, from where the core of the process says."""

    def acknowledge(self, process: P, partition: int, until: int) -> None:
        """Acknowledge the batches of a partition below `until`: they need not be read again."""
