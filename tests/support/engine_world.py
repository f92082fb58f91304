"""A small world around the real engine and the real worker protocol: streams, channels, blobs, crashes, virtual time.

Each channel is FIFO, as Kafka's partitions are; which channel moves next is the test's choice. Nothing sleeps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from doll.config import StopConfig
from doll.config.policy import POLICIES as registered
from doll.config.policy import PolicyConfig, policy_section
from doll.consumers.intake.batching import Batcher
from doll.consumers.protocol.worker_core import (
    Acknowledge,
    Batch,
    Compute,
    ComputedBatch,
    Exit,
    GradientDone,
    OfferWeights,
    Send,
    StoreRest,
    WorkerCore,
)
from doll.optim.contribution import Contribution
from doll.ps.engine import events as ev
from doll.ps.engine.engine import Engine
from doll.ps.engine.state import EngineSettings
from doll.ps.model.updater import ContributionBuffer
from doll.ps.policies import make_policy
from doll.ps.policies.base import Policy
from doll.ps.policies.bsp import LockstepConfig
from doll.ps.policies.doll import DollPolicyConfig
from doll.ps.policies.wsp import WspPolicyConfig
from doll.records.control import (
    AnyRecord,
    Durable,
    Fence,
    Grant,
    Hello,
    Join,
    Nack,
    NewVersion,
    Push,
    PushedBatch,
    Settle,
    Stop,
    Welcome,
)
from doll.storage.blobs import weights_key
from msgspec import structs

# Every policy that is registered where the tests run, with its defaults.
POLICIES: dict[str, PolicyConfig] = {name: policy_section(name)(name=name) for name in registered.names()} | {
    "doll": DollPolicyConfig(group_size=3),
    "doll, sets": DollPolicyConfig(group_size=6),  # as many as one worker may hold
    "wsp": WspPolicyConfig(wave_batches=3, clock_distance=1),
}


@dataclass(frozen=True)
class Applied:
    """One update in the lineage, as the `updates` topic would carry it."""

    term: int
    version: int
    members: tuple[tuple[int, int, int], ...]  # (worker, batch, base version)


def used_version(push: Push, batch: PushedBatch) -> int:
    """The version of the weights that a batch of a push was computed on."""
    return push.version if batch.version < 0 else batch.version


class Ordered:
    """An updater that checks in which order the contributions come: each is the number of its set's first grant."""

    def __init__(self) -> None:
        self.weights = np.zeros(0, np.float32)
        self.num_parameters = 0
        self.clipped_by = 1.0
        self._added: list[float] = []

    def add(self, contribution: Contribution) -> None:
        self._added.append(float(contribution[0]))

    def apply(self, contributions: Sequence[Contribution], scale: float, num_samples: int, into: Any = None) -> None:
        for contribution in contributions:
            self.add(contribution)
        assert self._added == sorted(self._added), "contributions are added in the order of their sets"
        self._added = []

    def max_change(self, contribution: Contribution) -> float:
        return 0.0

    def tensors(self) -> dict[str, Any]:
        return {}

    def load(self, tensors: Mapping[str, Any]) -> None:
        pass


@dataclass
class Process:
    """One worker process: joining until it is welcomed, then a WorkerCore."""

    worker: int
    name: str  # as in `Join.process`
    reads_from: int  # position in its channel of commands
    incarnation: int = 0  # of its machine; 0: nobody numbers them
    core: WorkerCore | None = None
    batcher: Batcher[int] | None = None
    position: int = 0
    computing: deque[Compute] = field(default_factory=deque)
    to_store: deque[StoreRest] = field(default_factory=deque)
    in_set: int = 0  # batches of the first of `computing` that are done and not pushed
    kept: list[tuple[int, int, int]] = field(default_factory=list)  # as in `World.contents`, of the next push
    holds: list[tuple[int, int]] = field(default_factory=list)  # the same by (batch, grant)
    kept_term: int = 0
    held_back: set[int] = field(default_factory=set)  # batches of which a part of the step is only here
    held_before: set[int] = field(default_factory=set)  # as it was before batch `held_batch`
    held_batch: int = -1
    pushed: Push | None = None  # the last that was sent
    cached: tuple[int, int] = (-1, -1)  # term and version of the weights that it has
    offered: tuple[int, int] = (-1, -1)
    link_broken: bool = False  # and it has not sent again what was not answered
    outbox: deque[AnyRecord] = field(default_factory=deque)
    paused: bool = False
    dead: bool = False


