"""A real job whose control links are used, cut and lost in mid-run: nothing is lost, nothing is counted twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doll.records.control import ServerStatus
from doll.services import CONTROL_ENV
from doll.storage.blobs import key_prefix
from job_rig import MakePipeline

from doll_lab.drill.plan import Cut
from doll_lab.drill.relay import Relays

pytestmark = pytest.mark.integration


def kinds(status: ServerStatus) -> set[str]:
    return {worker.control for worker in status.workers}


def test_a_job_learns_every_sample_once_over_kafka_alone(make_pipeline: MakePipeline) -> None:
    """The other channels are those of the tests below."""
    job = make_pipeline("control.kind=kafka", "stop.updates=60")
    job.start()
    job.send(job.samples(480))
    job.until_version(10)
    job.until_status(lambda status: kinds(status) == {"kafka"}, "links over Kafka")
    job.send(job.samples(1200))
    job.until_finished()
    job.assert_audit_ok()


def test_streams_that_vanish_again_and_again_cost_nothing_but_time(
    make_pipeline: MakePipeline, redis_client: Any
) -> None:
    job = make_pipeline("control.kind=redis", "stop.updates=120", "worker.grant_timeout_s=60")
    job.start()

    def linked(times: int) -> Callable[[ServerStatus], bool]:
        # The count, too: the last status may be older than the links that have just broken.
        return lambda status: kinds(status) == {"redis"} and status.counters["control_redis"] >= 2 * times

    for round_number in range(3):
        job.until_status(linked(round_number + 1), "links over Redis")
        job.send(job.samples(480))
        job.until_version(30 * round_number + 5)
        for key in redis_client.keys(f"{key_prefix(job.scope)}:control:*"):
            redis_client.delete(key)
        job.until_version(30 * round_number + 20)
    job.until_status(lambda status: status.counters["control_broken"] >= 3, "the server's account of it")
    job.send(job.samples(1600))
    job.until_finished()
    job.assert_audit_ok()
    assert job.counters().get("requeued_timeout", 0) == 0, "what is unanswered is sent again, not waited for"


def test_a_socket_that_is_cut_again_and_again_costs_nothing_but_time(
    make_pipeline: MakePipeline, tmp_path: Path
) -> None:
    job = make_pipeline("control.kind=local", "stop.updates=130", "worker.grant_timeout_s=60")
    tmp_path.chmod(0o700)
    paths = {name: tmp_path / f"{name}.sock" for name in ("ps", "worker-1")}

    def through(spec: Any) -> Any:
        path = paths.get(spec.name, paths["ps"])
        return dataclasses.replace(spec, env={**spec.env, CONTROL_ENV: str(path)})

    with Relays() as relays:
        relay = relays.open_unix(paths["worker-1"], paths["ps"])
        for spec in (job.spec("ps", "ps_role"), *(job.spec(f"worker-{n}", "worker_role", n) for n in (0, 1))):
            job.supervisor.start(through(spec))
        cuts: tuple[Cut, ...] = ("silent", "reset", "silent", "reset")
        for round_number, cut in enumerate(cuts):
            job.until_status(lambda status: kinds(status) == {"local"}, "links over the socket")
            job.send(job.samples(480))
            job.until_version(30 * round_number + 10)
            relay.start_cut(cut)
            job.until_version(30 * round_number + 20)
            job.until_status(lambda status: kinds(status) == {"local", "kafka"}, "a fall-back")
            relay.restore()
        job.send(job.samples(1600))
        job.until_finished()
    job.assert_audit_ok()
    assert job.counters().get("requeued_timeout", 0) == 0, "what is unanswered is sent again, not waited for"


def test_killed_servers_and_workers_find_each_other_again_on_the_socket(make_pipeline: MakePipeline) -> None:
    job = make_pipeline("control.kind=local", "stop.updates=150")
    job.start()
    for version, name in ((10, "worker-0"), (25, "ps"), (40, "worker-1"), (55, "ps")):
        job.send(job.samples(480))
        job.until_version(version)
        job.kill(name)
        job.until_version(version + 5)
        job.until_status(lambda status: kinds(status) == {"local"}, "links over the socket")
    job.send(job.samples(1600))
    job.until_finished()
    job.assert_audit_ok()
