"""What every kind of control link must do, with the real socket or a real Redis."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from control_rig import ON_REDIS, SESSION, TERM, Rig, Server, Worker, grant, push, run, welcome
from doll.consumers.channels.control_link import ControlLink
from doll.control.link_state import PING_EVERY_S, SILENCE_S
from doll.records.control import (
    Alive,
    AnyRecord,
    Attach,
    Attached,
    Durable,
    Nack,
    NewVersion,
)
from waiting import WAIT_TIMEOUT_S

pytestmark = pytest.mark.slow  # starts servers


def test_grants_and_pushes_arrive_in_order_and_both_ends_know_of_the_link(rig: Rig) -> None:
    server, worker = rig.start_server(), rig.worker()

    async def scenario(worker: Worker, until: Any) -> None:
        assert not worker.link.send(push(0)), "there is no link yet"
        assert not server.links.send(0, grant(0))
        await worker.attach(server, until)
        assert (worker.changes, server.changed) == ([rig.kind], [0])
        assert server.links.kinds() == {0: rig.kind}
        grants = [grant(number) for number in range(50)]
        new_version = NewVersion(term=TERM, worker=0, version=2, key="w")
        assert all(server.links.send(0, item) for item in grants)
        assert server.links.send(0, new_version)
        pushes = [push(number, dead=tuple(range(10**9, 10**9 + 50_000 * (number == 3)))) for number in range(50)]
        nack = Nack(worker=0, session=SESSION, batch=1, term=TERM, grant_id=1, reason="weights")
        assert all(worker.link.send(item) for item in pushes)
        assert worker.link.send(nack)
        await until(lambda: len(worker.records) > 50 and len(server.records) > 50)
        assert worker.records == [*grants, new_version]
        assert server.records == [*pushes, nack]

    run(scenario, worker, server)


def test_a_process_of_another_session_is_refused_until_it_is_welcomed(rig: Rig) -> None:
    server, worker = rig.start_server(), rig.worker()
    server.welcome(session=SESSION + 1)

    async def scenario(worker: Worker, until: Any) -> None:
        worker.link.welcome(welcome(endpoints=server.links.endpoints))
        await until(lambda: server.links.counters["refused_attach"])
        assert (worker.changes, server.changed) == ([], [])
        worker.link.welcome(server.welcome(session=SESSION + 1))
        await until(lambda: worker.changes)

    run(scenario, worker, server)


def test_a_welcome_of_a_later_process_ends_the_link_of_the_earlier_one(rig: Rig) -> None:
    server, worker = rig.start_server(), rig.worker()

    async def scenario(worker: Worker, until: Any) -> None:
        await worker.attach(server, until)
        server.welcome(session=SESSION + 1)
        assert server.links.kinds() == {}
        assert not server.links.send(0, grant(1, session=SESSION + 1)), "nobody of this session is attached"
        await until(lambda: worker.changes == [rig.kind, "kafka"])
        assert server.changed == [0, 0]

    run(scenario, worker, server)


def test_a_later_link_of_a_process_replaces_its_earlier_one(rig: Rig) -> None:
    """The worker noticed first that the earlier one was broken."""
    server, worker = rig.start_server(), rig.worker()

    async def scenario(worker: Worker, until: Any) -> None:
        raw = rig.raw()
        await worker.attach(server, until)
        raw.send(Attach(worker=0, session=SESSION, term=TERM), time.monotonic())
        await until(lambda: len(worker.changes) == 2)
        assert server.changed[:2] == [0, 0]
        raw.close()

    run(scenario, worker, server)


def test_the_links_of_a_server_end_with_it_and_the_next_one_is_found(rig: Rig) -> None:
    first, worker = rig.start_server(), rig.worker()

    async def scenario(worker: Worker, until: Any) -> None:
        late = await worker.attach(first, until)
        rig.close()
        second = rig.start_server(TERM + 1)
        await until(lambda: worker.changes == [rig.kind, "kafka"], second)
        assert not worker.link.send(push(0))
        worker.link.welcome(second.welcome())
        await until(lambda: worker.changes == [rig.kind, "kafka", rig.kind], second)
        assert not worker.link.send(push(0)), "a push of the earlier term is not for this server"
        worker.link.welcome(late)  # the first server was suspended, not dead
        assert worker.link.send(msgspec.structs.replace(push(0), term=TERM + 1))

    run(scenario, worker, first)


@pytest.mark.usefixtures("_no_second_attempt")
def test_a_new_server_that_ends_the_link_to_the_old_one_is_attached_to_at_once(rig: Rig) -> None:
    first, worker = rig.start_server(), rig.worker()
    rig.attached(first).close()  # it listens: the worker's only attempt succeeds
    rig.path = rig.path.with_name("new")
    second = rig.start_server(TERM + 1)
    rig.attached(second).close()

    async def scenario(worker: Worker, until: Any) -> None:
        await worker.attach(first, until)
        worker.link.welcome(second.welcome())  # the old server still answers: nothing else ends its link
        await until(lambda: len(worker.changes) == 3)
        assert worker.changes == [rig.kind, "kafka", rig.kind]
        assert worker.link.send(msgspec.structs.replace(push(0), term=TERM + 1))
        await until(lambda: second.records)

    run(scenario, worker, first, second)


def test_a_worker_that_leaves_closes_its_link(rig: Rig) -> None:
    server, worker = rig.start_server(), rig.worker()

    async def scenario(worker: Worker, until: Any) -> None:
        await worker.attach(server, until)
        worker.link.send(push(1))
        worker.link.close("leaving")
        await until(lambda: server.changed == [0, 0])
        assert server.records == [push(1)]

    run(scenario, worker, server)


def test_a_silent_worker_loses_its_link_and_a_ping_keeps_it(rig: Rig) -> None:
    server, worker = rig.start_server(), rig.worker()

    async def scenario(worker: Worker, until: Any) -> None:
        await worker.attach(server, until)
        kept_s = time.monotonic() + 1.5 * SILENCE_S
        await until(lambda: time.monotonic() > kept_s)
        assert server.links.kinds() == {0: rig.kind}
        server.clock.ahead_s = SILENCE_S + PING_EVERY_S
        server.links.poll(0.0)
        assert server.links.kinds() == {}

    run(scenario, worker, server)


@pytest.mark.parametrize(
    "record",
    [
        Durable(term=TERM, worker=0, until={0: 3}, batches=3),
        grant(1),
        push(1, worker=1),
        Alive(worker=0, session=SESSION),
        Attach(worker=0, session=SESSION, term=TERM),
    ],
)
def test_what_does_not_belong_on_a_link_ends_it_and_is_counted(rig: Rig, record: AnyRecord) -> None:
    server = rig.start_server()
    raw = rig.attached(server)
    deadline_s = time.monotonic() + WAIT_TIMEOUT_S
    raw.send(record, time.monotonic())
    while server.links.kinds() and time.monotonic() < deadline_s:
        server.poll()
    assert server.links.kinds() == {}
    assert server.records == []
    assert server.changed == [0, 0]
    assert server.links.counters["control_refused"] + server.links.counters["refused_attach"] == 1
    raw.close()


def test_a_link_of_another_run_is_refused_by_the_server(rig: Rig) -> None:
    """Term and session of two runs of one job name are alike: both servers are the first of their run."""
    rig.servers.append(server := Server(rig.kind, rig.services, rig.path, run_id="aa"))
    made = msgspec.structs.replace(server.welcome(), run_id="bb")

    async def scenario(worker: Worker, until: Any) -> None:
        worker.link.welcome(made)
        await until(lambda: server.links.counters["refused_attach"])
        assert (worker.changes, server.links.kinds(), server.records) == ([], {}, [])

    run(scenario, rig.worker(), server)


def test_a_server_of_another_run_that_answers_is_refused_by_the_worker(rig: Rig) -> None:
    """The server does not compare runs; the worker does."""
    rig.servers.append(server := Server(rig.kind, rig.services, rig.path, run_id="aa"))
    refused: list[int] = []
    worker = Worker(ControlLink(rig.services, rig.kind, on_refused=refused.append))

    def answer_anybody(peer: Any, record: Attach) -> None:
        peer.link.send(Attached(term=TERM, worker=0, session=SESSION, run_id="aa"), server.clock())

    server.links._attach = answer_anybody  # type: ignore[method-assign]

    async def scenario(worker: Worker, until: Any) -> None:
        worker.link.welcome(msgspec.structs.replace(server.welcome(), run_id="bb"))
        await until(lambda: refused)
        assert (worker.changes, worker.link.kind_in_use) == ([], "kafka")

    run(scenario, worker, server)


@ON_REDIS
def test_two_runs_of_one_job_name_on_one_redis_keep_to_themselves(rig: Rig) -> None:
    rig.servers += (
        (mine := Server("redis", rig.services, rig.path, run_id="aa")),
        (other := Server("redis", rig.services, rig.path, run_id="bb")),
    )
    assert mine.links.endpoints != other.links.endpoints
    other.welcome()  # worker 0 of the other run has the same session

    async def scenario(worker: Worker, until: Any) -> None:
        await worker.attach(mine, until)
        assert worker.link.send(push(1))
        await until(lambda: mine.records)
        assert (mine.records, mine.links.kinds()) == ([push(1)], {0: "redis"})
        assert (other.records, other.links.kinds(), dict(other.links.counters)) == ([], {}, {})

    run(scenario, rig.worker(), mine, other)
