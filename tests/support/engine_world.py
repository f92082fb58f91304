"""The world of `doll_lab.simulation.world` with streams, symbolic blobs, crashes, and channels that a test moves.

Each channel is FIFO, as Kafka's partitions are; which channel moves next is the test's choice. Nothing sleeps.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from doll.config import StopConfig
from doll.config.policy import POLICIES as registered
from doll.config.policy import PolicyConfig, policy_section
from doll.consumers.intake.batching import PartitionBatcher
from doll.consumers.protocol.grants import part_of
from doll.consumers.protocol.worker_core import (
    Batch,
    Compute,
    ComputedBatch,
    GradientDone,
    StoreRest,
)
from doll.optim.optimizer import Updater
from doll.ps.engine import events as ev
from doll.ps.engine.engine import Engine
from doll.ps.engine.settings import EngineSettings
from doll.ps.model.updater import ContributionBuffer
from doll.ps.policies import make_policy
from doll.ps.policies.base import Policy
from doll.ps.policies.bsp import LockstepConfig
from doll.ps.policies.diloco import DilocoPolicyConfig
from doll.ps.policies.doll import DollPolicyConfig
from doll.ps.policies.essp import EsspPolicyConfig
from doll.ps.policies.ssp import SspPolicyConfig
from doll.ps.policies.wsp import WspPolicyConfig
from doll.records.control import (
    Alive,
    AnyRecord,
    Grant,
    Join,
    Nack,
    NewVersion,
    Push,
    PushedBatch,
    Settle,
    Stop,
    Welcome,
)
from doll.records.event_times import EventTimes
from doll.storage.blobs import weights_key
from engine_invariants import check_engine
from msgspec import structs

from doll_lab.simulation import world as worlds

# Every policy that is registered where the tests run, with its defaults.
POLICIES: dict[str, PolicyConfig] = {name: policy_section(name)(name=name) for name in registered.names()} | {
    "doll": DollPolicyConfig(group_size=3),
    "doll, sets": DollPolicyConfig(group_size=6),  # as many as one worker may hold
    "doll, recent": DollPolicyConfig(group_size=2, staleness=1),
    "ssp, ahead": SspPolicyConfig(staleness=3, under_way=4),
    "essp, ahead": EsspPolicyConfig(staleness=3, under_way=4),
    "wsp": WspPolicyConfig(wave_batches=3, clock_distance=1),
    "diloco": DilocoPolicyConfig(local_batches=3, quorum=0.6, grace_s=1.0),
    "diloco, sparse": DilocoPolicyConfig(local_batches=3, quorum=0.6, grace_s=1.0, density=0.3),
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


class Ordered(Updater):
    """An updater that checks in which order the contributions come: each is the number of its set's first grant."""

    def __init__(self) -> None:
        self.num_parameters = 0
        self._added: list[float] = []

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        return np.zeros(0, np.float32)

    def weight(self, set_weight: float, age: int) -> float:
        assert age >= 0, "weights are older than the update, or as old"
        return 1.0

    def add(self, contribution: Any) -> None:
        self._added.append(float(contribution[0]))

    def apply(
        self, contributions: Sequence[Any], scale: float, weight: float, into: Any = None, absent: int = 0,
        lr_factor: float = 1.0, ema_factor: float = 1.0,
    ) -> None:  # fmt: skip
        for contribution in contributions:
            self.add(contribution)
        assert self._added == sorted(self._added), "contributions are added in the order of their sets"
        self._added = []

    def _apply_sum(self, scale: float, weight: float, target: Any, absent: int, lr_factor: float) -> None:
        raise NotImplementedError

    def tensors(self) -> dict[str, Any]:
        return {}

    def load(self, tensors: Mapping[str, Any]) -> None:
        pass


