"""Server and workers over two channels, with numbers: whatever overtakes whatever, the model is the sum of its batches.

Engine, model host, worker protocol, grant handler, step model, sums, filters, row caches and blobs are those of
production. Only the gradient is made up: it depends on the batch and on the view, so that a batch that is missing, is
added twice or is computed on a wrong view is seen in the numbers. Each channel is FIFO. Which one moves next, and what
breaks, is drawn from a seed. A link that has broken may still deliver what was on it, behind what was sent again.
"""

from __future__ import annotations

import functools
import itertools
import json
import queue
import random
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from doll.config import JobConfig, parse
from doll.config.policy import POLICIES as REGISTERED
from doll.config.policy import policy_section
from doll.consumers.compute.gradient import CachedVersion, Gradient, GradientComputer
from doll.consumers.compute.gradient_engine import GrantHandler
from doll.consumers.compute.guard import GuardedGradient
from doll.consumers.compute.step_model import StepModel
from doll.consumers.protocol.worker_core import (
    Batch,
    Compute,
    Exit,
    GradientDone,
    OfferWeights,
    Send,
    StoreRest,
    WorkerCore,
)
from doll.consumers.tables.row_client import RowClient
from doll.consumers.tables.table_rows import TableRows
from doll.errors import BlobError
from doll.model.flat_model import FlatModel, build
from doll.optim.contribution import Contribution
from doll.optim.row_optimizer import row_optimizer
from doll.ps.checkpointing import encode_snapshot
from doll.ps.engine import events as ev
from doll.ps.model.local_host import LocalModelHost
from doll.ps.model.model_parts import make_parts
from doll.ps.start import Start, make_engine
from doll.records.control import (
    Alive,
    AnyRecord,
    Durable,
    Fence,
    GetRows,
    Grant,
    Hello,
    Join,
    Nack,
    NewVersion,
    Push,
    RowsStored,
    Settle,
    Welcome,
)
from doll.storage.checkpoints import Checkpoint
from doll.storage.contributions import Compressor
from doll.tables.rows import Ids, Rows
from doll.task.base import Task, load_task
from memory_stores import MemoryBlobs
from msgspec import structs

WORKERS: Final = 3
LR: Final = 0.05
_IDS: Final = 24
_GRANT_TIMEOUT_S: Final = 35.0  # above the default
_LEASE_S: Final = 9.0
_RTOL, _ATOL = 3e-4, 3e-5  # float32 over some hundred steps

JOB = """
job: unit
task: %s
data: {workers: %d, batch_size: 4}
training: {policy: %s, optimizer: {name: sgd, lr: %g}}
worker: {max_pending_batches: 12}
checkpoint: {every_updates: %d, every_s: 1000000}
"""
_DENSE = json.dumps({"class": "examples.synthetic.task:Gaussian", "args": {"features": 6}})
_TABLES = json.dumps(
    {"class": f"{Path(__file__).with_name('bag_task.py')}:Bags", "args": {"sparse": True, "ids": _IDS}}
)

# Every registered policy with its defaults, and the other forms that differ in what a push holds.
POLICIES: Final[dict[str, str]] = {name: f"{{name: {name}}}" for name in REGISTERED.names()} | {
    "doll": "{name: doll, group_size: 3}",
    "doll, sets": "{name: doll, group_size: 7}",
    "bsp, steps": "{name: bsp, contribution: step}",
    "asp, steps": "{name: asp, contribution: step}",
    "ssp": "{name: ssp, staleness: 2}",
    "essp": "{name: essp, staleness: 2}",
    "vap": "{name: vap, value_bound: 0.5}",
    "isp": "{name: isp, significance: 0.7}",
    "wsp": "{name: wsp, wave_batches: 3, clock_distance: 1}",
}


@functools.cache
def job_of(policy: str, *, has_tables: bool) -> tuple[JobConfig, Task]:
    """The job file of a policy of `POLICIES`, and its task."""
    config = parse(
        JOB % (_TABLES if has_tables else _DENSE, WORKERS, POLICIES[policy], LR, 2 if policy == "isp" else 4)
    )
    return config, load_task(config)


_REPLICAS: Final[dict[tuple[int, int], FlatModel]] = {}


