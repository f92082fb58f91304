"""Messages of Kafka and of a control link overtake one another (ADR 0026): each case of its table, then any order."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from doll.consumers.protocol.worker_core import Compute, Send, WorkerCore
from doll.ps.engine import events as ev
from doll.ps.policies.doll import DollPolicyConfig
from doll.records.control import (
    AnyRecord,
    Durable,
    Grant,
    Hello,
    Join,
    Leave,
    Nack,
    NewVersion,
    Push,
    Stop,
    Welcome,
)
from engine_runs import play, random_steps
from engine_world import POLICIES, Process, World
from fuzzing import examples, seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from record_builders import announce

pytestmark = pytest.mark.slow  # loads torch

GROUP = 2


class Pair:
    """One worker and the server; the test says which message arrives next.

    Attributes:
        computed: how often each batch's gradient was computed, by any process.
    """

    def __init__(self, batches: int = GROUP) -> None:
        self.world = World(DollPolicyConfig(group_size=GROUP), workers=1)
        self.world.high[0] += batches * self.world.settings.records_per_batch
        (self._newest,) = self.world.live()
        self.talk()

    @property
    def process(self) -> Process:
        """The newest one, dead or not."""
        self._newest = next(reversed(self.world.live()), self._newest)
        return self._newest

    @property
    def core(self) -> WorkerCore:
        return self.process.protocol

    @property
    def counters(self) -> Counter[str]:
        return self.world.engine.counters

    def read_all(self) -> None:
        while self.core.has_room and self.process.position < self.world.high[0]:
            self.world.read(self.process)

    def send_all(self) -> None:
        while self.process.outbox:
            self.world.send(self.process)

    def receive_all(self) -> None:
        while not self.process.is_dead and self.process.reads_from < len(self.world.commands[0]):
            self.world.receive_next(self.process)

    def talk(self) -> None:
        """All messages on their way arrive, in order; no gradient is computed."""
        process = self.process
        for _ in range(5):
            self.send_all()
            self.receive_all()
            if process.is_dead:
                return
            if self.process.core is not None:
                self.read_all()

    def unread(self, kind: type) -> Any:
        """The only record of this type that the worker has not received."""
        (record,) = [item for item in self.world.commands[0][self.process.reads_from :] if isinstance(item, kind)]
        return record

    def take(self, kind: type) -> Any:
        """As `unread`, which does not arrive by Kafka."""
        record = self.unread(kind)
        at = next(at for at, item in enumerate(self.world.commands[0]) if item is record)
        del self.world.commands[0][at]
        return record

    def deliver(self, record: AnyRecord) -> list[Any]:
        """`record` arrives at the worker by its link, before what Kafka has for it."""
        actions = self.core.on_record(record, self.world.now)
        self.world.do(self.process, actions)
        return list(actions)

    def compute_all(self) -> None:
        while self.process.orders:
            self.world.compute(self.process)

    def outgoing(self, kind: type) -> Any:
        """The only record of this type that the worker has sent and the server has not received; taken out."""
        (record,) = [item for item in self.process.outbox if isinstance(item, kind)]
        self.process.outbox.remove(record)
        return record

    def finish(self, updates: int = 1) -> None:
        """Nothing is lost and nothing is applied twice."""
        self.world.settle()
        self.world.check_ledger()
        assert len(self.world.lineage()) == updates


@pytest.fixture
def granted() -> Pair:
    """The worker has one grant of both batches and has begun it."""
    pair = Pair()
    assert len(pair.process.orders) == 1
    assert len(pair.process.first_order.batches) == GROUP
    return pair


# --- to the worker --------------------------------------------------------------------------------------------------


def test_a_grant_before_the_welcome_of_its_session_is_ignored_and_comes_again(granted: Pair) -> None:
    world = granted.world
    world.kill_server()
    world.start_server()
    granted.receive_all()  # Hello
    granted.send_all()  # the Join
    late = granted.take(Welcome)
    early = structs.replace(
        granted.process.first_order.grant, term=late.term, session=late.session + 1, grant_ids=(1, 2)
    )
    assert granted.deliver(early) == []
    granted.deliver(late)
    granted.process.orders.clear()
    granted.talk()
    assert granted.process.first_order.grant.session == late.session
    granted.finish()


def test_a_hello_that_a_grant_overtakes_takes_the_grant_back_and_the_join_brings_it_again() -> None:
    pair = Pair(batches=0)
    world = pair.world
    world.high[0] += GROUP * world.settings.records_per_batch
    world.commands[0].append(Hello(term=world.term))
    pair.read_all()
    pair.send_all()
    (compute,) = pair.deliver(pair.take(Grant))
    assert isinstance(compute, Compute)
    pair.receive_all()  # the Hello
    assert not pair.core.busy
    assert any(isinstance(item, Join) for item in pair.process.outbox)
    pair.finish()


def with_a_checkpoint() -> tuple[Pair, Grant]:
    """The first group is durable; its Durable is not read, and the grant of the second group is on its way."""
    pair = Pair(batches=2 * GROUP)
    pair.compute_all()
    pair.send_all()
    pair.world.tick(10.0)
    pair.world.store_checkpoint()
    grant = pair.take(Grant)
    return pair, grant


def test_a_grant_that_overtakes_a_durable_is_computed() -> None:
    pair, grant = with_a_checkpoint()
    assert pair.unread(Durable).until == {0: GROUP}
    assert grant.first == GROUP
    assert any(isinstance(action, Compute) for action in pair.deliver(grant))
    pair.receive_all()
    assert pair.core.served[pair.core.worker].reported_durable == GROUP
    assert pair.core.is_current(grant)
    pair.finish(updates=2)


def test_a_durable_that_overtakes_the_grant_behind_it_is_the_same() -> None:
    pair, grant = with_a_checkpoint()
    pair.receive_all()  # the Durable
    assert any(isinstance(action, Compute) for action in pair.deliver(grant))
    pair.finish(updates=2)


def test_a_durable_that_overtakes_the_repetition_of_an_old_grant_makes_it_void(granted: Pair) -> None:
    grant = granted.process.first_order.grant
    granted.compute_all()
    granted.send_all()
    granted.world.tick(10.0)
    granted.world.store_checkpoint()
    granted.receive_all()
    assert granted.core.served[granted.core.worker].reported_durable == GROUP
    (action,) = granted.deliver(grant)
    assert isinstance(action, Send)
    assert isinstance(action.record, Nack)
    granted.finish()


@pytest.mark.parametrize("kafka_first", [False, True])
def test_a_grant_by_kafka_and_again_by_the_link_is_computed_once_with_a_push_between(kafka_first: bool) -> None:
    pair = Pair(batches=0)
    world = pair.world
    world.high[0] += GROUP * world.settings.records_per_batch
    pair.read_all()
    pair.send_all()
    by_kafka = pair.unread(Grant)
    world.handle(ev.GrantsLost(worker=0))  # the worker has attached
    by_link = world.commands[0].pop()
    assert isinstance(by_link, Grant)
    assert by_link.grant_ids == by_kafka.grant_ids, "the same numbers"
    if kafka_first:
        pair.receive_all()
    else:
        pair.deliver(by_link)
    world.compute(pair.process, end_set=True)  # a push of the first batch, and the second is under way
    if kafka_first:
        pair.deliver(by_link)
    else:
        pair.receive_all()
    pushes = [item for item in pair.process.outbox if isinstance(item, Push)]
    assert [[batch.batch for batch in push.batches] for push in pushes] == [[0], [0]], "answered, and answered again"
    assert pair.process.first_order.grant.first == 1, "what is under way is not begun again"
    pair.send_all()
    assert pair.counters["refused_duplicate"] == 1
    pair.finish()
    assert world.engine.counters["requeued_timeout"] == 0


def test_a_stop_by_kafka_ends_a_worker_whatever_its_link_brings(granted: Pair) -> None:
    grant = granted.process.first_order.grant
    granted.world.commands[0].append(Stop(term=granted.world.term, reason="updates: 1 reached"))
    granted.receive_all()
    assert granted.process.is_dead
    assert granted.core.on_record(grant, 0.0) == [], "the grant was there before"


def test_a_stop_of_an_earlier_server_ends_nothing(granted: Pair) -> None:
    assert granted.deliver(Stop(term=granted.world.term - 1, reason="signal")) == []


# --- to the server --------------------------------------------------------------------------------------------------


def test_a_push_before_a_repeated_announcement_of_its_batch_counts(granted: Pair) -> None:
    announced = announce(0, granted.core.session, 0, GROUP)
    granted.compute_all()
    granted.world.handle(granted.outgoing(Push))
    granted.world.handle(announced)
    assert len(granted.world.updates) == 1
    granted.finish()


def test_a_push_that_overtakes_the_announcement_of_the_next_batches_counts() -> None:
    pair = Pair()
    pair.world.high[0] += GROUP * pair.world.settings.records_per_batch
    pair.read_all()
    pair.core.tick(pair.world.now)
    pair.world.do(pair.process, pair.core._announce_all())
    pair.compute_all()
    pair.world.handle(pair.outgoing(Push))
    assert len(pair.world.updates) == 1
    pair.finish(updates=2)


def test_a_leave_before_the_last_push_gives_the_batches_back_and_the_push_is_refused(granted: Pair) -> None:
    process = granted.process
    granted.compute_all()
    push = granted.outgoing(Push)
    granted.core.drain()
    (leave,) = granted.core.leave("sigterm")
    assert isinstance(leave, Send)
    assert isinstance(leave.record, Leave)
    granted.world.handle(leave.record)
    granted.world.handle(push)
    assert granted.world.updates == []
    assert granted.counters["refused_not_joined"] + granted.counters["refused_fenced"] == 1
    granted.world.end(process)
    granted.finish()


def test_a_push_before_the_durable_of_its_predecessor_counts() -> None:
    """The server has stored a checkpoint and its Durable is on its way, while the next push comes by the link."""
    pair = Pair(batches=2 * GROUP)
    pair.world.tick(3.0)
    pair.compute_all()
    pair.send_all()
    pair.receive_all()  # the second grant
    pair.world.tick(3.0)
    pair.world.store_checkpoint()
    assert pair.unread(Durable).until == {0: GROUP}
    pair.compute_all()
    pair.world.handle(pair.outgoing(Push))
    assert len(pair.world.updates) == 2
    pair.receive_all()
    assert pair.core.served[pair.core.worker].reported_durable == GROUP
    pair.finish(updates=2)


def test_a_worker_that_attaches_again_within_a_set_goes_on_with_it(granted: Pair) -> None:
    world = granted.world
    world.compute(granted.process)
    assert granted.process.in_set == 1
    world.break_link(0, lost=-1)
    granted.receive_all()  # the grant again
    assert granted.process.in_set == 1
    assert len(granted.process.orders) == 1, "it is not begun a second time"
    world.compute(granted.process)
    granted.send_all()
    assert len(world.updates) == 1
    assert granted.counters["grants_sent_again"] == 1
    granted.finish()


@pytest.mark.parametrize("nack_first", [True, False])
def test_a_nack_by_the_new_link_and_the_grants_that_were_lost_in_both_orders(granted: Pair, nack_first: bool) -> None:
    world = granted.world
    world.lose_blobs()  # the weights
    world.compute(granted.process)
    nack = granted.outgoing(Nack)
    assert nack.reason == "weights"
    if nack_first:
        world.handle(nack)
        world.handle(ev.GrantsLost(worker=0))
    else:
        world.handle(ev.GrantsLost(worker=0))
        world.handle(nack)
    assert granted.counters["requeued_nack_weights"] == GROUP
    granted.talk()
    granted.compute_all()
    granted.send_all()
    assert len(world.updates) == 1
    granted.finish()


# --- any order ------------------------------------------------------------------------------------------------------


class TwoChannels(World):
    """Grants, versions, pushes and Nacks have a channel of their own, in order, which may be ahead of Kafka's."""

    def __init__(self, policy: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.overtaken: Counter[str] = Counter()
        super().__init__(policy)

    def send(self, process: Process) -> None:
        at = next((at for at, item in enumerate(process.outbox) if isinstance(item, Push | Nack)), 0)
        if at and not process.paused and process.core is not None and self.random.random() < 0.5:
            record = process.outbox[at]
            if isinstance(record, Push | Nack) and record.session == process.core.session:
                self.overtaken.update(type(item).__name__ for item in list(process.outbox)[:at])
                del process.outbox[at]
                process.outbox.appendleft(record)
        super().send(process)

    def receive_next(self, process: Process) -> None:
        channel, begin = self.commands[process.worker], process.reads_from
        alone = len(self.processes[process.worker]) == 1
        if alone and process.core is not None and self.random.random() < 0.5:
            unread = range(begin, len(channel))
            at = next((at for at in unread if isinstance(channel[at], Grant | NewVersion)), begin)
            record = channel[at] if at < len(channel) else None
            if at > begin and self._is_of_its_link(process, record):
                self.overtaken.update(type(item).__name__ for item in channel[begin:at])
                channel.insert(begin, channel.pop(at))
        super().receive_next(process)

    def _is_of_its_link(self, process: Process, record: AnyRecord | None) -> bool:
        """The worker attached with the session of its last Welcome, to the server of that term."""
        core = process.core
        if core is None or not isinstance(record, Grant | NewVersion) or record.term != core.term:
            return False
        return isinstance(record, NewVersion) or record.session == core.session


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(50, 3000))
def test_every_batch_is_applied_once_whatever_overtakes_what(policy: str, seed: int, length: int) -> None:
    world = TwoChannels(policy, seed)
    play(world, random_steps(seed, length))
    world.settle()
    world.check_ledger()


@pytest.mark.slow
def test_the_random_runs_overtake_what_the_table_names() -> None:
    seen: Counter[str] = Counter()
    for seed in seeds(40):
        world = TwoChannels("asp" if seed % 2 else "doll, sets", seed)
        play(world, random_steps(seed, 3000))
        seen += world.overtaken
    expected = {"Welcome", "Hello", "Durable", "Announce", "Alive"}
    assert expected <= set(seen), expected - set(seen)
