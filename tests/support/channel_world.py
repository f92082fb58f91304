"""The world of `doll_lab.simulation.world` with two channels, and numbers that are compared at every version.

The model host, rows and blobs are those of production, and so are the processes. Each channel is FIFO. Which one moves
next, and what breaks, is drawn from a seed. A link that has broken may still deliver what was on it, behind what was
sent again.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from channel_process import PLACES, SETTLING, WORKERS, Process, job_of, takes_tables
from doll.consumers.compute.gradient_engine import batch_seed
from doll.consumers.protocol.grants import part_of
from doll.consumers.protocol.worker_core import (
    Compute,
    GradientDone,
    StoreRest,
)
from doll.errors import BlobError
from doll.model.flat_model import build
from doll.ps.checkpointing import encode_snapshot
from doll.ps.engine import events as ev
from doll.ps.engine.engine import Engine
from doll.ps.model.model_host import ModelHost
from doll.ps.model.updater import make_parts
from doll.ps.start import Start, make_engine
from doll.records.bounds import ends_of
from doll.records.control import (
    Alive,
    AnyRecord,
    GetRows,
    Grant,
    Nack,
    NewVersion,
    Push,
    RowsStored,
    Scale,
    Settle,
    Welcome,
)
from doll.storage.checkpoints import Checkpoint
from expected_model import ExpectedModel, Moment, Vector
from memory_stores import MemoryBlobs
from msgspec import structs

from doll_lab.simulation import world as worlds

_GRANT_TIMEOUT_S: Final = 35.0  # above the default
_LEASE_S: Final = 9.0
_GROWTH: Final = (0.0, 0.0, 0.03)  # of a step: the topics of a third of the worlds grow
_MOST_ADDED: Final = 3
_LOOK: Final = 0.03


class World(worlds.World[Process]):
    """One server at a time, `WORKERS` workers at first and up to `PLACES` later, and what goes wrong between them.

    Partitions are added to the topic, and each server learns of them later. Workers are released.

    Attributes:
        partitions: of the topic, by now.
        growth: how probable a step adds one.
        welcomed: of each worker: the session of the Welcome that this server has sent.
        counts: of what has happened.
    """

    adds_and_releases = True

    def __init__(self, policy: str, seed: int, *, has_tables: bool = False) -> None:
        super().__init__(
            PLACES, make_engine=self._make_engine, make_process=lambda worker, name, _: Process(self, worker, name),
            max_pending=12,
        )  # fmt: skip
        self.rng, self.cut_rng = random.Random(seed), random.Random(seed + 1)
        self.share_cut = self.cut_rng.choice((0.0, 0.05, 0.5))
        self.loads = random.Random(seed)  # of partitions, and where these go for it
        self.partitions = self._partitions_at_start = self.rng.choice((WORKERS, WORKERS, WORKERS + 2, 3 * WORKERS))
        self._topic_rng = random.Random(-1 - seed)
        self.growth = self._topic_rng.choice(_GROWTH) if self.adds_and_releases else 0.0
        self.config, self.task = job_of(policy, has_tables=has_tables)
        self.blobs = MemoryBlobs(lambda: 0.0)
        self.begin()
        self.saved: Checkpoint | None = None
        self.expected = ExpectedModel(self.config.training.policy, stands=self.stands)
        self.counts: Counter[str] = Counter()
        self.start_server()
        for worker in range(WORKERS):
            self.start_process(worker)
        for process in self.live():  # all have joined, and hold some batches
            self.handle(process.to_server["kafka"].popleft())  # type: ignore[arg-type]
            while process.core is None:
                self.receive(process, process.to_worker["kafka"].popleft())
            for _ in range(4):
                self.do(process, process.core.batch_ready(process.batch()))

    def begin(self) -> None:
        """Called before the first server starts."""

    # --- the server ---------------------------------------------------------------------------------------------------

    def start_server(self) -> None:
        """A new server, from the newest checkpoint. Links to the one before break."""
        for process in self.live():
            for channel in ("link", "late"):
                process.to_worker[channel].clear()
                process.to_server[channel].clear()
            process.is_linked_at_server = False
        version, term = 0 if self.saved is None else self.saved.version, self.term
        resumed = self.expected.moments.get((term, version))
        super().start_server()
        applied, snapshot = tuple(worker.applied for worker in self.engine.workers()), self.engine.snapshot(self.now)
        ends = () if resumed is None else resumed.ends
        ends += (0,) * (len(snapshot.applied) - len(ends))
        assert ends == ends_of(snapshot.origins, self.expected.size, snapshot.applied, snapshot.left_out)
        self.expected.moments[self.term, self.engine.version] = Moment(
            *self._model(), applied, snapshot.applied, {}, 0.0 if resumed is None else resumed.momentum, ends
        )
        self.welcomed: dict[int, int] = {}

    def _make_engine(self) -> Engine:
        parts = make_parts(self.config.training, build(self.config, self.task))
        self.host: Any = ModelHost(self.config, self.term, parts.updater, self.blobs, parts.tables)
        self._num_parameters = parts.updater.num_parameters
        if self.saved is None:
            start = Start(self.term, self.now, (0,) * self._partitions_at_start)
        else:
            start = Start.resume(self.term, self.now, self.saved)
        return make_engine(self.config, start, self.host.load)

    def _model(self) -> tuple[Vector, dict[str, Vector]]:
        tensors = self.tensors()
        rows = {
            name.removeprefix("table.").removesuffix(".values"): values.astype(np.float64)
            for name, values in tensors.items()
            if name.endswith(".values")
        }
        return tensors["weights"][: self._num_parameters].astype(np.float64), rows

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        tensors: dict[str, npt.NDArray[Any]] = self.host.tensors()
        return tensors

    def perform(self, action: ev.EngineAction) -> ev.Event | None:
        host = self.host
        match action:
            case Welcome(worker=worker, session=session):
                if self.welcomed.get(worker) != session:
                    host.forget_rows(worker)
                    for item in self.processes[worker]:  # a link of another session is closed
                        item.is_linked_at_server = False
                self.welcomed[worker] = session
            case NewVersion(worker=worker):
                if (rows := host.changed_rows(worker, action.version)) is not None:
                    action = structs.replace(action, rows_key=rows.key, rows_since=rows.since)
            case Settle():
                self.counts["settles"] += 1
            case ev.PublishWeights(version):
                host.publish(version)
            case ev.FetchGradient():
                event: ev.Event = host.fetch(action).event
                return event
            case ev.ApplyUpdate():
                host.apply(action)
                host.tidy(self.engine.named_versions)
                self.expected.check_update(self.term, action, *self._model())
            case ev.ReleaseWeights(version):
                host.release(version)
            case ev.DropGradient(key, _, held):
                host.drop(key, held)
            case ev.RepublishWeights(version):
                host.republish(version)
            case ev.StoreCheckpoint(version, snapshot):
                assert not self.expected.moments[self.term, version].held_back, "what is durable is whole"
                self.saved = self.checkpoint(version, encode_snapshot(snapshot))
                self.counts["checkpoints"] += 1
        return super().perform(action)

    def checkpoint(self, version: int, state: bytes) -> Checkpoint:
        tensors = {name: values.copy() for name, values in self.host.tensors().items()}
        return Checkpoint(
            job="unit", fingerprint="", term=self.term, version=version, state=state, tensors=tensors
        )  # fmt: skip

    def get_rows(self, process: Process, request: GetRows) -> None:
        """Meanwhile the server goes on. A request may be lost, and so may its answer."""
        for _ in range(self.rng.randrange(3)):
            self.deliver_to_server(but=process)
        fate = self.rng.random()
        if fate < 0.05 or request.term != self.term:
            return
        worker = self.engine.worker(request.worker)
        if worker.session != request.session:
            return
        try:
            stored = self.host.store_rows(request, self.engine.version, subscribes=self.engine.policy.sends_versions)
        except BlobError:
            return
        if fate < 0.1:
            return
        answer = RowsStored(
            term=self.term, worker=request.worker, session=request.session, number=request.number,
            version=self.engine.version, key=stored.key, included=worker.queue.applied,
        )  # fmt: skip
        process.client.deliver(answer)

    def stands(self, process: Process, term: int, batch: int, grant_id: int) -> bool:
        """Whether the server would still take the push that answers this grant."""
        worker = self.engine.worker(process.worker)
        is_his = process.core is not None and worker.session == process.core.session
        return is_his and self.engine._find(worker, term, grant_id, batch) is not None

    # --- the links ----------------------------------------------------------------------------------------------------

    def to_worker(self, worker: int, record: AnyRecord) -> None:
        """On the link where there is one, and else, or any other record, through Kafka."""
        for process in self.processes[worker]:
            is_his = getattr(record, "session", None) in (None, process.core and process.core.session)
            is_for_link = isinstance(record, Grant | NewVersion) or (
                isinstance(record, Settle) and self.rng.random() < 0.5  # today through Kafka
            )
            if not (is_for_link and is_his and process.is_linked_at_server):
                process.to_worker["kafka"].append(record)
            elif process.is_linked:
                process.to_worker["link"].append(record)  # else it is lost: the other end has failed already

    def to_server(self, process: Process, record: AnyRecord) -> None:
        if isinstance(record, Push) and record.key:
            self.expected.named[record.key] = [(item.batch, item.grant_id) for item in record.batches]
        if not (isinstance(record, Push | Nack) and process.is_linked):
            process.to_server["kafka"].append(record)
        elif process.is_linked_at_server:
            process.to_server["link"].append(record)  # else it is lost: the other end has failed already

    # --- workers ------------------------------------------------------------------------------------------------------

    def end(self, process: Process, code: int = 0) -> None:
        """Another process takes its place."""
        super().end(process, code)
        self.start_process(process.worker)
        self.counts["processes"] += 1

    def receive(self, process: Process, record: AnyRecord) -> None:
        if process.core is not None and isinstance(record, Grant | Settle):
            process.sent_again.append(record)
        super().receive(process, record)

    def leave(self, process: Process) -> None:
        """In order: what is kept or held back goes first."""
        core = process.core
        if core is None:
            return
        core.drain()
        for order in process.orders:  # none of them is begun
            if isinstance(order, Compute):
                core.begin(order.grant)
        if not core.busy and (rest := core.rest) is not None:
            self.counts["rests of leaving workers"] += 1
            self.do(process, core.rest_stored(rest, process.handler.store_rest(rest.until)))
        self.do(process, core.leave("sigterm"))
        for channel in ("link", "kafka"):
            while process.to_server[channel] and not process.is_dead:
                self.handle(process.to_server[channel].popleft())  # type: ignore[arg-type]
        if not process.is_dead:
            self.end(process)

    def compute(self, process: Process) -> None:
        """Answer the next order, in parts where the dice say so."""
        core, order = process.core, process.orders.popleft()
        assert core is not None
        if isinstance(order, StoreRest):
            if self.rng.random() < 0.1:
                core.rest_not_stored(order)  # the blob store is away
                return
            self.do(process, core.rest_stored(order, process.handler.store_rest(order.until)))
            return
        grant, batches = order.grant, order.batches
        while batches and not process.is_dead and (begun := core.begin(grant)) is not None:
            grant = begun
            self.expected.computes(process, grant, batches)
            process.numbers = {
                batch_seed(self.config.seed, batch): batch.number for batch in batches if batch.num_samples
            }
            on_their_way = [record for queue in process.to_server.values() for record in queue]
            self.counts["begun ahead of a push"] += any(isinstance(record, Push) for record in on_their_way)
            self.counts["weights of a later grant"] += begun.version > order.grant.version
            left = [self.rng.randrange(1, 5)]

            def goes_on(batch: int, number: int, term: int = grant.term, left: list[int] = left) -> bool:
                left[0] -= 1
                return left[0] > 0 and core.is_wanted(term, batch, number)

            done: GradientDone | None = process.handler.handle(grant, batches, goes_on)
            for _ in range(self.rng.choice((0, 0, 0, 1, 3))):  # the event loop went on meanwhile
                self.deliver_to_worker(process)
            if process.is_dead:
                return
            if done is None:
                self.counts["weights missing"] += 1
                self.do(process, core.weights_missing(grant))
                return
            self.do(process, core.gradient_done(grant, batches, done, 0.0))
            count = len(done.batches)
            batches = batches[count:]
            grant = part_of(grant, count)

    # --- the dice -----------------------------------------------------------------------------------------------------

    def deliver_to_server(self, but: Process | None = None) -> None:
        """One message of one channel."""
        waiting = [
            (item, channel)
            for item in self.live()
            if item is not but
            for channel in ("kafka", "link", "late")
            if item.to_server[channel]
        ]
        if waiting:
            process, channel = self.rng.choice(waiting)
            record = process.to_server[channel].popleft()
            if isinstance(record, Push):
                process.sent_again.append(record)
            self.handle(record)  # type: ignore[arg-type]

    def deliver_to_worker(self, process: Process) -> None:
        """One command of one channel."""
        if waiting := [queue for queue in process.to_worker.values() if queue]:
            self.receive(process, self.rng.choice(waiting).popleft())

    def step(self) -> None:
        """Something happens."""
        self.now += 0.01
        self.change_topic()
        process = self.rng.choice(self.live())
        core = process.core
        match self.rng.choices(_STEPS, cum_weights=_CUM_WEIGHTS)[0]:
            case "server":
                self.deliver_to_server()
            case "worker":
                self.deliver_to_worker(process)
            case "read" if core is not None and core.has_room and core.served:
                self.do(process, core.batch_ready(process.batch()))
            case "compute" if process.orders and core is not None:
                self.compute(process)
            case "announce" if core is not None:
                self.do(process, core._announce_all())
                process.to_server["kafka"].append(self.alive(process))
            case "copy" if process.sent_again:
                self.copy(process)
            case "link":
                self.change_link(process)
            case "tick":
                # As long as a server waits before it asks for a rest again, or a shorter time.
                self.pass_time(self.rng.choice((0.1, 3.1)), self.live())
            case "restart":
                self.end(process)
            case "leave":
                self.leave(process)
            case "server restarts":
                self.counts["servers"] += 1
                self.start_server()
            case "blobs":
                self.blobs.wipe()
            case "timeout":
                self.pass_time(_GRANT_TIMEOUT_S, self.live())
            case "scale":
                self.scale()
                if self.loads.random() < 0.2:
                    self.balance()
            case "lease":
                self.pass_time(_LEASE_S, [item for item in self.live() if item is not process])

    def change_topic(self) -> None:
        """Perhaps its owner adds partitions, or the server looks at it."""
        chance = self._topic_rng.random()
        if chance < self.growth and self.partitions < self._partitions_at_start + _MOST_ADDED:
            self.partitions += 1
        elif chance > 1.0 - _LOOK:
            self.look_at_topic()

    def look_at_topic(self) -> None:
        """The server's watch says how many partitions there are."""
        known = len(self.engine.snapshot(self.now).origins)
        self.handle(ev.TopicGrew(partitions=self.partitions))
        self.counts["partitions added"] += len(self.engine.snapshot(self.now).origins) - known

    def alive(self, process: Process) -> Alive:
        """A heartbeat by which a partition of the worker has much to learn, so that others may get its others."""
        core = process.protocol
        unread = tuple((number, self.loads.choice((0, 10, 1000))) for number in sorted(core.served)[:2])
        lag = sum(count for _, count in unread)
        return Alive(worker=process.worker, session=core.session, lag=lag, most_unread=unread)

    def scale(self) -> None:
        """The job is to have another number of workers; processes come for them, some of them before."""
        wanted = self.rng.randrange(1, PLACES + 1)
        self.counts["scaled"] += wanted != self.engine.moves.num_workers
        for worker in range(self.rng.randrange(1, PLACES + 1)):
            if not self.processes[worker]:
                self.start_process(worker)
        released = None
        if self.adds_and_releases and self._topic_rng.random() < 0.5:
            released = tuple(number for number in range(PLACES) if self._topic_rng.random() < 0.3)
            self.counts["released"] += len(released)
        self.handle(Scale(workers=wanted, run_id="", released=released))

    def balance(self) -> None:
        """Any partitions go to any workers, while their number stays."""
        moves = self.engine.moves
        if self.engine.finished is None and not moves.targets:
            owners = self.engine.snapshot(self.now).assignment
            wanted = [self.loads.choice((owner, self.loads.choice(moves._serving))) for owner in owners]
            assert moves._plan(wanted) == []
            self.counts["balanced"] += bool(moves.targets)
            self.handle(ev.GrantsLost(worker=-1))  # of nobody: what can move does so in the event that plans it

    def copy(self, process: Process) -> None:
        """Something that this process got or sent comes again, late, on any channel."""
        self.counts["copies"] += 1
        record = self.rng.choice(process.sent_again)
        channel = self.rng.choice(("kafka", "late"))
        (process.to_server if isinstance(record, Push) else process.to_worker)[channel].append(record)

    def change_link(self, process: Process) -> None:
        """A link opens, or one end of it fails, or the other end notices."""
        core = process.core
        if process.is_linked and process.is_linked_at_server:
            for channels in (process.to_worker, process.to_server):
                if self.rng.random() < 0.5:
                    self.counts["late messages"] += len(channels["link"])
                    channels["late"] += channels["link"]  # they come behind what is sent again
                channels["link"].clear()
            if self.rng.random() < 0.5:
                self._link_fails(process)
            else:
                self._link_fails_at_server(process)
        elif process.is_linked:
            self._link_fails(process)
        elif process.is_linked_at_server:
            self._link_fails_at_server(process)
        elif core is not None and core.term == self.term and self.welcomed.get(process.worker) == core.session:
            self.counts["links"] += 1
            process.is_linked = process.is_linked_at_server = True
            if self.rng.random() < 0.3:  # the server first handles what it has read with the attachment
                self.deliver_to_server()
            self.handle(ev.GrantsLost(worker=process.worker))
            if not process.is_dead:
                self.do(process, core.resend())

    def _link_fails(self, process: Process) -> None:
        process.is_linked = False
        if process.core is not None:
            self.do(process, process.core.resend())

    def _link_fails_at_server(self, process: Process) -> None:
        process.is_linked_at_server = False
        self.handle(ev.GrantsLost(worker=process.worker))

    def pass_time(self, seconds: float, heard: list[Process]) -> None:
        """Then these processes are heard of, before anybody is missed."""
        self.now += seconds
        for process in heard:
            if process.core is not None:
                self.handle(self.alive(process))
        self.handle(ev.Tick())


_WEIGHTS: Final = {
    "server": 330, "worker": 250, "read": 120, "compute": 190, "announce": 15, "copy": 40, "link": 20, "tick": 15,
    "restart": 1.5, "leave": 1.5, "scale": 10, "server restarts": 1, "blobs": 1.5, "timeout": 2, "lease": 1,
}  # fmt: skip
_STEPS: Final = tuple(_WEIGHTS)
_CUM_WEIGHTS: Final = tuple(itertools.accumulate(_WEIGHTS.values()))


def play(policy: str, seed: int, world_class: type[World] = World) -> World:
    """One random interleaving: with tables in a third of them where the policy takes them.

    Raises:
        Difference: see `World`.
    """
    rng = random.Random(seed)
    has_tables, length = rng.random() < 1 / 3 and takes_tables(policy), rng.randrange(60, 320)
    if policy in SETTLING:  # it settles before each checkpoint, and begins again where a process is lost
        length *= 2
    world = world_class(policy, seed, has_tables=has_tables)
    if world.growth:  # until what is added is learned
        length *= 2
    for _ in range(length):
        world.step()
    world.counts += world.engine.counters + world.expected.counts
    world.counts["rolled back"] = world.rolled_back
    return world