class Process(worlds.Process):
    """One worker process, its end of the channels, and its share of the blobs.

    Attributes:
        reads_from: position in its worker's channel of commands.
        in_set: batches of the first order that are computed and not pushed.
        kept: as in `World.contents`, of the next push; `holds`: the same by (batch, grant).
        there: of each batch that it has computed, by its worker's number: the partition's.
        held_back: batches, by the partition's numbers, of which a part of the step is only here.
        held_before: as `held_back` was before batch `held_batch`.
        pushed: the last push that was sent.
        cached, offered: term and version of the weights that it has, and of the newest that it was sent.
        link_broken: and it has not sent again what was not answered.
    """

    def __init__(self, worker: int, name: str, incarnation: int, reads_from: int) -> None:
        super().__init__(worker, name, incarnation)
        self.reads_from = reads_from
        self.batcher: PartitionBatcher[int] | None = None
        self.position = self.in_set = self.kept_term = 0
        self.kept: list[tuple[int, int, int]] = []
        self.holds: list[tuple[int, int]] = []
        self.there: dict[int, int] = {}
        self.held_back: set[int] = set()
        self.held_before: set[int] = set()
        self.held_batch = -1
        self.pushed: Push | None = None
        self.cached = self.offered = (-1, -1)
        self.outbox: deque[AnyRecord] = deque()
        self.link_broken = self.paused = False

    @property
    def can_work(self) -> bool:
        """It has its place, and is neither frozen nor gone."""
        return self.core is not None and not self.paused and not self.is_dead

    def offer(self, weights: NewVersion) -> None:
        self.offered = max(self.offered, (weights.term, weights.version))


