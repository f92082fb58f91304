"""What limits a job, by what the server knows; and what `doll status` says of it."""

from __future__ import annotations

from typing import Any

import pytest
from doll.config import parse
from doll.config.policy import policy_section
from doll.monitor.state.limit_text import limit_text
from doll.monitor.views.prometheus import server_samples
from doll.ps.engine.engine import Engine
from doll.ps.engine.limit import STANDS_S, LimitWatch, limit_of
from doll.ps.engine.settings import EngineSettings
from doll.ps.policies import make_policy
from doll.records.control import Alive, Announce, BatchRange, Join, Limit
from statuses import live_worker, server_status

SIZE = 10  # records per batch


class Rig:
    """Three workers with four partitions each; nobody computes but who is granted something."""

    def __init__(self, policy: str, partitions: int = 12, **values: Any) -> None:
        settings = EngineSettings(
            num_workers=3, records_per_batch=SIZE, max_pending_batches=100, lease_s=1e9, grant_timeout_s=1e9,
            checkpoint_every_updates=10**9, checkpoint_every_s=1e9,
        )  # fmt: skip
        section = policy_section(policy)(name=policy, **values)
        self.engine = Engine(settings, make_policy(section), term=1, now=0.0, origins=(0,) * partitions)
        for worker in range(3):
            self.engine.handle(Join(worker=worker, process=f"p{worker}"), 0.0)

    def announce(self, partition: int, batches: int = 3) -> None:
        worker = self.engine.worker(partition % 3)
        runs = (BatchRange(partition, 0, batches),)
        self.engine.handle(Announce(worker=worker.number, session=worker.session, runs=runs), 0.0)

    def unread(self, worker: int, lag: int, *most: tuple[int, int]) -> None:
        session = self.engine.worker(worker).session
        self.engine.handle(Alive(worker=worker, session=session, lag=lag, most_unread=most), 0.0)


def test_a_worker_without_records_that_the_others_wait_for() -> None:
    rig = Rig("bsp")
    for partition in (0, 1):
        rig.announce(partition)
    for worker in (0, 1):
        rig.engine._grants.hold(pushed_of(rig.engine, worker))
    rig.engine._report_changes()
    assert limit_of(rig.engine) == Limit(kind="dry", worker=2, partitions=(2, 5, 8, 11), num_partitions=4)
    rig.unread(2, 5, (5, 5))
    assert limit_of(rig.engine) is None, "a part of a batch is there"


def pushed_of(engine: Engine, worker: int) -> Any:
    from doll.ps.engine.batch_queue import PushedSet
    from pushes import push_of

    grants = tuple(engine.worker(worker).queue.computing_grants)
    push = push_of(
        worker=worker, session=1, batch=0, term=1, grant_id=grants[0].number, version=0, key="", n_samples=1,
        loss_sum=1.0,
    )  # fmt: skip
    pushed = PushedSet(push, grants, 0.0)
    for grant in grants:
        grant.pushed = pushed
    return pushed


def test_a_slow_worker_that_the_others_wait_for() -> None:
    rig = Rig("ssp", staleness=0)
    for partition in range(3):
        rig.announce(partition, 5)
    assert limit_of(rig.engine) is None, "it is the turn of all"
    for worker, batch_s in ((0, 0.1), (1, 0.1), (2, 0.3)):
        rig.engine.worker(worker).batch_s = batch_s
    assert limit_of(rig.engine) == Limit(kind="slow", worker=2, num_partitions=4)


def test_a_partition_with_most_of_the_unread_records() -> None:
    rig = Rig("asp")
    rig.announce(7)
    rig.unread(0, 60, (3, 30), (6, 30))
    rig.unread(1, 900, (7, 880), (4, 20))
    expected = Limit(kind="partition", worker=1, partitions=(7,), num_partitions=4, unread=960, share=880 / 960)
    assert limit_of(rig.engine) == expected
    rig.unread(0, 2000, (3, 500), (6, 500), (0, 500))
    assert limit_of(rig.engine) is None, "it has less than half"
    rig.announce(0)
    rig.announce(2)
    assert limit_of(rig.engine) == Limit(kind="workers", unread=2900)