def replica(config: JobConfig, task: Task, number: int) -> FlatModel:
    """That of worker `number`, whose processes come one after the other. Weights are loaded before it is used."""
    if (key := (id(config), number)) not in _REPLICAS:
        _REPLICAS[key] = build(config, task, with_rows=False)
    return _REPLICAS[key]


def takes_tables(policy: str) -> bool:
    """Whether models with tables can be trained under it."""
    return bool(policy_section(job_of(policy, has_tables=False)[0].training.policy.name).supports_tables)


class Difference(AssertionError):
    """The model, a view or a row is not what its batches make of it."""


Vector = npt.NDArray[np.float64]


class Added(NamedTuple):
    """What one batch adds: to parameters, float64, and to rows of tables; a step, or a gradient."""

    values: Vector
    rows: Mapping[str, Rows]


class Moment(NamedTuple):
    """A version of the model, as its batches make it.

    Attributes:
        included: of each worker: how many of its batches are in it.
        held_back: by worker and session: what of these is not in it.
    """

    weights: Vector
    rows: Mapping[str, Vector]
    included: tuple[int, ...]
    held_back: Mapping[tuple[int, int], Vector]


class AtOnce(RowClient):
    """Does not wait: what the world has not answered is lost, and asked again."""

    def _wait(self, grant: Grant) -> RowsStored | None:
        while True:
            try:
                answer = self._answers.get_nowait()
            except queue.Empty:
                return None
            if answer is not None and (answer.term, answer.session, answer.number) == (
                grant.term,
                grant.session,
                self._number,
            ):
                return answer


class Recorder:
    """`SetContribution` that writes down what each batch adds, and passes it on."""

    def __init__(self, process: Process, inner: Any) -> None:
        self._process = process
        self._inner = inner

    @property
    def holds(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._inner.holds)

    @property
    def holds_back(self) -> bool:
        return bool(self._inner.holds_back)

    def begin(self, grant: Grant) -> bool:
        process = self._process
        if grant.term != process.term:
            process.term, process.own = grant.term, {}
        process.grant = grant
        if not self._inner.begin(grant):
            return False
        process.own = {batch: step for batch, step in process.own.items() if batch < grant.first}
        return True

    def add(self, gradient: Gradient, *, batch: int, num_samples: int) -> bool:
        process = self._process
        n, weights = process.num_parameters, process.computer.weights
        if process.sends_steps:
            process.world.check_view(process, batch)
        before = weights[:n].astype(np.float64)
        if not self._inner.add(gradient, batch=batch, num_samples=num_samples):
            return False
        if process.sends_steps:
            added = process.own[batch] = Added(weights[:n] - before, self._inner._kept[-1].rows)
        else:
            added = Added(gradient.values[:n].astype(np.float64), gradient.rows)
        process.note(batch, added)
        return True

    def skip(self, batch: int) -> None:
        self._inner.skip(batch)
        self._process.note(batch, Added(np.zeros(self._process.num_parameters), {}))

    def keep(self) -> None:
        self._inner.keep()

    def values(self) -> Contribution | None:
        values: Contribution | None = self._inner.values()
        process = self._process
        if self.holds and self._inner.holds_back:
            process.world.held_back[process.term, process.number, *self.holds[-1]] = process.residual
        return values

    def rows(self) -> Mapping[str, Rows]:
        rows: Mapping[str, Rows] = self._inner.rows()
        return rows

    def rest(self, until: int) -> Contribution | None:
        rest: Contribution | None = self._inner.rest(until)
        return rest

    def rest_stored(self) -> None:
        self._inner.rest_stored()