class World(worlds.World[Process]):
    """Symbolic blobs, a channel of commands for each worker, and whatever goes wrong between them.

    Attributes:
        high: of each stream: the next offset to be produced.
        commands: of each worker: all that any server has sent.
        lost: weights that the blob store has lost.
        published: versions, of this server.
        contents: of each gradient: its (worker, batch, version).
        completes: of each gradient: the batches whose whole step is in the model with it.
        whole: of each worker: the batches whose step is in the model, wholly; `whole_at`: by version of the checkpoint.
        launched: of each slot: the number of its newest machine.
        highest_incarnations: of each slot: the highest number that has joined.
        share_cut: of the batches that are read and may be cut; `cut_rng` draws which.
    """

    engine_class: type[Engine] = Engine

    def after_event(self) -> None:
        check_engine(self.engine)

    @property
    def can_hold_back(self) -> bool:
        """Workers may hold back a part of their steps; a test may change the policy."""
        return self.policy.filter_threshold > 0 or self.policy.sparse_push is not None

    def __init__(
        self, policy: str | PolicyConfig, workers: int = 3, records_per_batch: int = 2, max_pending: int = 6
    ) -> None:
        super().__init__(
            workers, make_engine=self._make_engine, make_process=self._make_process, max_pending=max_pending
        )
        self.policy = POLICIES[policy] if isinstance(policy, str) else policy
        self.settings = EngineSettings(
            num_workers=workers, records_per_batch=records_per_batch, max_pending_batches=max_pending, lease_s=4.0,
            grant_timeout_s=5.0, checkpoint_every_updates=3, checkpoint_every_s=5.0, stop=StopConfig(),
        )  # fmt: skip
        self.share_cut, self.cut_rng = 0.0, random.Random(workers)
        self.origins = [10 * (n + 1) for n in range(workers)]
        self.high = list(self.origins)
        self.commands: list[list[AnyRecord]] = [[] for _ in range(workers)]
        self.blobs: set[str] = set()
        self.lost: set[str] = set()
        self.published: list[int] = []
        self.contents: dict[str, tuple[tuple[int, int, int], ...]] = {}
        self.completes: dict[str, frozenset[int]] = {}
        self.whole: list[set[int]] = [set() for _ in range(workers)]
        self.whole_at: dict[int, list[set[int]]] = {}
        self.host = ContributionBuffer(Ordered())
        self.updates: list[Applied] = []
        self.terms: list[tuple[int, int]] = []  # (term, resumed version)
        self.stored: ev.EngineSnapshot | None = None
        self.saving: deque[ev.StoreCheckpoint] = deque()
        self.launched = [0] * workers
        self.highest_incarnations = [0] * workers
        self.rests = 0
        self.rest_numbers: set[int] = set()
        self.start_server()
        for n in range(workers):
            self.start_process(n)

    # --- the parameter server ------------------------------------------------------------------------------------

    def _make_engine(self) -> Engine:
        start = {"origins": self.origins} if self.stored is None else {"snapshot": self.stored}
        return self.engine_class(self.settings, self.make_policy(), term=self.term, now=self.now, **start)

    def make_policy(self) -> Policy:
        return make_policy(self.policy)

    def start_server(self) -> None:
        for process in self.live():
            process.outbox.clear()  # the new server reads `events` from its end
        self.saving.clear()
        self.published.clear()
        super().start_server()
        self.whole = [set(batches) for batches in self.whole_at.get(self.engine.version, [()] * len(self.whole))]
        self.host = ContributionBuffer(Ordered())
        self.terms.append((self.term, self.engine.version))
        self.highest_incarnations = list(self.engine.snapshot(self.now).incarnations)

    def kill_server(self) -> None:
        self.is_serving = False
        self.saving.clear()

    def handle(self, event: ev.Event) -> None:
        if isinstance(event, Join):
            self.highest_incarnations[event.worker] = max(self.highest_incarnations[event.worker], event.incarnation)
        super().handle(event)
        if self.is_serving:
            self._tidy()
            self.check_held()

    def check_held(self) -> None:
        """What the host keeps is what the engine holds: it applies or drops the rest."""
        held = {grant.pushed.number for grant in self.engine._grants._standing.values() if grant.held and grant.pushed}
        ends = self.engine.stopping is not None
        assert ends or self.host._waiting.keys() <= held | self.rest_numbers, "a gradient that was held is applied"

    def _key(self, version: int) -> str:
        return weights_key("", self.term, version)

    def _tidy(self) -> None:
        """Keep the newest weights, and older ones while the engine says that a grant names them."""
        unused = [version for version in self.published[:-1] if version not in self.engine.named_versions]
        self.published = [version for version in self.published if version not in unused]
        self.blobs.difference_update(map(self._key, unused))

    def lose_blobs(self) -> None:
        self.lost |= self.blobs
        self.blobs.clear()

    def perform(self, action: ev.EngineAction) -> ev.Event | None:
        match action:
            case Welcome():
                (process,) = [p for p in self.processes[action.worker] if p.name == action.process]
                assert process.incarnation in (0, self.highest_incarnations[action.worker]), (
                    "an older machine gets its slot back"
                )
            case ev.PublishWeights(version):
                self.published.append(version)
                self.blobs.add(self._key(version))
            case ev.RepublishWeights(version):
                self.blobs.add(self._key(version))
                self.lost.discard(self._key(version))
            case ev.FetchGradient(grant_id, key, _, in_order):
                if key not in self.blobs:
                    return ev.GradientLost(grant_id=grant_id, reason="missing")
                if key.startswith("rest"):
                    self.rest_numbers.add(grant_id)
                self.host.put(grant_id, np.array([grant_id], np.float32), in_order=in_order)
                return ev.GradientFetched(grant_id=grant_id, max_change=self.max_change(key))
            case ev.DropGradient(key, _, held):
                self.blobs.discard(key)
                if held:
                    self.host.drop(held)
            case ev.ApplyUpdate(version=version, sets=sets):
                members = tuple(
                    (batch.partition, batch.number, used_version(item.push, batch.pushed))
                    for item in sets
                    for batch in item.batches
                )
                self.updates.append(Applied(self.term, version, members))
                self.add_up(action)
            case ev.StoreCheckpoint():
                for applied, whole in zip(action.snapshot.applied, self.whole, strict=True):
                    assert not self.can_hold_back or whole == set(range(applied)), (
                        "what is durable is whole, and nothing else is in the model"
                    )
                self.whole_at[action.version] = [set(batches) for batches in self.whole]
                self.saving.append(action)
                return None  # it takes time
        return super().perform(action)

    def max_change(self, key: str) -> float:
        """How far the contribution of this key moves any one number."""
        return 0.0

    def add_up(self, update: ev.ApplyUpdate) -> None:
        """What the server's host does: the sum is of the update's batches, in the order of its sets."""
        for item in update.sets:
            push = item.push
            for batch in self.completes.get(push.key, ()):
                is_new = batch not in self.whole[push.worker]
                assert is_new or not self.can_hold_back, "a part of a step is in the model twice"
                self.whole[push.worker].add(batch)
            if not push.batches:
                continue
            batches = tuple((push.worker, batch.batch, used_version(push, batch)) for batch in push.batches)
            assert batches == self.contents[item.push.key], "the sum is of these batches and of no other"
        self.host.apply(update)  # refuses what was added too early

    def store_checkpoint(self) -> None:
        if self.saving and self.is_serving:
            order = self.saving.popleft()
            self.stored = order.snapshot
            self.handle(ev.CheckpointStored(version=order.version))

    # --- the links -----------------------------------------------------------------------------------------------

    def to_server(self, process: Process, record: AnyRecord) -> None:
        process.outbox.append(record)

    def to_worker(self, worker: int, record: AnyRecord) -> None:
        self.commands[worker].append(record)

    def send(self, process: Process) -> None:
        """The next record of a process arrives at the server."""
        self._send_again(process)
        if process.outbox and not process.paused:
            record = process.outbox.popleft()
            if isinstance(record, Push):
                process.pushed = record
            self.handle(record)  # type: ignore[arg-type]

    def receive_next(self, process: Process) -> None:
        """The next command arrives at a process."""
        channel = self.commands[process.worker]
        if not process.paused and not process.is_dead and process.reads_from < len(channel):
            process.reads_from += 1
            self.receive(process, channel[process.reads_from - 1])

    def break_link(self, worker: int, lost: int = -1) -> None:
        """The channel of grants and pushes breaks: of what is on its way, the messages are lost whose bit is set in
        `lost`; then both sides send again what is not answered."""
        number = 0
        channel, processes = self.commands[worker], [p for p in self.processes[worker] if p.core is not None]
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
        if process.link_broken and process.can_work:
            process.link_broken = False
            self.do(process, process.protocol.resend())

    # --- workers -------------------------------------------------------------------------------------------------

    def _make_process(self, worker: int, name: str, incarnation: int) -> Process:
        return Process(worker, name, incarnation, len(self.commands[worker]))

    def launch(self, worker: int) -> None:
        """A new machine for the slot, as the provisioner makes one: beside the old one at first."""
        self.launched[worker] += 1
        self.start_process(worker, self.launched[worker])

    def kill_worker(self, worker: int) -> None:
        for process in self.processes[worker][:1]:
            self.end(process)

    def end(self, process: Process, code: int = 0) -> None:
        super().end(process, code)
        if code:
            self.start_process(process.worker, process.incarnation)

    def receive(self, process: Process, record: AnyRecord) -> None:
        was_waiting = process.core is None
        super().receive(process, record)
        if was_waiting and process.core is not None:
            self.serve(process)

    def serve(self, process: Process) -> None:
        """A process reads its stream from the first batch that is not durable."""
        self.begin_to_read(process, process.protocol.served[process.worker].origin)

    def begin_to_read(self, process: Process, origin: int) -> None:
        """`origin`: offset of batch 0."""
        served = process.protocol.served[process.worker]
        process.batcher = PartitionBatcher(
            origin=origin,
            records_per_batch=self.settings.records_per_batch,
            next_batch=served.next_batch,
            cuts=served.cuts,
        )
        process.position = process.batcher.next_offset

    def acknowledge(self, process: Process, partition: int, until: int) -> None:
        """Kafka's committed offset never runs ahead of the durable model."""
        assert self.stored is not None
        assert until <= self.stored.applied[partition]

    def read(self, process: Process) -> None:
        core, batcher = process.core, process.batcher
        if core is None or batcher is None or not process.can_work:
            return
        while core.has_room and process.position < self.high[process.worker]:
            offset = process.position
            process.position += 1
            done = list(batcher.feed([offset], [offset]))
            if self.share_cut and self.cut_rng.random() < self.share_cut:
                done += [raw for raw in [batcher.cut()] if raw is not None]
            for raw in done:
                offsets = tuple(raw.offsets)
                times = self.times_of(process.worker, offsets)
                held_out = self.held_out_of(process.worker, offsets)
                batch = Batch(
                    raw.number, offsets, len(offsets) - len(held_out), self.now, partition=process.worker, times=times,
                    held_out=held_out,
                )  # fmt: skip
                self.do(process, core.batch_ready(batch))
            if done:
                return

    def held_out_of(self, partition: int, offsets: Sequence[int]) -> tuple[int, ...]:
        """Those of a batch's records that the job does not learn."""
        return ()

    def times_of(self, partition: int, offsets: Sequence[int]) -> EventTimes | None:
        """The event times of these records."""
        return None

    def compute(self, process: Process, *, blob_lost: bool = False, end_set: bool = False) -> None:
        """One batch of the set under way; with the last one, or where the set ends early, its blob and its push."""
        if not process.can_work or not process.orders:
            return
        core, order = process.protocol, process.orders[0]
        if isinstance(order, StoreRest):
            process.orders.popleft()
            self._store_rest(process, order)
            return
        grant, batches = order.grant, order.batches
        if not process.in_set:
            if (begun := core.begin(grant)) is None:
                process.orders.popleft()
                return
            self._begin_set(process, begun)
            if not self._load_weights(process, begun):
                process.orders.popleft()
                self.do(process, core.weights_missing(grant))
                return
        process.in_set += 1
        count = process.in_set
        size = self.policy.batches_per_push
        goes_on = count < len(batches) and core.is_wanted(grant.term, batches[count].number, grant.grant_ids[count])
        goes_on = goes_on and (size == 1 or batches[count].number % size != 0)
        if goes_on and not end_set and not core.draining:
            return
        process.in_set = 0
        process.orders.popleft()
        if count < len(batches):
            process.orders.appendleft(Compute(part_of(grant, count), batches[count:]))
        version = process.cached[1]
        process.kept += ((process.worker, batch.number, version) for batch in batches[:count])
        process.there |= {batch.number: batch.number_in_partition for batch in batches[:count]}
        process.holds += ((batch.number, grant.grant_ids[at]) for at, batch in enumerate(batches[:count]))
        computed = tuple(ComputedBatch(batch.num_samples, 1.0, version=version) for batch in batches[:count])
        if batches[count - 1].number % size == size - 1:
            last = batches[count - 1].number
            process.held_before, process.held_batch = set(process.held_back), last
            process.held_back |= {process.there[number] for _, number, _ in process.kept}
            holds_back = self.can_hold_back and last % 4 != 3
            holds = tuple(process.holds)
            key = self._store(process, f"g:{grant.term}:{grant.grant_ids[0]}", lost=blob_lost, whole=not holds_back)
            done = GradientDone(key, version, computed, holds_back=holds_back, holds=holds)
        else:
            done = GradientDone("", version, computed, is_kept=True)
        self.do(process, core.gradient_done(grant, batches, done, self.now))

    def _begin_set(self, process: Process, grant: Grant) -> None:
        """What is kept and held back of batches from the grant's first one on is computed again."""
        if process.kept_term != grant.term:
            process.kept, process.holds, process.kept_term = [], [], grant.term
            process.held_back, process.held_before, process.held_batch = set(), set(), -1
        process.kept = [item for item in process.kept if item[1] < grant.first]
        process.holds = [item for item in process.holds if item[0] < grant.first]
        if grant.first <= process.held_batch:
            process.held_back, process.held_batch = set(process.held_before), -1

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
        version = process.cached[1]
        kept = process.kept, process.holds
        if stays := order.until and self.policy.sparse_push is not None:  # the rest goes without it
            process.kept, process.holds = [], []
        if process.kept:
            process.held_back |= {process.there[number] for _, number, _ in process.kept}
        elif process.kept_term != order.term:
            process.held_back = set()
        elif order.until <= process.held_batch:
            process.held_back = set(process.held_before)
        self.rests += 1
        holds = tuple(process.holds)
        done = GradientDone(self._store(process, f"rest:{self.rests}"), version, (), holds=holds)
        process.held_batch = -1
        if stays:
            process.kept, process.holds = kept
        self.do(process, process.protocol.rest_stored(order, done))

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
        is_granted = self.is_serving and grant.term == self.term and grant.grant_ids[0] in self.engine._grants._standing
        if is_granted and self.engine.policy.takes_later_weights:  # or until two later grants are on their way
            is_granted = grant.version in self.engine.named_versions
        assert is_allowed or not is_granted or grant.key in self.lost, "the weights of a grant live until its answer"
        return is_allowed

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
        for process in self.live():
            if process.can_work:
                self.do(process, process.protocol.tick(self.now))
            elif process.core is None and not process.paused and not process.outbox:
                self.to_server(process, process.join())
        self.handle(ev.Tick())

    def pass_time_limit(self) -> None:
        """Time passes that is too long for any answer, and everybody is heard of."""
        self.now += self.settings.grant_timeout_s + 1.0
        for process in self.live():
            if process.can_work:
                self.handle(Alive(worker=process.worker, session=process.protocol.session))
        self.handle(ev.Tick())

    def lose_answer(self, process: Process) -> None:
        """The time limit of a grant passes whose weights are lost; then the link breaks, and the Nack is lost on it."""
        for _ in range(20):
            if not (process.orders or process.is_dead):
                self.send(process)
                self.receive_next(process)
                self.read(process)
        self.lose_blobs()
        self.compute(process)
        self.pass_time_limit()
        self.break_link(process.worker)

    def leave(self, process: Process) -> None:
        if process.core is not None and not process.is_dead:
            process.core.drain()
            if (rest := process.core.rest) is not None:
                self._store_rest(process, rest)
            self.do(process, process.core.leave("sigterm"))
            while process.outbox:
                self.handle(process.outbox.popleft())  # type: ignore[arg-type]
            self.end(process)

    # --- the end ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """No more faults: everybody alive and one process per worker; run until nothing moves any more."""
        if not self.is_serving:
            self.start_server()
        for process in self.live():
            process.paused = False
        quiet_s = 0
        for _ in range(1500):
            before = len(self.updates)
            for worker in range(self.settings.num_workers):
                if not self.processes[worker]:  # as a supervisor would, or the provisioner
                    self.start_process(worker, self.launched[worker])
            for _ in range(12):
                for process in self.live():
                    self.send(process)
                    self.receive_next(process)
                    self.read(process)
                    self.compute(process)
                self.store_checkpoint()
            quiet_s = quiet_s + 1 if before == len(self.updates) and self._idle() else 0
            if quiet_s > 40:  # longer than every lease and repetition
                return
            self.tick(1.0)
        raise AssertionError("the world does not come to rest")

    def _idle(self) -> bool:
        quiet = all(not p.outbox and not p.orders and p.reads_from >= len(self.commands[p.worker]) for p in self.live())
        kept = sum(len(process.kept) for process in self.live())
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
        applied = [0] * self.settings.num_workers
        for update in self.lineage():
            for worker, batch, base in update.members:
                assert batch == applied[worker], f"worker {worker}: batch {batch} applied, {applied[worker]} expected"
                applied[worker] += 1
                if self.engine.policy.exact_version:
                    assert base == update.version - 1
                assert base < update.version
            size = self.policy.batches_per_update(self.settings.num_workers)
            staleness = self.policy.staleness if isinstance(self.policy, DollPolicyConfig) else 0
            assert (not self.can_hold_back) <= len(update.members)  # rests are updates without any
            more = self.settings.num_workers - 1 if staleness else 0  # a group that has waited takes all that has come
            assert len(update.members) <= size + more
            if staleness:
                assert update.version - 1 - min(base for _, _, base in update.members) <= staleness
            may_shrink = isinstance(self.policy, LockstepConfig) or self.policy.batches_per_push > 1
            assert len(update.members) >= size or may_shrink, "others cannot shrink"
        assert tuple(applied) == self.engine.snapshot(self.now).applied