def test_nothing_limits_a_job_that_keeps_up() -> None:
    rig = Rig("asp")
    assert limit_of(rig.engine) is None
    for partition in range(3):
        rig.announce(partition)
        rig.unread(partition, 2 * SIZE, (partition, 2 * SIZE))
    assert limit_of(rig.engine) is None


def test_it_is_reported_once_it_has_lasted() -> None:
    rig, watch = Rig("asp"), LimitWatch()
    rig.announce(7)
    rig.unread(1, 900, (7, 880))
    assert watch.observe(rig.engine, 10.0) is None
    assert watch.observe(rig.engine, 10.0 + STANDS_S) is not None
    rig.unread(1, 900, (4, 880))
    assert watch.observe(rig.engine, 11.0 + STANDS_S) is None, "another partition"


def test_workers_that_wait_for_weights_most_of_the_time_are_not_what_limits_a_job() -> None:
    rig, watch = Rig("asp"), LimitWatch()
    for partition in range(3):
        rig.announce(partition)
        rig.unread(partition, 500, (partition, 100))
    kinds = []
    for second, (computing_s, idle_s) in enumerate([(1.0, 9.0), (2.0, 18.0), (3.0, 27.0), (4.0, 36.0), (5.0, 45.0)]):
        limit = watch.observe(rig.engine, 3.0 * second, computing_s=computing_s, idle_s=idle_s)
        kinds.append(None if limit is None else (limit.kind, round(limit.share, 2)))
    assert kinds == [None, *[("updates", 0.1)] * 4]
    assert watch.observe(rig.engine, 20.0, computing_s=10.0, idle_s=45.0) is None
    limit = watch.observe(rig.engine, 24.0, computing_s=15.0, idle_s=45.0)
    assert limit == Limit(kind="workers", unread=1500)


CONFIG = parse("job: j\ntask: {class: 'a:B'}\ndata: {workers: 3, partitions: 12}\n")


@pytest.mark.parametrize(
    ("item", "parts"),
    [
        (
            Limit(kind="dry", worker=2, partitions=(5, 9), num_partitions=2),
            ("wait for worker 2, whose partitions 5, 9 have no records (policy doll", "doll scale"),
        ),
        (
            Limit(kind="dry", worker=2, partitions=tuple(range(8)), num_partitions=100),
            ("partitions 0, 1, 2, 3, 4, 5, 6, 7 and 92 more have no records",),
        ),
        (Limit(kind="slow", worker=1, num_partitions=4), ("wait for worker 1, which takes 0.3 s for a batch",)),
        (
            Limit(kind="partition", worker=1, partitions=(7,), num_partitions=4, unread=12345, share=0.9),
            ("partition 7 has 90% of the 12,345 unread", "worker 1 computes without pause", "its 3 other partitions"),
        ),
        (
            Limit(kind="partition", worker=1, partitions=(7,), num_partitions=1, unread=12345, share=0.9),
            ("more workers do not help; spread its keys",),
        ),
        (
            Limit(kind="updates", unread=99, share=0.11),
            ("99 records are unread, and the workers compute 11% of the time",),
        ),
        (Limit(kind="workers", unread=99), ("all 3 workers compute without pause", "doll scale, up to 12")),
    ],
)
def test_it_is_said_in_one_line_with_the_remedy(item: Limit, parts: tuple[str, ...]) -> None:
    workers = [live_worker(number, batch_s=0.3, partitions=4) for number in range(3)]
    text = limit_text(CONFIG, server_status(workers, limit=item))
    assert "\n" not in text
    for part in parts:
        assert part in text


def test_nothing_is_said_of_a_job_that_nothing_limits() -> None:
    assert limit_text(CONFIG, None) == limit_text(CONFIG, server_status()) == ""


def test_prometheus_has_the_kind_and_the_place() -> None:
    item = Limit(kind="partition", worker=1, partitions=(7,), num_partitions=4, unread=10, share=0.9)
    (sample,) = (item for item in server_samples(server_status(limit=item)) if "doll_ps_limit" in item.name)
    assert (dict(sample.labels), sample.value) == ({"kind": "partition", "worker": "1", "partition": "7"}, 0.9)
    item = Limit(kind="workers", unread=10)
    (sample,) = (item for item in server_samples(server_status(limit=item)) if "doll_ps_limit" in item.name)
    assert (dict(sample.labels), sample.value) == ({"kind": "workers", "worker": "", "partition": ""}, 1.0)