class Process:
    """One worker process: `StepModel` or `GradientSum`, `GrantHandler` and `WorkerCore`, and its ends of the channels.

    Attributes:
        own: of each batch of this term, as it was computed last: its step.
        sent_again: grants and Settles that came, and pushes that went, which may come once more.
    """

    def __init__(self, world: World, number: int) -> None:
        world.num_processes += 1
        self.world, self.number, self.name = world, number, f"p{world.num_processes}"
        config = world.config
        self.model = replica(config, world.task, number)
        self.computer = GradientComputer(world.task, self.model)
        self.num_parameters = self.model.num_parameters
        self.sends_steps = config.training.policy.sends_steps
        self.tables: TableRows | None = None
        shapes = {} if self.model.tables is None else self.model.tables.shapes
        if shapes:
            self.client = AtOnce(config, world.blobs, dict(shapes))
            self.client.connect(lambda request: world.get_rows(self, request))
            self.tables = TableRows(
                self.client, 2000,
                optimizer=row_optimizer(config.training.optimizer) if self.sends_steps else None,
            )  # fmt: skip
        self.local: Any
        if self.sends_steps:
            self.local = inner = StepModel(
                config.job, world.blobs, config.training, self.model, self.computer, rows=self.tables
            )
        else:
            self.local, inner = CachedVersion(config.job, world.blobs, self.computer), self.computer.new_sum()  # type: ignore[assignment]
        is_sparse = self.sends_steps or bool(shapes)
        self.handler = GrantHandler(
            config, local_model=self, guard=self,
            compressor=Compressor(config.job, self.num_parameters, shapes)
            if is_sparse
            else Compressor(config.job),
            blobs=world.blobs, dead_letters=None,  # type: ignore[arg-type]  # no sample is refused
            contribution=Recorder(self, inner), rows=self.tables,
        )  # fmt: skip
        self.core: WorkerCore | None = None
        self.grant: Grant | None = None
        self.version = self.term = 0
        self.own: dict[int, Added] = {}
        self.sent_again: deque[Grant | Settle | Push] = deque(maxlen=12)
        self.orders: deque[Compute | StoreRest] = deque()
        # "late": what was on links that have broken.
        self.to_worker: dict[str, deque[AnyRecord]] = {"kafka": deque(), "link": deque(), "late": deque()}
        self.to_server: dict[str, deque[AnyRecord]] = {"kafka": deque(), "link": deque(), "late": deque()}
        self.is_linked = self.is_linked_at_server = self.is_dead = False
        self.to_server["kafka"].append(Join(worker=number, process=self.name))

    @property
    def residual(self) -> Vector:
        """What is held back now."""
        residual = self.local._residual if self.sends_steps else None
        return residual._held.astype(np.float64) if residual and residual.is_used else np.zeros(self.num_parameters)

    def note(self, batch: int, added: Added) -> None:
        assert self.grant is not None
        number = self.grant.grant_ids[batch - self.grant.first]
        self.world.added[self.grant.term, self.number, batch, number] = added

    def compute(self, x: npt.NDArray[Any], y: npt.NDArray[Any], *, batch: int) -> GuardedGradient:
        """`BatchComputer`: a gradient that depends on the worker, the batch and the view."""
        rng = np.random.default_rng([self.number, batch])
        weights, n = self.computer.weights, self.num_parameters
        values = np.zeros_like(weights)
        values[:n] = rng.normal(size=n) + 0.3 * weights[:n]
        rows: dict[str, Rows] = {}
        if self.tables is not None and self.model.tables is not None:
            for name, shape in self.model.tables.shapes.items():
                ids: Ids = np.unique(rng.integers(0, _IDS, size=6))
                got = self.tables.look_up(name, ids)
                self.world.check_rows(self, name, ids, got, batch)
                noise = rng.normal(size=(len(ids), shape.width)).astype(np.float32)
                rows[name] = Rows(ids, noise + np.float32(0.3) * got)
        return GuardedGradient(Gradient(values, 1.0, {}, float(np.linalg.norm(values)), rows=rows), {})

    def offer(self, weights: NewVersion) -> None:
        """`LocalModel`."""
        self.local.offer(weights)
        if self.tables is not None:
            self.tables.offer(weights)

    def load(self, grant: Grant) -> int | None:
        """`LocalModel`."""
        version: int | None = self.local.load(grant)
        self.version = -1 if version is None else version
        return version

    def batch(self, number: int) -> Batch:
        """Some batches have no usable sample."""
        count = 0 if (self.number * 7 + number) % 11 == 0 else 4
        return Batch(number, SimpleNamespace(x=np.zeros(count), y=np.zeros(count)), count, 0.0)


