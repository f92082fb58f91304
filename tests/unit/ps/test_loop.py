"""The server's loop: what it does with records, signals and pauses, without Kafka."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from doll.errors import CheckpointError, FencedError
from doll.process.health import Heartbeat
from doll.ps.channels.control_channel import ControlChannel, Incoming
from doll.ps.engine.events import GrantsLost, StopRequested, TopicGrew
from doll.ps.server import ParameterServer, Signals, deliver, serve
from doll.records.control import Join, Leave, Nack, Stop, encode

pytestmark = pytest.mark.slow  # loads torch

LEASE_S = 5.0


class Channel:
    """Values from Kafka, or from all channels, as the test lists them; each poll takes the time that the test says."""

    def __init__(self) -> None:
        self.values: deque[list[bytes | None]] = deque()
        self.incoming: deque[Incoming] = deque()
        self.undelivered: deque[int] = deque()
        self.flushes = 0
        self.on_poll: Callable[[], object] = lambda: None

    def poll(self, timeout_s: float) -> Incoming:
        self.on_poll()
        if self.incoming:
            return self.incoming.popleft()
        return Incoming([], [], self.values.popleft() if self.values else [])

    def had_traffic(self) -> bool:
        return True

    def flush(self, timeout_s: float) -> int:
        self.flushes += 1
        return self.undelivered.popleft() if self.undelivered else 0


class Engine:
    def __init__(self) -> None:
        self.finished: str | None = None
        self.stopping: str | None = None
        self.start = SimpleNamespace(origins=(0, 0))
        self.counters: Counter[str] = Counter()
        self.version = 3


class Server:
    """Finishes after so many periodic turns."""

    def __init__(self, turns: int) -> None:
        self.engine = Engine()
        self.turns = turns
        self.fed: list[Any] = []
        self.prefetched: list[list[Any]] = []
        self.waits: dict[Any, int] = {}  # how often the gradient of an event is not there yet
        self.saved = 0
        self.checked = 0
        self.store_error: Exception | None = None

    def prefetch(self, events: list[Any]) -> None:
        self.prefetched.append(events)

    def waits_for(self, event: Any) -> bool:
        if self.waits.get(event, 0) <= 0:
            return False
        self.waits[event] -= 1
        return True

    def feed(self, event: Any) -> None:
        self.fed.append(event)

    def run_periodic(self) -> None:
        self.turns -= 1
        if self.turns <= 0:
            self.engine.finished = "enough"

    def save_now(self) -> None:
        self.saved += 1

    def stop_if_superseded(self) -> None:
        self.checked += 1
        if self.store_error is not None:
            raise self.store_error


class Rig:
    def __init__(self, turns: int = 3) -> None:
        self.server, self.channel = Server(turns), Channel()
        self.signals = object.__new__(Signals)  # without its handlers
        self.heartbeat = Heartbeat("ps")
        self.now = 100.0

    def serve(self) -> None:
        serve(
            cast(ParameterServer, self.server),
            cast(ControlChannel, self.channel),
            self.signals,
            LEASE_S,
            self.heartbeat,
        )

    def deliver(self) -> None:
        deliver(cast(ControlChannel, self.channel), self.signals, self.heartbeat)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    made = Rig()
    monkeypatch.setattr("doll.ps.server.time.monotonic", lambda: made.now)
    return made


def test_records_reach_the_server_in_order_until_it_has_finished(rig: Rig) -> None:
    joins = [Join(worker=worker, process="i") for worker in range(3)]
    rig.channel.values.extend([[encode(joins[0]), encode(joins[1])], [], [encode(joins[2])], [encode(joins[0])]])
    rig.serve()
    assert rig.server.fed == joins
    assert [events for events in rig.server.prefetched if events] == [joins[:2], joins[2:]]
    assert rig.server.saved == 0


def test_what_comes_while_a_gradient_is_on_its_way_waits_behind_it_and_is_read_ahead(rig: Rig) -> None:
    joins = [Join(worker=worker, process="i") for worker in range(3)]
    rig.server.waits[joins[0]] = 3
    rig.channel.values.extend([[encode(joins[0])], [encode(joins[1])], [], [encode(joins[2])]])
    turns: list[int] = []
    rig.channel.on_poll = lambda: turns.append(rig.server.turns)
    rig.serve()
    assert rig.server.fed == joins
    assert rig.server.prefetched[:2] == [joins[:1], joins[1:2]]
    assert turns[:4] == [3, 3, 3, 3], "no lease may run out while its renewal waits"


def test_what_is_due_is_done_now_and_then_while_some_gradient_is_always_on_its_way(rig: Rig) -> None:
    join = Join(worker=0, process="i")
    rig.server.waits[join] = 1_000_000
    rig.channel.values.append([encode(join)])

    def pass_time() -> None:
        rig.now += 0.4

    rig.channel.on_poll = pass_time
    rig.serve()
    assert rig.now == pytest.approx(100.0 + 3 * 3 * 0.4), "every third turn of the loop"
    assert rig.server.fed == []


def test_links_come_before_kafka_and_a_changed_channel_between_them(rig: Rig) -> None:
    """The last push of a worker that leaves came on its link; what it had not answered before is sent again."""
    nack = Nack(worker=1, session=7, batch=0, term=1, grant_id=3, reason="weights")
    leave = Leave(worker=1, session=7, cause="test")
    rig.channel.incoming.append(Incoming([nack], [1], [encode(leave)]))
    rig.serve()
    assert rig.server.fed == [nack, GrantsLost(worker=1), leave]


@pytest.mark.parametrize("value", [b"garbage", None, encode(Stop(term=1, reason="not a record of this topic"))])
def test_what_does_not_belong_on_the_topic_is_counted_and_skipped(rig: Rig, value: bytes | None) -> None:
    join = Join(worker=0, process="i")
    rig.channel.values.append([value, encode(join)])
    rig.serve()
    assert rig.server.fed == [join]
    assert rig.server.engine.counters["refused_record"] == 1


def test_sigint_asks_for_the_end_of_the_job(rig: Rig) -> None:
    rig.signals.end_job = True
    rig.serve()
    assert rig.server.fed[0] == StopRequested(reason="interrupted")


def test_sigterm_saves_and_leaves_without_ending_the_job(rig: Rig) -> None:
    rig.signals.leave = True
    rig.serve()
    assert (rig.server.saved, rig.channel.flushes, rig.server.turns) == (1, 1, 3)
    assert rig.server.engine.finished is None


def test_the_store_is_asked_for_a_successor_once_a_lease(rig: Rig) -> None:
    rig.server.turns = 12

    def pass_time() -> None:
        rig.now += 1.0

    rig.channel.on_poll = pass_time
    rig.serve()
    assert rig.server.checked == 2  # after 6 s and after 12 s


def test_a_store_that_does_not_answer_is_asked_again(rig: Rig) -> None:
    rig.server.turns, rig.server.store_error = 12, CheckpointError("no answer")

    def pass_time() -> None:
        rig.now += 1.0

    rig.channel.on_poll = pass_time
    rig.serve()
    assert rig.server.checked == 2


@pytest.mark.parametrize("error", [CheckpointError("no answer"), FencedError("term 2 has claimed the job")])
def test_a_server_that_paused_beyond_its_lease_writes_nothing_before_the_store_answers(
    rig: Rig, error: Exception
) -> None:
    rig.server.store_error = error
    rig.channel.values.append([encode(Join(worker=0, process="i"))])

    def pause() -> None:
        rig.now += 2 * LEASE_S

    rig.channel.on_poll = pause
    with pytest.raises(type(error)):
        rig.serve()
    assert rig.server.fed == []


def test_the_last_records_are_waited_for(rig: Rig) -> None:
    rig.channel.undelivered.extend([3, 2, 0, 5])
    rig.deliver()
    assert rig.channel.flushes == 3


def test_sigterm_ends_the_wait_for_the_last_records(rig: Rig) -> None:
    rig.channel.undelivered.extend([3] * 10)
    rig.signals.leave = True
    rig.deliver()
    assert rig.channel.flushes == 1


def test_partitions_that_were_added_are_told_to_the_engine_once() -> None:
    rig = Rig(turns=6)
    looks = iter([2, 2, 4, 4, 3, 4])  # as many as it began with; a broker that does not know of all yet
    rig.channel.on_poll = lambda: rig.signals.note_partitions(next(looks))
    rig.serve()
    assert rig.server.fed == [TopicGrew(partitions=4)]


def test_a_job_that_ends_takes_up_no_partition() -> None:
    rig = Rig(turns=2)
    rig.server.engine.stopping = "updates"
    rig.signals.note_partitions(4)
    rig.serve()
    assert rig.server.fed == []
