"""`doll provision` as a program that buys on EC2: moto's, with a market, behind a real endpoint; and a real broker."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from doll.provisioner.fleets.port import Order
from doll.provisioner.state_store import FileStateStore
from doll.records.control import Finished, TermStarted
from doll.services import KAFKA_ENV, REDIS_ENV
from fleet_rigs import Ec2Rig
from job_rig import MakePipeline
from moto.server import ThreadedMotoServer
from moto_overlay import REGION, moto_market
from statuses import server_status

pytestmark = pytest.mark.integration

ACCOUNT = {
    "AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_DEFAULT_REGION": REGION,
    "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip
TAGS = ("doll:cluster", "doll:worker", "doll:incarnation", "doll:market")


class Cloud:
    """A job whose machines are EC2's, its provisioner's program, and what EC2 has seen of it."""

    def __init__(self, make: Callable[..., Any], rig: Ec2Rig, endpoint: str) -> None:
        fleet = {
            "kind": "ec2", "region": REGION, "launch_template": rig.template, "launch_template_version": 1,
            "subnets": rig.subnets, "instance_types": list(rig.types), "api_calls_per_s": 20,
            "queue_url": f"{endpoint}/123456789012/notices", "placement_scores": True, "cluster": "stack",
        }  # fmt: skip
        self.make = functools.partial(
            make, *(f"fleet.{name}={json.dumps(value)}" for name, value in fleet.items()), "plan.deadline_s=3600",
            "plan.on_demand_usd_per_h=0.17", "plan.alpha=0.9", "provision.every_s=1", "arrivals.process=poisson",
            "arrivals.rate_per_s=20", "stop.updates=40", "provision.heartbeat_timeout_s=600",
        )  # fmt: skip
        self.job = job = self.make()
        self.rig, self.market = rig, rig.market
        self._env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
            **ACCOUNT, "AWS_ENDPOINT_URL": endpoint,
            KAFKA_ENV: job.services.kafka, REDIS_ENV: job.services.redis,
        }  # fmt: skip
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: str, *more: str) -> subprocess.Popen[bytes]:
        self.job.control("metrics", server_status(time_s=time.time()))  # without a server nothing is launched
        log = self.job.run / "logs" / f"provision-{len(self._processes)}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-m", "doll", "provision", command, "--job", str(self.job.job_path)]
        argv += ["--run-folder", str(self.job.run), *more]
        with log.open("wb") as file:
            self._processes.append(subprocess.Popen(argv, env=self._env, stdout=subprocess.PIPE, stderr=file))
        return self._processes[-1]

    def ask(self, command: str, *more: str) -> dict[str, Any]:
        process = self.start(command, "--json", *more)
        out, _ = process.communicate(timeout=240)
        assert process.returncode == 0, self.log()
        document: dict[str, Any] = json.loads(out)
        return document

    def say(self, command: str) -> str:
        """What it says to people."""
        process = self.start(command)
        out, _ = process.communicate(timeout=240)
        assert process.returncode == 0, self.log()
        return out.decode()

    def log(self) -> str:
        """Of the newest process."""
        text: str = self.job.log(f"provision-{len(self._processes) - 1}")
        return text

    def journal(self, kind: str) -> list[dict[str, Any]]:
        path: Path = FileStateStore(self.job.run, self.job.config.job).journal
        lines = path.read_text().splitlines() if path.exists() else []
        return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]

    def alive(self) -> dict[str, dict[str, str]]:
        """Tags of each instance that runs or boots, whoever it belongs to."""
        pages = self.rig.ec2.describe_instances()["Reservations"]
        return {
            instance["InstanceId"]: {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
            for group in pages
            for instance in group["Instances"]
            if instance["State"]["Name"] in ("pending", "running")
        }

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def cloud(make_pipeline: MakePipeline) -> Iterator[Cloud]:
    with moto_market(time.time) as market:
        rig = Ec2Rig(market, time.time)  # type: ignore[arg-type]
        market.boot_s = market.lag_s = 0.0
        for number, type_ in enumerate(rig.types):
            for zone in "ab":
                market.prices[type_, REGION + zone] = [(time.time() - 3600, 0.07 + 0.01 * number)]
        market.scores = {"use1-az99": 7}
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        cloud = Cloud(make_pipeline, rig, endpoint)
        yield cloud
        cloud.close()
        server.stop()


def test_once_status_and_drain(cloud: Cloud) -> None:
    """A turn of a process buys what is missing, the next one nothing; a drain leaves nothing."""
    said = cloud.ask("once", "--dry-run")
    assert said["actions"], "it would launch"
    assert (cloud.market.requests, cloud.journal("decision")) == ([], [])

    said = cloud.ask("once")
    bought = cloud.alive()
    assert said["markets"] == ["spot", "spot"]
    assert said["spot_usd_per_h"] == 0.07
    assert sorted(tuple(tags[name] for name in TAGS) for tags in bought.values()) == [
        (cloud.job.config.cluster, slot, "1", "spot") for slot in "01"
    ]
    assert len({request["ClientToken"] for request in cloud.market.requests}) == len(cloud.market.requests) == 2
    kinds = {specification["ResourceType"] for specification in cloud.market.requests[0]["TagSpecifications"]}
    assert kinds == {"instance", "volume", "network-interface", "fleet"}
    assert {(entry["slot"], entry["incarnation"], entry["market"]) for entry in cloud.journal("order")} == {
        (0, 1, "spot"), (1, 1, "spot")
    }  # fmt: skip
    assert {entry["id"] for entry in cloud.journal("launched")} == bought.keys()
    (decision,) = cloud.journal("decision")
    assert len(decision["actions"]) == 2
    assert decision["reasons"]

    shown = cloud.ask("status")
    assert {instance["id"] for instance in shown["instances"]} == bought.keys()
    assert (shown["phase"], shown["turn"]) == ("run", 1)
    assert shown["placement_scores"] == {"use1-az99": 7}
    assert "placement scores for all workers, of 10: use1-az99 7" in cloud.say("status")

    # Another process: what is there it sees by its tags, and buys nothing more.
    said = cloud.ask("once")
    assert (said["turn"], said["actions"]) == (2, [])
    assert cloud.alive().keys() == bought.keys()
    assert said["spent_usd"] > 0

    said = cloud.ask("drain")
    assert (said["phase"], said["finished"]) == ("drain", True)
    assert cloud.alive() == {}
    assert sorted(cloud.market.terminated) == sorted(bought)
    assert {entry["id"] for entry in cloud.journal("ended")} == bought.keys(), "every machine has its bill"
    assert {entry["id"] for entry in cloud.journal("end")} == bought.keys(), "and the reason of its end"
    shown = cloud.ask("status")
    assert (shown["phase"], shown["instances"]) == ("drain", [])


def test_a_notice_in_the_queue_is_acted_on_and_its_machine_left_alone(cloud: Cloud) -> None:
    cloud.ask("once")
    before = cloud.alive()
    taken = next(id_ for id_, tags in before.items() if tags["doll:worker"] == "0")
    cloud.market.interrupt(taken, 600.0)
    said = cloud.ask("once")
    after = cloud.alive()
    assert len(after) == 3
    (new,) = after.keys() - before.keys()
    assert (after[new]["doll:worker"], after[new]["doll:incarnation"]) == ("0", "2")
    assert [entry["id"] for entry in cloud.journal("interrupted")] == [taken]
    assert said["interruptions_total"] == 1
    assert len(cloud.ask("status")["instances"]) == 3
    assert cloud.market.terminated == []
    cloud.market.interrupt(taken, 0.0, announced=False)  # EC2 takes it
    cloud.ask("drain")
    assert cloud.alive() == {}
    assert taken not in cloud.market.terminated


def test_a_provisioner_that_is_killed_leaves_its_machines_to_the_next(cloud: Cloud) -> None:
    process = cloud.start("run")
    cloud.job.until(lambda: process.poll() is not None or len(cloud.alive()) == 2, "two machines")
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    bought = cloud.alive()
    cloud.ask("once")
    assert cloud.alive().keys() == bought.keys()
    assert len({(tags["doll:worker"], tags["doll:incarnation"]) for tags in bought.values()}) == 2
    cloud.ask("drain")
    assert cloud.alive() == {}


def test_a_second_job_with_the_same_state_folder_gets_machines_of_its_own(cloud: Cloud) -> None:
    """As on a stack: one state folder, one cluster tag, one job after the other, and EC2 remembers client tokens."""
    first = cloud.job
    cloud.ask("once")
    bought = cloud.alive()
    first.control("updates", TermStarted(term=1, resumed_version=0, origins=(0, 0), records_per_batch=8, time_s=1.0))
    first.control("updates", Finished(term=1, version=0, reason="updates", time_s=2.0))
    process = cloud.start("run")
    assert process.wait(240) == 0, cloud.log()
    assert cloud.alive() == {}
    overlooked = cloud.rig.make("stack", job=first.config.job).launch(Order(0, 1, "spot", attempt=9)).id
    cloud.market.forget_ended()

    cloud.job = cloud.make(f"job={first.config.job}-next")
    process = cloud.start("status")
    assert process.wait(240) == 2, "the first job's decisions are not the second one's"
    began_s = time.time()
    said = cloud.ask("once")
    second = cloud.alive()
    assert (said["phase"], said["markets"], said["turn"]) == ("run", ["spot", "spot"], 1)
    assert said["started_s"] >= began_s
    assert said["spent_usd"] < 0.001, "the first job's bill is not the second one's"
    assert len(second) == 2
    assert second.keys().isdisjoint(bought.keys() | {overlooked})
    assert {tags["doll:job"] for tags in second.values()} == {cloud.job.config.job}
    assert {tags["doll:worker"] for tags in second.values()} == {"0", "1"}
    assert len({request["ClientToken"] for request in cloud.market.requests}) == len(cloud.market.requests)
    cloud.ask("drain")
    assert cloud.alive() == {}