class World:
    """One server at a time, `WORKERS` workers, and what goes wrong between them.

    Attributes:
        added: by (term, worker, batch, grant id): what that batch adds, as it was computed last for that grant.
        held_back: by the same of a push's last batch: what its worker held back behind it.
        named: by the key of a push: the (batch, grant id) that its worker has named.
        moments: by (term, version).
        void_views: by the same as `added`: void grants that were computed on a view without the rest given away.
        counts: of what has happened.
    """

    core_class: type[WorkerCore] = WorkerCore

    def __init__(self, policy: str, seed: int, *, has_tables: bool = False) -> None:
        self.rng = random.Random(seed)
        self.config, self.task = job_of(policy, has_tables=has_tables)
        self.blobs = MemoryBlobs(lambda: 0.0)
        self.term = self.num_processes = 0
        self.now = 0.0
        self.saved: Checkpoint | None = None
        self.added: dict[tuple[int, int, int, int], Added] = {}
        self.held_back: dict[tuple[int, int, int, int], Vector] = {}
        self.named: dict[str, list[tuple[int, int]]] = {}
        self.moments: dict[tuple[int, int], Moment] = {}
        self.void_views: set[tuple[int, int, int, int]] = set()
        self.counts: Counter[str] = Counter()
        self.processes: list[Process] = []
        self.start_server()
        self.processes = [Process(self, number) for number in range(WORKERS)]
        for process in self.processes:  # all have joined, and hold some batches
            self.feed(process.to_server["kafka"].popleft())  # type: ignore[arg-type]
            while process.core is None:
                self.receive(process, process.to_worker["kafka"].popleft())
            for _ in range(4):
                self.do(process, process.core.batch_ready(process.batch(process.core.next_batch)))

    # --- the server ---------------------------------------------------------------------------------------------------

    def start_server(self) -> None:
        """A new server, from the newest checkpoint. Links to the one before break."""
        self.term += 1
        parts = make_parts(self.config.training, build(self.config, self.task))
        self.host = LocalModelHost(self.config, self.term, parts.updater, self.blobs, parts.tables)
        if self.saved is None:
            start = Start(self.term, self.now, (0,) * WORKERS)
        else:
            start = Start.resume(self.term, self.now, self.saved)
        self.engine = make_engine(self.config, start, self.host)
        applied = tuple(worker.applied for worker in self.engine.workers())
        self.moments[self.term, self.engine.version] = Moment(*self._model(), applied, {})
        self.welcomed: dict[int, int] = {}  # worker -> session
        for process in self.processes:
            for channel in ("link", "late"):
                process.to_worker[channel].clear()
                process.to_server[channel].clear()
            process.is_linked_at_server = False
            self.send(process.number, Hello(term=self.term))

    def _model(self) -> tuple[Vector, dict[str, Vector]]:
        tensors = self.host.tensors()
        rows = {
            name.removeprefix("table.").removesuffix(".values"): values.astype(np.float64)
            for name, values in tensors.items()
            if name.endswith(".values")
        }
        return tensors["weights"][: self.host._updater.num_parameters].astype(np.float64), rows

    def feed(self, event: ev.Event) -> None:
        """Have the server handle an event, and do what it says."""
        events = deque([event])
        while events and self.engine.finished is None:
            for action in self.engine.handle(events.popleft(), self.now):
                if isinstance(action, ev.RollBack):
                    self.counts["rolled back"] += 1
                    self.start_server()
                    return
                if (outcome := self._perform(action)) is not None:
                    events.append(outcome)

    def _perform(self, action: ev.EngineAction) -> ev.Event | None:
        term, host = self.term, self.host
        match action:
            case Welcome(worker=worker, session=session):
                if self.welcomed.get(worker) != session:
                    host.forget_rows(worker)
                    for item in self.processes:  # a link of another session is closed
                        if item.number == worker:
                            item.is_linked_at_server = False
                self.welcomed[worker] = session
                self.send(worker, action)
            case NewVersion(worker=worker):
                if (rows := host.changed_rows(worker, action.version)) is not None:
                    action = msgspec.structs.replace(action, rows_key=rows.key, rows_since=rows.since)
                self.send(worker, action)
            case Grant() | Fence() | Durable() | Settle():
                self.counts["settles"] += isinstance(action, Settle)
                self.send(action.worker, action)
            case ev.PublishWeights(version):
                host.publish(version)
            case ev.FetchGradient():
                return host.fetch(action).event
            case ev.ApplyUpdate():
                host.apply(action)
                host.tidy(self.engine.named_versions)
                self.check_update(action)
            case ev.ReleaseWeights(version):
                host.release(version)
            case ev.DropGradient(key):
                host.drop(key)
            case ev.SendHello(worker):
                self.send(worker, Hello(term=term))
            case ev.RepublishWeights(version):
                host.republish(version)
            case ev.StoreCheckpoint(version, snapshot):
                assert not self.moments[term, version].held_back, "what is durable is whole"
                tensors = {name: values.copy() for name, values in host.tensors().items()}
                self.saved = Checkpoint(
                    job="unit", fingerprint="", term=term, version=version, state=encode_snapshot(snapshot),
                    tensors=tensors,
                )  # fmt: skip
                self.counts["checkpoints"] += 1
                return ev.CheckpointStored(version=version)
        return None

    def send(self, worker: int, record: AnyRecord) -> None:
        """On the link where there is one, and else, or any other record, through Kafka."""
        for process in self.processes:
            if process.number != worker or process.is_dead:
                continue
            is_his = getattr(record, "session", None) in (None, process.core and process.core.session)
            is_for_link = isinstance(record, Grant | NewVersion) or (
                isinstance(record, Settle) and self.rng.random() < 0.5  # today through Kafka
            )
            if not (is_for_link and is_his and process.is_linked_at_server):
                process.to_worker["kafka"].append(record)
            elif process.is_linked:
                process.to_worker["link"].append(record)  # else it is lost: the other end has failed already

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
            version=self.engine.version, key=stored.key, included=worker.applied,
        )  # fmt: skip
        process.client.deliver(answer)

    # --- what must hold -----------------------------------------------------------------------------------------------

    def check_update(self, update: ev.ApplyUpdate) -> None:
        """The new version is the one before and what the named batches add, without what their workers hold back."""
        self.counts["updates"] += 1
        before = self.moments[self.term, update.version - 1]
        weights, included, held_back = before.weights.copy(), list(before.included), dict(before.held_back)
        rows = {name: values.copy() for name, values in before.rows.items()}
        sends_steps = self.config.training.policy.sends_steps
        factor = 1.0 if sends_steps else -LR * update.scale
        for item in update.sets:
            worker = item.push.worker
            self.counts["sets of several batches"] += len(item.push.batches) > 1
            self.counts["rests"] += not item.push.batches
            source = (worker, item.push.session)
            if item.push.key or not item.push.holds_back:  # else it has no step, and what was held back stays
                weights += held_back.pop(source, 0.0)
            # A push that came late is taken under the numbers of later grants.
            named = self.named[item.push.key] if item.push.key else []
            assert not named or [batch for batch, _ in named] == [batch.batch for batch in item.push.batches]
            for batch in item.push.batches:
                assert batch.batch == included[worker], "each stream in its order"
                included[worker] += 1
            for number, grant_id in named:
                key = (self.term, worker, number, grant_id)
                if key in self.void_views:
                    raise Difference(f"batch {number} of worker {worker} counts: its view lacked what is held back")
                added = self.added[key]
                weights += factor * added.values
                for name, part in added.rows.items():
                    np.add.at(rows[name], part.ids, factor * part.values)
                if item.push.holds_back and number == named[-1][0]:
                    held_back[source] = self.held_back[key]
            if item.push.key:
                weights -= held_back.get(source, 0.0)
        got, got_rows = self._model()
        names = [[(part.batch, part.grant_id) for part in item.push.batches] for item in update.sets]
        self.expect(got, weights, f"version {update.version} of term {self.term}, made of {names}")
        for name, values in rows.items():
            self.expect(got_rows[name], values, f"table {name} of version {update.version}, made of {names}")
        # From here on what there is counts: rounding does not add up.
        self.moments[self.term, update.version] = Moment(got, got_rows, tuple(included), held_back)

    def expect(self, got: Vector, expected: Vector, what: str) -> None:
        off = np.abs(got - expected)
        if not (off <= _ATOL + _RTOL * np.abs(expected)).all():
            raise Difference(f"{what}: off by {off.max():.3g}")

    def check_view(self, process: Process, batch: int) -> None:
        """A worker that steps itself sees the weights, all its own steps that they lack, and what it holds back.

        There is one exception, under a policy with a filter. The server asks for rests only when no grant stands, and
        grants nothing before the rests are in a newer version. So a grant that a worker computes at an older version,
        after it has given its rest away, was taken back before the server asked, mostly by its time limit. That view
        lacks the rest. The server refuses the push, and the worker takes the step back at the next grant. So a view
        may lack the rest, and nothing else, where the grant does not stand; `check_update` fails if such a batch ever
        counts.
        """
        self.counts["views"] += 1
        grant, core = process.grant, process.core
        assert grant is not None
        assert core is not None
        moment = self.moments[process.term, process.version]
        included = moment.included[process.number]
        expected = moment.weights.copy()
        for own, step in process.own.items():
            if own >= included:
                expected += step.values
        got = process.computer.weights[: process.num_parameters].astype(np.float64)
        what = f"view of {process.name} at version {process.version}, own steps {[*process.own]}"
        rest = moment.held_back.get((process.number, core.session))
        if rest is None:
            self.expect(got, expected, what)
            return
        try:
            self.expect(got, expected + rest, what)
        except Difference:
            grant_id = grant.grant_ids[batch - grant.first]
            if self.stands(process, grant.term, batch, grant_id) or core._settled_until < included:
                raise
            self.expect(got, expected, f"{what}, the rest given away")
            self.void_views.add((grant.term, process.number, batch, grant_id))
            self.counts["void views"] += 1

    def stands(self, process: Process, term: int, batch: int, grant_id: int) -> bool:
        """Whether the server would still take the push that answers this grant."""
        worker = self.engine.worker(process.number)
        is_his = process.core is not None and worker.session == process.core.session
        return is_his and self.engine._find(worker, term, grant_id, batch) is not None

    def check_rows(self, process: Process, name: str, ids: Ids, got: npt.NDArray[np.float32], batch: int) -> None:
        """Each row is of a version that the grant allows, with the worker's own steps that this version lacks."""
        grant = process.grant
        assert grant is not None
        assert process.core is not None
        newest = max(version for term, version in self.moments if term == grant.term)
        for at, row in zip(ids, got, strict=True):
            self.counts["rows"] += 1
            for version in range(newest, grant.min_version - 1, -1):
                moment = self.moments.get((grant.term, version))
                if moment is None:
                    continue
                expected = moment.rows[name][at].copy()
                for own, step in process.own.items():
                    part = step.rows.get(name)
                    if own >= moment.included[process.number] and part is not None and at in part.ids:
                        expected += part.values[np.searchsorted(part.ids, at)]
                if (np.abs(row - expected) <= _ATOL + _RTOL * np.abs(expected)).all():
                    break
            else:
                number = grant.grant_ids[batch - grant.first]
                if process.core.is_wanted(grant.term, batch, number):
                    raise Difference(
                        f"row {at} of {name}, at {process.name}: of no version from {grant.min_version} on"
                    )

    # --- workers ------------------------------------------------------------------------------------------------------

    def do(self, process: Process, actions: Any) -> None:
        for action in actions:
            match action:
                case Send(record):
                    if isinstance(record, Push) and record.key:
                        self.named[record.key] = [(item.batch, item.grant_id) for item in record.batches]
                    if not (isinstance(record, Push | Nack) and process.is_linked):
                        process.to_server["kafka"].append(record)
                    elif process.is_linked_at_server:
                        process.to_server["link"].append(record)  # else it is lost: the other end has failed already
                case Compute() | StoreRest():
                    process.orders.append(action)
                case OfferWeights(weights):
                    process.offer(weights)
                case Exit():
                    self.restart(process)

    def restart(self, process: Process) -> None:
        """This process is gone; another one takes its place."""
        process.is_dead = True
        self.processes[self.processes.index(process)] = Process(self, process.number)
        self.counts["processes"] += 1

    def leave(self, process: Process) -> None:
        """In order: what is kept or held back goes first."""
        core = process.core
        if core is None:
            return
        core.drain()
        if not core.busy and (rest := core.rest) is not None:
            self.counts["rests of leaving workers"] += 1
            self.do(process, core.rest_stored(rest, process.handler.store_rest(rest.until)))
        self.do(process, core.leave("sigterm"))
        for channel in ("link", "kafka"):
            while process.to_server[channel] and not process.is_dead:
                self.feed(process.to_server[channel].popleft())  # type: ignore[arg-type]
        if not process.is_dead:
            self.restart(process)

    def receive(self, process: Process, record: AnyRecord) -> None:
        """A process gets a command."""
        if process.core is None:
            if isinstance(record, Welcome) and record.process == process.name:
                process.core = self.core_class(record, max_pending=12, now=self.now)
            elif isinstance(record, Hello):
                process.to_server["kafka"].append(Join(worker=process.number, process=process.name))
            elif isinstance(record, Fence) and record.process == process.name:
                self.restart(process)
            return
        if isinstance(record, Grant | Settle):
            process.sent_again.append(record)
        self.do(process, process.core.on_record(record, self.now))

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
        while batches and not process.is_dead and core.is_current(grant):
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
            grant = structs.replace(grant, first=grant.first + count, grant_ids=grant.grant_ids[count:])

    # --- the dice -----------------------------------------------------------------------------------------------------

    def deliver_to_server(self, but: Process | None = None) -> None:
        """One message of one channel."""
        waiting = [
            (item, channel)
            for item in self.processes
            if item is not but
            for channel in ("kafka", "link", "late")
            if item.to_server[channel]
        ]
        if waiting:
            process, channel = self.rng.choice(waiting)
            record = process.to_server[channel].popleft()
            if isinstance(record, Push):
                process.sent_again.append(record)
            self.feed(record)  # type: ignore[arg-type]

    def deliver_to_worker(self, process: Process) -> None:
        """One command of one channel."""
        if waiting := [queue for queue in process.to_worker.values() if queue]:
            self.receive(process, self.rng.choice(waiting).popleft())

    def step(self) -> None:
        """Something happens."""
        self.now += 0.01
        process = self.rng.choice(self.processes)
        core = process.core
        match self.rng.choices(_STEPS, cum_weights=_CUM_WEIGHTS)[0]:
            case "server":
                self.deliver_to_server()
            case "worker":
                self.deliver_to_worker(process)
            case "read" if core is not None and core.has_room:
                self.do(process, core.batch_ready(process.batch(core.next_batch)))
            case "compute" if process.orders and core is not None:
                self.compute(process)
            case "announce" if core is not None:
                self.do(process, core._announce_all())
                process.to_server["kafka"].append(Alive(worker=process.number, session=core.session))
            case "copy" if process.sent_again:
                self.copy(process)
            case "link":
                self.change_link(process)
            case "tick":
                # As long as a server waits before it asks for a rest again, or a shorter time.
                self.pass_time(self.rng.choice((0.1, 3.1)), self.processes)
            case "restart":
                self.restart(process)
            case "leave":
                self.leave(process)
            case "server restarts":
                self.counts["servers"] += 1
                self.start_server()
            case "blobs":
                self.blobs.wipe()
            case "timeout":
                self.pass_time(_GRANT_TIMEOUT_S, self.processes)
            case "lease":
                self.pass_time(_LEASE_S, [item for item in self.processes if item is not process])

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
        elif core is not None and core.term == self.term and self.welcomed.get(process.number) == core.session:
            self.counts["links"] += 1
            process.is_linked = process.is_linked_at_server = True
            if self.rng.random() < 0.3:  # the server first handles what it has read with the attachment
                self.deliver_to_server()
            self.feed(ev.GrantsLost(worker=process.number))
            if not process.is_dead:
                self.do(process, core.resend())

    def _link_fails(self, process: Process) -> None:
        process.is_linked = False
        if process.core is not None:
            self.do(process, process.core.resend())

    def _link_fails_at_server(self, process: Process) -> None:
        process.is_linked_at_server = False
        self.feed(ev.GrantsLost(worker=process.number))

    def pass_time(self, seconds: float, heard: list[Process]) -> None:
        """Then these processes are heard of, before anybody is missed."""
        self.now += seconds
        for process in heard:
            if process.core is not None:
                self.feed(Alive(worker=process.number, session=process.core.session))
        self.feed(ev.Tick())


_WEIGHTS: Final = {
    "server": 330, "worker": 250, "read": 120, "compute": 190, "announce": 15, "copy": 40, "link": 20, "tick": 15,
    "restart": 1.5, "leave": 1.5, "server restarts": 1, "blobs": 1.5, "timeout": 2, "lease": 1,
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
    if policy == "isp":  # it settles before each checkpoint, and begins again where a process is lost
        length *= 2
    world = world_class(policy, seed, has_tables=has_tables)
    for _ in range(length):
        world.step()
    world.counts += world.engine.counters
    return world