class World:
    engine_class: type[Engine] = Engine

    def __init__(
        self, policy: str | PolicyConfig, workers: int = 3, records_per_batch: int = 2, max_pending: int = 6
    ) -> None:
        self.policy = POLICIES[policy] if isinstance(policy, str) else policy
        self.settings = EngineSettings(
            num_workers=workers, records_per_batch=records_per_batch, max_pending_batches=max_pending, lease_s=4.0,
            grant_timeout_s=5.0, checkpoint_every_updates=3, checkpoint_every_s=5.0, stop=StopConfig(),
        )  # fmt: skip
        self.now = 0.0
        self.origins = [10 * (n + 1) for n in range(workers)]
        self.high = list(self.origins)  # next offset to be produced, per stream
        self.commands: list[list[AnyRecord]] = [[] for _ in range(workers)]
        self.blobs: set[str] = set()
        self.lost: set[str] = set()  # weights that the blob store has lost
        self.published: list[int] = []  # versions, of this server
        self.contents: dict[str, tuple[tuple[int, int, int], ...]] = {}  # of each gradient: (worker, batch, version)
        self.completes: dict[str, frozenset[int]] = {}  # of each gradient: batches whose whole step is in with it
        self.whole: list[set[int]] = [set() for _ in range(workers)]  # of each worker: batches whose step is in, wholly
        self.whole_at: dict[int, list[set[int]]] = {}  # by version of the checkpoint
        self.host = ContributionBuffer(Ordered())
        self.updates: list[Applied] = []
        self.terms: list[tuple[int, int]] = []  # (term, resumed version)
        self.stored: ev.EngineSnapshot | None = None
        self.saving: deque[ev.StoreCheckpoint] = deque()
        self.term = 0
        self.engine: Engine | None = None
        self.processes: list[Process] = []
        self.num_processes = 0
        self.launched = [0] * workers  # incarnation of the newest machine of each slot
        self.highest_incarnations = [0] * workers  # the highest incarnation that has joined
        self.acknowledged = list(self.origins)
        self.rolled_back = self.rests = 0
        self.rest_numbers: set[int] = set()
        self.start_ps()
        for n in range(workers):
            self.start_worker(n)

    # --- the parameter server ------------------------------------------------------------------------------------

    def start_ps(self) -> None:
        self.term += 1
        policy = self.make_policy()
        if self.stored is None:
            self.engine = self.engine_class(self.settings, policy, term=self.term, now=self.now, origins=self.origins)
        else:
            self.engine = self.engine_class(self.settings, policy, term=self.term, now=self.now, snapshot=self.stored)
        stored = self.whole_at.get(self.engine.version, self.whole_at.get(0, []))
        self.whole = [set(batches) for batches in stored] or [set() for _ in self.whole]
        self.host = ContributionBuffer(Ordered())
        self.terms.append((self.term, self.engine.version))
        self.highest_incarnations = list(self.engine.snapshot(self.now).incarnations)
        self.saving.clear()
        self.published.clear()
        for process in self.processes:
            process.outbox.clear()  # the new server reads `events` from its end
        for channel in self.commands:
            channel.append(Hello(term=self.term))

    def make_policy(self) -> Policy:
        return make_policy(self.policy)

    def kill_ps(self) -> None:
        self.engine = None
        self.saving.clear()

    def handle(self, event: ev.Event) -> None:
        engine = self.engine
        if engine is None:
            return  # nobody reads; the message is behind the next server's start position
        if isinstance(event, Join):
            self.highest_incarnations[event.worker] = max(self.highest_incarnations[event.worker], event.incarnation)
        queue = deque(engine.handle(event, self.now))
        engine.check_invariants()
        while queue:
            if isinstance(action := queue.popleft(), ev.RollBack):
                self.rolled_back += 1
                self.kill_ps()
                self.start_ps()
                return
            queue.extend(self._perform(engine, action))
        self._tidy(engine)

    def _key(self, version: int) -> str:
        return weights_key("", self.term, version)

    def _tidy(self, engine: Engine) -> None:
        """Keep the newest weights, and older ones while the engine says that a grant names them."""
        unused = [version for version in self.published[:-1] if version not in engine.named_versions]
        self.published = [version for version in self.published if version not in unused]
        self.blobs.difference_update(map(self._key, unused))

    def lose_blobs(self) -> None:
        self.lost |= self.blobs
        self.blobs.clear()

    def _perform(self, engine: Engine, action: ev.EngineAction) -> list[ev.EngineAction]:
        match action:
            case Welcome() | Fence() | Grant() | NewVersion() | Settle() | Durable():
                if isinstance(action, Welcome):
                    (process,) = [p for p in self.processes if p.name == action.process]
                    assert process.incarnation in (0, self.highest_incarnations[action.worker]), (
                        "an older machine gets its slot back"
                    )
                self.commands[action.worker].append(action)
            case ev.SendHello(worker):
                self.commands[worker].append(Hello(term=self.term))
            case ev.PublishWeights(version):
                self.published.append(version)
                self.blobs.add(self._key(version))
            case ev.RepublishWeights(version):
                self.blobs.add(self._key(version))
                self.lost.discard(self._key(version))
            case ev.FetchGradient(grant_id, key, _, in_order):
                there = key in self.blobs
                if there and key.startswith("rest"):
                    self.rest_numbers.add(grant_id)
                if there:
                    self.host.put(grant_id, np.array([grant_id], np.float32), in_order=in_order)
                event = (
                    ev.GradientFetched(grant_id=grant_id, max_change=self.max_change(key))
                    if there
                    else ev.GradientLost(grant_id=grant_id, reason="missing")
                )
                more = engine.handle(event, self.now)
                engine.check_invariants()
                return more
            case ev.DropGradient(key, _):
                self.blobs.discard(key)
            case ev.ApplyUpdate(version=version, sets=sets):
                members = tuple(
                    (item.push.worker, batch.pushed.batch, used_version(item.push, batch.pushed))
                    for item in sets
                    for batch in item.batches
                )
                self.updates.append(Applied(self.term, version, members))
                self.add_up(action)
            case ev.StoreCheckpoint():
                for applied, whole in zip(action.snapshot.applied, self.whole, strict=True):
                    assert not self.policy.filter_threshold or whole == set(range(applied)), (
                        "what is durable is whole, and nothing else is in the model"
                    )
                self.whole_at[action.version] = [set(batches) for batches in self.whole]
                self.saving.append(action)
            case ev.Finish():
                pass
        return []

    def max_change(self, key: str) -> float:
        """How far the contribution of this key moves any one number."""
        return 0.0

    def add_up(self, update: ev.ApplyUpdate) -> None:
        """What the server's host does: the sum is of the update's batches, in the order of its sets."""
        for item in update.sets:
            push = item.push
            for batch in self.completes.get(push.key, ()):
                is_new = batch not in self.whole[push.worker]
                assert is_new or not self.policy.filter_threshold, "a part of a step is in the model twice"
                self.whole[push.worker].add(batch)
            if not push.batches:
                continue
            batches = tuple((push.worker, batch.batch, used_version(push, batch)) for batch in push.batches)
            assert batches == self.contents[item.push.key], "the sum is of these batches and of no other"
        self.host.apply(update)  # refuses what was added too early
        ends = self.engine is not None and self.engine.stopping is not None
        assert ends or self.host._waiting.keys() <= self.rest_numbers, "a gradient that was held is applied"

    def store_checkpoint(self) -> None:
        if self.saving and self.engine is not None:
            order = self.saving.popleft()
            self.stored = order.snapshot
            self.handle(ev.CheckpointStored(version=order.version))

    # --- workers -------------------------------------------------------------------------------------------------

    def start_worker(self, worker: int, incarnation: int = 0) -> None:
        self.num_processes += 1
        process = Process(worker, f"i{self.num_processes}", len(self.commands[worker]), incarnation)
        self.processes.append(process)
        self._ask_for_place(process)

    def launch(self, worker: int) -> None:
        """A new machine for the slot, as the provisioner makes one: beside the old one at first."""
        self.launched[worker] += 1
        self.start_worker(worker, self.launched[worker])

    def _ask_for_place(self, process: Process) -> None:
        join = Join(worker=process.worker, process=process.name, incarnation=process.incarnation)
        process.outbox.append(join)

    def live(self, worker: int) -> list[Process]:
        return [p for p in self.processes if p.worker == worker and not p.dead]

    def kill_worker(self, worker: int) -> None:
        for process in self.live(worker)[:1]:
            process.dead = True

    def send(self, process: Process) -> None:
        self._send_again(process)
        if process.outbox and not process.paused:
            record = process.outbox.popleft()
            if isinstance(record, Push):
                process.pushed = record
            self.handle(record)  # type: ignore[arg-type]

    def receive(self, process: Process) -> None:
        channel = self.commands[process.worker]
        if process.paused or process.dead or process.reads_from >= len(channel):
            return
        record = channel[process.reads_from]
        process.reads_from += 1
        if process.core is None:
            match record:
                case Welcome() if record.process == process.name:
                    process.core = WorkerCore(
                        record,
                        max_pending=self.settings.max_pending_batches,
                        now=self.now,
                        incarnation=process.incarnation,
                    )
                    process.batcher = Batcher(
                        origin=record.origin,
                        records_per_batch=self.settings.records_per_batch,
                        next_batch=record.next_batch,
                    )
                    process.position = process.batcher.next_offset
                case Hello():
                    self._ask_for_place(process)
                case Fence() if record.process == process.name:
                    process.dead = True
        else:
            self._do(process, process.core.on_record(record, self.now))

    def read(self, process: Process) -> None:
        core, batcher = process.core, process.batcher
        if core is None or batcher is None or process.paused or process.dead:
            return
        while core.has_room and process.position < self.high[process.worker]:
            offset = process.position
            process.position += 1
            done = list(batcher.feed([offset], [offset]))
            for raw in done:
                self._do(process, core.batch_ready(Batch(raw.number, None, len(raw.values), self.now)))
            if done:
                return

    def compute(self, process: Process, *, blob_lost: bool = False, end_set: bool = False) -> None:
        """One batch of the set under way; with the last one, or where the set ends early, its blob and its push."""
        core = process.core
        if core is None or process.paused or process.dead:
            return
        if process.to_store:
            self._store_rest(process, process.to_store.popleft())
            return
        if not process.computing:
            return
        grant, batches = process.computing[0].grant, process.computing[0].batches
        if not process.in_set:
            if not core.is_current(grant):
                process.computing.popleft()
                return
            if process.kept_term != grant.term:
                process.kept, process.holds, process.kept_term = [], [], grant.term
                process.held_back, process.held_before, process.held_batch = set(), set(), -1
            process.kept = [item for item in process.kept if item[1] < grant.first]  # the others are computed again
            process.holds = [item for item in process.holds if item[0] < grant.first]
            if grant.first <= process.held_batch:
                process.held_back, process.held_batch = set(process.held_before), -1
            if not self._load_weights(process, grant):
                process.computing.popleft()
                self._do(process, core.weights_missing(grant))
                return
        process.in_set += 1
        count = process.in_set
        size = self.policy.batches_per_push
        goes_on = count < len(batches) and core.is_wanted(grant.term, batches[count].number, grant.grant_ids[count])
        goes_on = goes_on and (size == 1 or batches[count].number % size != 0)
        if goes_on and not end_set and not core.draining:
            return
        process.in_set = 0
        process.computing.popleft()
        if count < len(batches):
            rest = structs.replace(grant, first=grant.first + count, grant_ids=grant.grant_ids[count:])
            process.computing.appendleft(Compute(rest, batches[count:]))
        version = process.cached[1]
        process.kept += ((process.worker, batch.number, version) for batch in batches[:count])
        process.holds += ((batch.number, grant.grant_ids[at]) for at, batch in enumerate(batches[:count]))
        computed = tuple(ComputedBatch(batch.num_samples, 1.0, version=version) for batch in batches[:count])
        if batches[count - 1].number % size == size - 1:
            last = batches[count - 1].number
            process.held_before, process.held_batch = set(process.held_back), last
            process.held_back |= {number for _, number, _ in process.kept}
            holds_back = self.policy.filter_threshold > 0 and last % 4 != 3
            holds = tuple(process.holds)
            key = self._store(process, f"g:{grant.term}:{grant.grant_ids[0]}", lost=blob_lost, whole=not holds_back)
            done = GradientDone(key, version, computed, holds_back=holds_back, holds=holds)
        else:
            done = GradientDone("", version, computed, is_kept=True)
        self._do(process, core.gradient_done(grant, batches, done, self.now))

    def _store(self, process: Process, key: str, *, lost: bool = False, whole: bool = True) -> str:
        """What is kept goes into a blob, and what is held back as well if it is `whole`."""
        if not lost:
            self.blobs.add(key)
        self.contents[key] = tuple(process.kept)
        process.kept, process.holds = [], []
        self.completes[key] = frozenset(process.held_back) if whole else frozenset()
        if whole:
            process.held_back = set()
        return key

    def _store_rest(self, process: Process, order: StoreRest) -> None:
        core = process.core
        assert core is not None
        version = process.cached[1]
        if process.kept:
            process.held_back |= {number for _, number, _ in process.kept}
        elif process.kept_term != order.term:
            process.held_back = set()
        elif order.until <= process.held_batch:
            process.held_back = set(process.held_before)
        self.rests += 1
        holds = tuple(process.holds)
        done = GradientDone(self._store(process, f"rest:{self.rests}"), version, (), holds=holds)
        process.held_batch = -1
        self._do(process, core.rest_stored(order, done))

    def _load_weights(self, process: Process, grant: Grant) -> bool:
        """As `doll.consumers.compute.gradient.CachedVersion`."""
        term, version = process.cached
        is_allowed = term == grant.term and version >= grant.min_version
        offered = process.offered[1] if process.offered[0] == grant.term else -1
        if is_allowed and offered <= version:
            return True
        for source in (offered, grant.version) if offered > grant.version else (grant.version,):
            if weights_key("", grant.term, source) in self.blobs and not (is_allowed and source <= version):
                process.cached = (grant.term, source)
                return True
        is_granted = self.engine is not None and grant.term == self.term and grant.grant_ids[0] in self.engine._grants
        assert is_allowed or not is_granted or grant.key in self.lost, "the weights of a grant live until its answer"
        return is_allowed

    def break_link(self, worker: int, lost: int = -1) -> None:
        """The channel of grants and pushes breaks: of what is on its way, the messages are lost whose bit is set in
        `lost`; then both sides send again what is not answered."""
        number = 0
        channel, processes = self.commands[worker], [p for p in self.live(worker) if p.core is not None]
        for at in range(min((p.reads_from for p in processes), default=len(channel)), len(channel)):
            if isinstance(channel[at], Grant | NewVersion | Settle):
                if lost >> number & 1:
                    channel[at] = Stop(term=0, reason="lost")  # of no server: nobody reads it
                number += 1
        for process in processes:
            for record in [record for record in process.outbox if isinstance(record, Push | Nack)]:
                if lost >> number & 1:
                    process.outbox.remove(record)
                number += 1
            process.link_broken = True
            self._send_again(process)
        self.handle(ev.GrantsLost(worker=worker))

    def _send_again(self, process: Process) -> None:
        """A process that is frozen learns of the break when it goes on."""
        if process.link_broken and process.core is not None and not process.paused and not process.dead:
            process.link_broken = False
            self._do(process, process.core.resend())

    def spoil_push(self, process: Process) -> None:
        """The next push of this process also names a batch of an earlier one."""
        self.compute(process, end_set=True)
        for at, record in enumerate(process.outbox):
            if isinstance(record, Push) and process.pushed is not None and record.session == process.pushed.session:
                batches = (*process.pushed.batches[-1:], *record.batches)
                process.outbox[at] = structs.replace(record, batches=batches)
                return

    def reorder(self, process: Process) -> None:
        """Two pushes of this process change places, where it has two sets to compute."""
        self.compute(process, end_set=True)
        self.compute(process, end_set=True)
        at = [at for at, record in enumerate(process.outbox) if isinstance(record, Push)][:2]
        if len(at) == 2:
            process.outbox[at[0]], process.outbox[at[1]] = process.outbox[at[1]], process.outbox[at[0]]

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for process in self.processes:
            if process.core is not None and not process.dead and not process.paused:
                self._do(process, process.core.tick(self.now))
            elif process.core is None and not process.dead and not process.paused and not process.outbox:
                self._ask_for_place(process)
        self.handle(ev.Tick())

    def leave(self, process: Process) -> None:
        if process.core is not None and not process.dead:
            process.core.drain()
            if (rest := process.core.rest) is not None:
                self._store_rest(process, rest)
            self._do(process, list(process.core.leave("sigterm")))
            while process.outbox:
                self.handle(process.outbox.popleft())  # type: ignore[arg-type]
            process.dead = True

    def _do(self, process: Process, actions: Sequence[object]) -> None:
        for action in actions:
            match action:
                case Send(record):
                    process.outbox.append(record)
                case Compute():
                    process.computing.append(action)
                case StoreRest():
                    process.to_store.append(action)
                case OfferWeights(weights):
                    process.offered = max(process.offered, (weights.term, weights.version))
                case Acknowledge(until):
                    lo = self.origins[process.worker] + until * self.settings.records_per_batch
                    # Kafka's committed offset never runs ahead of the durable model.
                    assert self.stored is not None
                    assert until <= self.stored.applied[process.worker]
                    self.acknowledged[process.worker] = max(self.acknowledged[process.worker], lo)
                case Exit(code, _):
                    process.dead = True
                    if code:
                        self.start_worker(process.worker, process.incarnation)

    # --- the end ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """No more faults: everybody alive and one process per worker; run until nothing moves any more."""
        if self.engine is None:
            self.start_ps()
        for worker in range(self.settings.num_workers):
            for process in self.live(worker):
                process.paused = False
        quiet_s = 0
        for _ in range(1500):
            before = len(self.updates)
            for worker in range(self.settings.num_workers):
                if not self.live(worker):  # as a supervisor would, or the provisioner
                    self.start_worker(worker, self.launched[worker])
            for _ in range(12):
                for process in list(self.processes):
                    self.send(process)
                    self.receive(process)
                    self.read(process)
                    self.compute(process)
                self.store_checkpoint()
            quiet_s = quiet_s + 1 if before == len(self.updates) and self._idle() else 0
            if quiet_s > 40:  # longer than every lease and repetition
                return
            self.tick(1.0)
        raise AssertionError("the world does not come to rest")

    def _idle(self) -> bool:
        assert self.engine is not None
        quiet = all(
            not p.outbox and not p.computing and p.reads_from >= len(self.commands[p.worker])
            for p in self.processes
            if not p.dead
        )
        kept = sum(len(process.kept) for process in self.processes if not process.dead)
        is_durable = self.engine.durable_version == self.engine.version
        return quiet and self.engine.num_computing in (0, kept) and is_durable

    def lineage(self) -> list[Applied]:
        """The updates that are in the model: the updates before which no later server started."""
        valid: dict[int, Applied] = {}
        for update in self.updates:
            void = any(term > update.term and resumed < update.version for term, resumed in self.terms)
            if not void:
                assert update.version not in valid
                valid[update.version] = update
        assert sorted(valid) == list(range(1, len(valid) + 1))
        return [valid[version] for version in sorted(valid)]

    def check_ledger(self) -> None:
        """Every batch of the lineage once, each stream a prefix, groups of one version and of the right size."""
        assert self.engine is not None
        applied = [0] * self.settings.num_workers
        for update in self.lineage():
            for worker, batch, base in update.members:
                assert batch == applied[worker], f"worker {worker}: batch {batch} applied, {applied[worker]} expected"
                applied[worker] += 1
                if self.engine.policy.exact_version:
                    assert base == update.version - 1
                assert base < update.version
            size = self.policy.batches_per_update(self.settings.num_workers)
            assert (not self.policy.filter_threshold) <= len(update.members) <= size  # rests are updates without any
            may_shrink = isinstance(self.policy, LockstepConfig) or self.policy.batches_per_push > 1
            assert len(update.members) == size or may_shrink, "others cannot shrink"
        assert tuple(applied) == self.engine.snapshot(self.now).applied
