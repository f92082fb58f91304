"""A world for each fleet adapter, so that one contract suite can play with all of them.

To add a fleet: write a `Rig` and enter it in `RIGS`. What its world cannot do it leaves out of `can`.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import fast_botocore
import kube_cluster
import psutil
import pytest
import ray_cluster
import redis
import urllib3
from botocore.awsrequest import AWSResponse
from botocore.config import Config
from botocore.exceptions import EndpointConnectionError
from doll.config import KubernetesFleetConfig, LambdaFleetConfig, RayFleetConfig
from doll.errors import ServiceUnavailableError
from doll.local.forks import ForkServer
from doll.local.redis_server import LocalRedis
from doll.local.supervisor import RoleSpec
from doll.provisioner.fleets.aws_lambda.fleet import LambdaFleet
from doll.provisioner.fleets.compose import ComposeFleet
from doll.provisioner.fleets.ec2.errors import QUOTA_BACKOFF_S
from doll.provisioner.fleets.ec2.fleet import Ec2Fleet
from doll.provisioner.fleets.ec2.notices import Ec2Notices
from doll.provisioner.fleets.kubernetes.fleet import KubernetesFleet, PodApi
from doll.provisioner.fleets.port import Fleet, Instance, LaunchError, LaunchFailure, Order
from doll.provisioner.fleets.processes import Machine, ProcessFleet
from doll.provisioner.fleets.ray.actors import Actor
from doll.provisioner.fleets.ray.fleet import NAMESPACE, RayApi, RayError, RayFleet
from doll.provisioner.traces.market import AvailabilityInterval, MarketClock, SpotMarket
from doll.provisioner.traces.model import constant
from doll.services import Services
from doll.storage.invocations import Invocation, Invocations
from doll.storage.redis_client import connect_redis
from fake_docker import DAEMON, stamp
from fake_fleet import FakeFleet, VirtualClock
from kube_nodes import Nodes, container_status
from moto.core.botocore_stubber import MockRawResponse
from moto_overlay import REGION, MotoMarket, client, moto_market
from paths import SUPPORT
from waiting import until

NOTICE_S = 120.0


class Rig:
    """One fleet and its world.

    Attributes:
        can: of "dry" (a market can run dry), "interrupt", "throttle", "lose_answer", "boot", "pools" (more than one),
            "away" (its owner may not answer), "starve" (no node takes an instance), "quota", "stop" (a person may stop
            a machine that costs on), "hang", "jobs" (several on one cluster).
        fleet: made again by `crash`.
    """

    can: frozenset[str] = frozenset()
    fleet: Fleet

    @property
    def now_s(self) -> float:
        """The time of the fleet's instances."""
        return float(self.clock())

    clock: Any

    def advance(self, seconds: float) -> None:
        raise NotImplementedError

    def crash(self) -> None:
        """The provisioner dies and starts again: all that `fleet` had in memory is gone."""
        raise NotImplementedError

    def become_unavailable(self) -> None:
        """The next call of the fleet's owner is not answered."""
        raise NotImplementedError

    def fail_instance(self, id_: str) -> None:
        """The machine ends by itself."""
        raise NotImplementedError

    def stop(self, id_: str) -> None:
        """A person stops the machine, which can be started again."""
        raise NotImplementedError

    def hang(self, id_: str) -> None:
        """What runs on the machine does not hear that it should end."""
        raise NotImplementedError

    def strangers(self) -> Fleet:
        """The fleet of another cluster with the same owner."""
        raise NotImplementedError

    def second_job(self) -> Fleet:
        """The fleet of another job, "ads", on the same cluster."""
        raise NotImplementedError

    def run_dry(self, market: str) -> None:
        raise NotImplementedError

    def throttle(self) -> None:
        """The next launch is refused because there were too many calls."""
        raise NotImplementedError

    def lose_answer(self) -> None:
        raise NotImplementedError

    def interrupt(self, id_: str, *, announced: bool = True) -> None:
        """Its owner takes a spot instance back in 120 s."""
        raise NotImplementedError

    def starve(self) -> None:
        """No node takes spot instances from now on."""
        raise NotImplementedError

    def refuse_node(self, id_: str) -> None:
        """The scheduler has found no node for a starving instance."""

    def limit(self) -> None:
        """The next spot launch is refused for a quota."""
        raise NotImplementedError

    def beside(self, id_: str) -> set[str]:
        """The instances that go with this one, since they share its node or its market."""
        return {id_}

    def recover(self) -> None:
        """Markets have capacity again, and nobody remembers that they had none."""


class FakeRig(Rig):
    can = frozenset({"dry", "interrupt", "throttle", "lose_answer", "boot", "pools", "away", "quota", "stop"})

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.fleet = self.fake = FakeFleet(self.clock, boot_s=30.0, ending_s=5.0)

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def crash(self) -> None:
        pass  # the fake is the world: a provisioner that starts again is given the same

    def become_unavailable(self) -> None:
        self.fake.fail_next("instances", ServiceUnavailableError("the test's owner does not answer"))

    def fail_instance(self, id_: str) -> None:
        self.fake.fail_instance(id_)

    def stop(self, id_: str) -> None:
        self.fake.stop_instance(id_)

    def strangers(self) -> Fleet:
        return FakeFleet(self.clock)

    def run_dry(self, market: str) -> None:
        for pool in self.fake.pools:
            self.fake.set_capacity(pool, market, 0)  # type: ignore[arg-type]

    def throttle(self) -> None:
        self.fake.fail_next("launch", LaunchFailure.THROTTLED)

    def limit(self) -> None:
        self.fake.fail_next("launch", LaunchFailure.SPOT_QUOTA)

    def recover(self) -> None:
        for pool in self.fake.pools:
            self.fake.set_capacity(pool, "spot", 1000)

    def lose_answer(self) -> None:
        self.fake.lose_next_response()

    def interrupt(self, id_: str, *, announced: bool = True) -> None:
        self.fake.interrupt(id_, 120.0, announced=announced)


class Ec2Rig(Rig):
    can = frozenset({"dry", "interrupt", "throttle", "lose_answer", "boot", "pools", "away", "quota", "stop", "jobs"})
    types = ("c5.xlarge", "c6i.xlarge", "m5.xlarge")

    def __init__(self, market: MotoMarket, clock: VirtualClock) -> None:
        self.market, self.clock = market, clock
        market.boot_s, market.lag_s = 30.0, 10.0
        self.ec2, self.sqs = client("ec2"), client("sqs")
        vpc = self.ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        self.subnets = [
            self.ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.0.{16 * n}.0/20", AvailabilityZone=f"{REGION}{zone}")[
                "Subnet"
            ]["SubnetId"]
            for n, zone in enumerate("ab")
        ]
        made = self.ec2.create_launch_template(
            LaunchTemplateName="doll-workers",
            LaunchTemplateData={"ImageId": "ami-0123456789abcdef0"},
            ClientToken="template",
        )
        self.template = made["LaunchTemplate"]["LaunchTemplateId"]
        self.queue_url = self.sqs.create_queue(QueueName="notices")["QueueUrl"]
        market.queue_url = self.queue_url
        self.down = False
        self.crash()

    def _before_send(self, **_: Any) -> None:
        if self.down:
            from botocore.exceptions import EndpointConnectionError

            self.down = False
            raise EndpointConnectionError(endpoint_url="https://ec2")

    def make(self, cluster: str = "digits", **changes: Any) -> Ec2Fleet:
        settings: dict[str, Any] = {
            "cluster": cluster, "job": "digits", "launch_template": self.template, "version": 1,
            "subnets": self.subnets, "instance_types": self.types,
            "notices": Ec2Notices(self.sqs, self.queue_url, clock=self.clock), "api_calls_per_s": 1e6,
            "clock": self.clock, "page_size": 5,
        }  # fmt: skip
        return Ec2Fleet(self.ec2, **{**settings, **changes})

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def crash(self) -> None:
        self.fleet = self.make()

    def become_unavailable(self) -> None:
        self.down = True

    def fail_instance(self, id_: str) -> None:
        self.market.shut_down_from_inside(id_)

    def stop(self, id_: str) -> None:
        self.market.stop(id_)

    def strangers(self) -> Fleet:
        return self.make("strangers", notices=None)

    def second_job(self) -> Fleet:
        return self.make(job="ads", notices=None)

    def run_dry(self, market: str) -> None:
        kind = market.replace("_", "-")
        for type_ in self.types:
            for zone in "ab":
                self.market.capacity[(type_, REGION + zone), kind] = 0

    def throttle(self) -> None:
        self.market.api_errors.append("RequestLimitExceeded")

    def lose_answer(self) -> None:
        self.market.lost_answers += 1

    def limit(self) -> None:
        self.market.api_errors.append("MaxSpotInstanceCountExceeded")

    def recover(self) -> None:
        self.market.capacity.clear()
        self.clock.advance(QUOTA_BACKOFF_S)

    def interrupt(self, id_: str, *, announced: bool = True) -> None:
        self.market.interrupt(id_, announced=announced)


class ComposeRig(Rig):
    """`docker` is a likeness of docker 27 (tests/support/fake_docker.py): tests find no engine."""

    can = frozenset({"throttle", "lose_answer", "away", "hang", "jobs"})

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = VirtualClock()
        docker = folder / "docker"
        docker.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{SUPPORT / "fake_docker.py"}" "$@"\n')
        docker.chmod(0o755)
        (folder / "docker-compose.yml").write_text("services: {worker: {image: doll:local}}\n")
        (folder / "calls.jsonl").touch()
        empty = {"containers": {}, "services": ["worker"], "made": 0, "stubborn": [], "now_s": self.clock(),
                 "fail_before": {}, "fail_after": {}}  # fmt: skip
        (folder / "state.json").write_text(json.dumps(empty))
        self.crash()

    def state(self) -> dict[str, Any]:
        """What the engine holds."""
        state: dict[str, Any] = json.loads((self.folder / "state.json").read_text())
        return state

    def change(self, **changes: Any) -> None:
        (self.folder / "state.json").write_text(json.dumps({**self.state(), **changes}))

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "calls.jsonl").read_text().splitlines()]

    def make(self, cluster: str = "digits", **changes: Any) -> ComposeFleet:
        settings: dict[str, Any] = {
            "cluster": cluster, "job": "digits", "project": "doll", "file": self.folder / "docker-compose.yml",
            "docker": str(self.folder / "docker"), "clock": self.clock, "timeout_s": 120.0,
            "environment": {"FAKE_DOCKER": str(self.folder), "PATH": os.environ["PATH"]},
        }  # fmt: skip
        return ComposeFleet(**{**settings, **changes})

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.change(now_s=self.clock())

    def crash(self) -> None:
        self.fleet = self.make()

    def become_unavailable(self) -> None:
        self.change(fail_before={"ps": DAEMON})

    def fail_instance(self, id_: str) -> None:
        containers = self.state()["containers"]
        containers[id_]["State"] |= {
            "Status": "exited", "Running": False, "ExitCode": 1, "FinishedAt": stamp(self.clock()),
        }  # fmt: skip
        self.change(containers=containers)

    def hang(self, id_: str) -> None:
        self.change(stubborn=[*self.state()["stubborn"], id_])

    def strangers(self) -> Fleet:
        return self.make("strangers")

    def second_job(self) -> Fleet:
        return self.make(job="ads")

    def throttle(self) -> None:
        self.change(fail_before={"compose": DAEMON})

    def lose_answer(self) -> None:
        self.change(fail_after={"compose": "error during connect: Post: EOF"})


class BoxMarket(SpotMarket):
    """A market whose intervals end when a test says so."""

    def __init__(self) -> None:
        super().__init__([], constant(0.1, 0, 1), 0.3, name="box", alpha=1.0, notice_s=NOTICE_S)
        self.dry = False
        self.ends_s: dict[int, tuple[float, bool]] = {}  # by slot: when its intervals end, and whether with notice

    @property
    def num_slots(self) -> int:
        return 64

    def interval(self, slot: int, at_s: float) -> AvailabilityInterval:
        end_s, announced = self.ends_s.get(slot, (math.inf, True))
        if self.dry or at_s >= end_s:
            return AvailabilityInterval(1, False, min(at_s, end_s), math.inf, math.inf)
        return AvailabilityInterval(0, True, 0.0, end_s, end_s + (NOTICE_S if announced else 0.0))


class ProcessRig(Rig):
    """Real processes that ignore SIGTERM, on a virtual clock."""

    can = frozenset({"dry", "interrupt", "boot", "hang"})
    fleet: ProcessFleet

    def __init__(self, forks: ForkServer, folder: Path) -> None:
        self.forks, self.folder = forks, folder
        self.clock, self.opening, self.market = VirtualClock(), MarketClock(), BoxMarket()
        self.opening.open(self.clock())
        self.crash()

    def make(self, name: str = "run") -> ProcessFleet:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)

        def spec(instance: Instance) -> RoleSpec:
            return RoleSpec("", "role_samples:be_a_worker", folder / "worker.log", [str(folder), False])

        return ProcessFleet(
            self.forks, spec, folder, market=self.market, market_clock=self.opening, boot_s=30.0, drain_s=5.0,
            clock=self.clock, name=name,
        )  # fmt: skip

    def advance(self, seconds: float) -> None:
        """For processes that are being killed now, time goes on when they are gone."""
        self.clock.advance(seconds)
        self.fleet.poll()
        killed = [
            machine
            for machine in self.fleet.machines
            if machine.kill_at_s is not None and machine.kill_at_s <= self.clock()
        ]
        self._until(lambda: all(machine.instance.ended_s is not None for machine in killed))

    def crash(self) -> None:
        self.fleet = self.make()

    def fail_instance(self, id_: str) -> None:
        machine = self._machine(id_)
        assert machine.pid is not None
        os.kill(machine.pid, signal.SIGKILL)
        self._until(lambda: machine.exit_code is not None)

    def hang(self, id_: str) -> None:
        until((self.folder / "run" / id_).exists, f"{id_} to ignore SIGTERM")

    def strangers(self) -> Fleet:
        return self.make("strangers")

    def run_dry(self, market: str) -> None:
        assert market == "spot"
        self.market.dry = True

    def interrupt(self, id_: str, *, announced: bool = True) -> None:
        until((self.folder / "run" / id_).exists, f"{id_} to ignore SIGTERM")  # before that the notice would end it
        now_s = self.opening.since(self.clock())
        slot = self._machine(id_).instance.slot
        self.market.ends_s[slot] = (now_s, True) if announced else (now_s + NOTICE_S, False)

    def beside(self, id_: str) -> set[str]:
        """A slot has one market for all its machines."""
        slot = self._machine(id_).instance.slot
        return {
            each.id for each in self.fleet.instances() if (each.slot, each.market) == (slot, "spot") and each.is_alive
        }

    def recover(self) -> None:
        self.market.dry = False
        self.market.ends_s.clear()

    def _machine(self, id_: str) -> Machine:
        return next(machine for machine in self.fleet.machines if machine.instance.id == id_)

    def _until(self, condition: Callable[[], bool]) -> None:
        def polled() -> bool:
            self.fleet.poll()
            return condition()

        until(polled, "the end of the processes")


class Wire(PodApi):
    """Calls that may go wrong: before the API server sees one of this method, or before its answer comes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.before: dict[str, tuple[int, bytes] | Exception] = {}  # by method: an answer, or none
        self.after: dict[str, Exception] = {}

    def _send(self, method: str, url: str, headers: Any, body: Any) -> tuple[int, bytes]:
        match self.before.pop(method, None):
            case Exception() as error:
                raise error
            case answer if answer is not None:
                return answer
        given = super()._send(method, url, headers, body)
        if (lost := self.after.pop(method, None)) is not None:
            raise lost
        return given


class KubernetesRig(Rig):
    """A real API server, in real time; the kubelet is played: `advance` lets it do what it would have done by then."""

    can = frozenset({"interrupt", "throttle", "lose_answer", "boot", "away", "starve", "quota", "jobs"})
    grace_s = 30

    def __init__(self, cluster: kube_cluster.KubeCluster) -> None:
        from kubernetes import client, config

        self.settings = client.Configuration()
        config.load_kube_config(str(cluster.kubeconfig), client_configuration=self.settings)
        self.cluster = cluster
        self.clock = time.time
        self.namespace = f"doll-{uuid.uuid4().hex[:8]}"
        cluster.call("POST", "/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        self.wire = Wire(self.settings, self.namespace, 30.0)
        self.nodes = Nodes(cluster, self.namespace)
        self.crash()

    def make(self, cluster: str = "digits", job: str = "digits", **changes: Any) -> KubernetesFleet:
        settings = KubernetesFleetConfig(kind="kubernetes", pod_template=Path("pod.yaml"), **changes)
        template = {
            "apiVersion": "v1", "kind": "Pod", "spec": {
                "terminationGracePeriodSeconds": self.grace_s,
                "containers": [{"name": "worker", "image": "doll:local"}],
            },
        }  # fmt: skip
        return KubernetesFleet(self.wire, cluster=cluster, job=job, template=template, settings=settings)

    def advance(self, seconds: float) -> None:
        for pod in self.nodes.pods():
            name = pod["metadata"]["name"]
            if "deletionTimestamp" in pod["metadata"]:
                if seconds > self.grace_s:
                    self.nodes.forget(name)
            elif pod["status"]["phase"] == "Pending":
                if not pod["spec"].get("nodeName"):
                    self.nodes.bind(name)
                self.nodes.report(name, phase="Running")

    def crash(self) -> None:
        self.fleet = self.make()

    def become_unavailable(self) -> None:
        self.wire.before["GET"] = urllib3.exceptions.ProtocolError("connection reset")

    def fail_instance(self, id_: str) -> None:
        ended = {"exitCode": 1, "reason": "Error", "finishedAt": datetime.now(UTC).isoformat()}
        self.nodes.report(id_, phase="Failed", containerStatuses=[container_status({"terminated": ended})])

    def strangers(self) -> Fleet:
        return self.make("strangers")

    def second_job(self) -> Fleet:
        return self.make(job="ads")

    def throttle(self) -> None:
        self.wire.before["POST"] = (429, b'{"message": "Too many requests, please try again later."}')

    def lose_answer(self) -> None:
        self.wire.after["POST"] = urllib3.exceptions.ProtocolError("connection reset")

    def interrupt(self, id_: str, *, announced: bool = True) -> None:
        (self.nodes.evict if announced else self.nodes.collect)(id_)

    def starve(self) -> None:
        self.fleet = self.make(node_timeout_s=1e-3)

    def refuse_node(self, id_: str) -> None:
        since = datetime.now(UTC).replace(microsecond=0) - timedelta(seconds=1)
        none = {
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes are available",
            "lastTransitionTime": since.isoformat().replace("+00:00", "Z"),
        }  # fmt: skip
        self.nodes.report(id_, phase="Pending", conditions=[none])

    def limit(self) -> None:
        self.wire.before["POST"] = (403, b'{"message": "pods is forbidden: exceeded quota: pods, limited: pods=8"}')

    def recover(self) -> None:
        self.crash()


class GangFleet(KubernetesFleet):
    """A fleet whose orders are all of gangs: a worker and two stages."""

    def launch(self, order: Order) -> Instance:
        return super().launch(replace(order, machines=3))


class GangRig(KubernetesRig):
    """Gangs of pods. What happens to an instance happens to the pod of one of its stages."""

    def make(self, cluster: str = "digits", job: str = "digits", **changes: Any) -> KubernetesFleet:
        made = super().make(cluster, job, **changes)
        return GangFleet(
            made.api, cluster=cluster, job=job, template=made.template, stage_template=made.template,
            settings=made.settings,
        )  # fmt: skip

    def fail_instance(self, id_: str) -> None:
        super().fail_instance(f"{id_}-s0")

    def interrupt(self, id_: str, *, announced: bool = True) -> None:
        super().interrupt(f"{id_}-s1", announced=announced)

    def refuse_node(self, id_: str) -> None:
        super().refuse_node(f"{id_}-s1")


class RayWire(RayApi):
    """Calls that may go wrong: before Ray sees one of this name, or before its answer comes."""

    def __init__(self) -> None:
        super().__init__((["sleep", "3600"], "", None, {}, "no-lease"), {"num_cpus": 1}, 60.0)
        self.before: set[str] = set()
        self.after: set[str] = set()
        self.asked: set[str] = set()  # actors whose end somebody has asked for

    def create(self, name: str, identity: Any, labels: Any, placement: Any) -> None:
        self._may_fail("create", self.before)
        super().create(name, identity, labels, placement)
        self._may_fail("create", self.after)

    def actors_of(self, cluster: str) -> list[Actor]:
        self._may_fail("list", self.before)
        return super().actors_of(cluster)

    def end(self, name: str, grace_s: float) -> None:
        self.asked.add(name)
        super().end(name, grace_s)

    def kill(self, name: str) -> None:
        self.asked.add(name)
        super().kill(name)

    def close(self) -> None:
        """The connection is of this process, and the next test uses it."""

    def _may_fail(self, call: str, where: set[str]) -> None:
        if call in where:
            where.remove(call)
            raise RayError(f"{call}: Ray does not answer within 20 s")


class RayRig(Rig):
    """A real cluster, in real time: `advance` waits for what has been asked of Ray."""

    can = frozenset({"interrupt", "throttle", "lose_answer", "boot", "away", "starve", "hang", "jobs"})

    def __init__(self, cluster: ray_cluster.RayCluster) -> None:
        self.cluster = cluster
        self._have_nodes()
        self.ahead_s = 0.0
        self.hung: set[str] = set()
        self.clock = lambda: time.time() + self.ahead_s
        self.name = f"c-{uuid.uuid4().hex[:8]}"
        self.wire = RayWire()
        self.crash()

    def _have_nodes(self) -> None:
        for market, count in (("spot", 2), ("on-demand", 1)):
            self.cluster.ensure(market, count)

    def make(self, cluster: str, job: str = "digits", **changes: Any) -> RayFleet:
        settings = RayFleetConfig(kind="ray", **changes)
        return RayFleet(self.wire, cluster=cluster, job=job, settings=settings, drain_s=10.0, clock=self.clock)

    def rows(self) -> dict[str, Actor]:
        both = (self.name, f"{self.name}-strangers")
        return {actor.name: actor for cluster in both for actor in RayApi.actors_of(self.wire, cluster)}

    def advance(self, seconds: float) -> None:
        def settled() -> bool:
            return all(
                row.state == "DEAD" or (row.state == "ALIVE" and name not in self.wire.asked)
                for name, row in self.rows().items()
            )

        if self.hung:  # the fleet kills them when their time is over
            self.ahead_s += seconds
            self.fleet.instances()
            self.hung.clear()
        until(settled, lambda: f"actors: {self.rows()}")

    def crash(self) -> None:
        self.fleet = self.make(self.name)

    def become_unavailable(self) -> None:
        self.wire.before.add("list")

    def fail_instance(self, id_: str) -> None:
        (worker,) = self._host(id_).children()
        worker.kill()
        self.wire.asked.add(id_)

    def hang(self, id_: str) -> None:
        self._host(id_).suspend()
        self.hung.add(id_)

    def _host(self, id_: str) -> psutil.Process:
        from ray._private.state import state

        return psutil.Process(next(row["Pid"] for row in state.actor_table(None).values() if row["Name"] == id_))

    def strangers(self) -> Fleet:
        return self.make(f"{self.name}-strangers")

    def second_job(self) -> Fleet:
        return self.make(self.name, "ads")

    def throttle(self) -> None:
        self.wire.before.add("create")

    def lose_answer(self) -> None:
        self.wire.after.add("create")

    def interrupt(self, id_: str, *, announced: bool = True) -> None:
        node = self.rows()[id_].node
        if announced:
            self.cluster.drain(node, 20)
        else:
            self.cluster.kill(node)
            self.wire.asked |= {name for name, row in self.rows().items() if row.node == node}

    def beside(self, id_: str) -> set[str]:
        rows = self.rows()
        return {name for name, row in rows.items() if row.node == rows[id_].node and row.state == "ALIVE"}

    def starve(self) -> None:
        self.fleet = self.make(self.name, spot={"no": "node"}, node_timeout_s=1e-3)

    def recover(self) -> None:
        self.cluster.take_drained()
        self._have_nodes()
        self.crash()

    def end(self) -> None:
        for name, row in self.rows().items():
            if row.state != "DEAD":
                self.wire.kill(name)
        self.advance(0)


class FunctionWire(Invocations):
    """The records in a real Redis, which may not answer once."""

    is_away = False

    def all(self) -> list[Invocation]:
        if self.is_away:
            self.is_away = False
            raise redis.ConnectionError("the test's Redis is away")
        return super().all()


class LambdaRig(Rig):
    """A real Redis, boto3 and its answers, in virtual time; the function is played: what its handler would do by then.

    Its limit is that of no test here, because machines of this suite live as long as a test wants."""

    can = frozenset({"throttle", "lose_answer", "boot", "away", "starve", "quota", "jobs"})

    def __init__(self, server: LocalRedis, **changes: Any) -> None:
        self.clock = VirtualClock()
        self.redis = connect_redis(Services("", server.address))
        self.redis.flushdb()
        self.lives_s = 1e9
        self.changes = changes
        self.events: list[dict[str, Any]] = []  # accepted, and not started
        self.working: list[dict[str, Any]] = []
        self.refusal: tuple[str, str] | None = None
        self.loses_answer = self.starving = False
        self.crash()

    def wire(self, cluster: str = "digits", job: str = "digits") -> FunctionWire:
        return FunctionWire(self.redis, job, cluster)

    def make(self, cluster: str = "digits", job: str = "digits", **changes: Any) -> LambdaFleet:
        import boto3

        keys = {"aws_access_key_id": "none", "aws_secret_access_key": "none"}
        client = boto3.Session().client("lambda", REGION, config=Config(retries={"max_attempts": 0}), **keys)
        client.meta.events.register_first("before-send.lambda.Invoke", partial(self._answer, cluster, job))
        settings = LambdaFleetConfig(kind="lambda", function="doll", **{**self.changes, **changes})
        return LambdaFleet(client, self.wire(cluster, job), settings, cluster=cluster, job=job, clock=self.clock)

    def _answer(self, cluster: str, job: str, request: Any, **_: Any) -> Any:
        """Lambda's answer to Invoke, as its API reference describes it."""
        if self.refusal is not None:
            (code, reason), self.refusal = self.refusal, None
            body = json.dumps({"Reason": reason, "Type": "User", "message": "Rate Exceeded."}).encode()
            headers = {"x-amzn-ErrorType": code, "content-type": "application/json"}
            return AWSResponse(request.url, 429, headers, MockRawResponse(body))
        assert request.headers["X-Amz-Invocation-Type"] in ("Event", b"Event")
        self.events.append({**json.loads(request.body), "records": self.wire(cluster, job)})
        if self.loses_answer:
            self.loses_answer = False
            raise EndpointConnectionError(endpoint_url="https://lambda")
        return AWSResponse(request.url, 202, {"x-amzn-RequestId": uuid.uuid4().hex}, MockRawResponse(b""))

    def advance(self, seconds: float) -> None:
        """The handlers live through the time in steps of their renewals."""
        end_s = self.clock() + seconds
        while True:
            self._play()
            if self.clock() >= end_s:
                return
            self.clock.advance(min(15.0, end_s - self.clock()))

    def _play(self) -> None:
        now_s = self.clock()
        if not self.starving:
            for event in self.events:
                records, name = event["records"], event["name"]
                if not records.claim(name, uuid.uuid4().hex):
                    continue
                if records.get(name).ended_s is None:
                    times = {"started_s": now_s, "seen_s": now_s, "warm_s": now_s, "limit_s": now_s + self.lives_s}
                    records.mark(name, **times)
                    self.working.append(event)
            self.events.clear()
        for event in list(self.working):
            records, name = event["records"], event["name"]
            invocation = records.get(name)
            if invocation.asked_s is not None or invocation.ended_s is not None:
                records.end(name, now_s, "asked")
            elif self.lives_s < 1e6 and records.has_warm_successor(invocation.slot, invocation.incarnation, now_s):
                records.end(name, now_s, "successor")
            elif now_s >= invocation.limit_s:
                records.end(name, now_s, "limit")
            else:
                records.mark(name, seen_s=now_s)
                continue
            self.working.remove(event)

    def crash(self) -> None:
        self.fleet = self.make()

    def become_unavailable(self) -> None:
        assert isinstance(self.fleet, LambdaFleet)
        wire = self.fleet.invocations
        assert isinstance(wire, FunctionWire)
        wire.is_away = True

    def fail_instance(self, id_: str) -> None:
        self.wire().end(id_, self.clock(), "failed", "exit code 1")

    def fall_silent(self, id_: str) -> None:
        """The environment of an invocation is gone, without a word."""
        self.working = [event for event in self.working if event["name"] != id_]

    def strangers(self) -> Fleet:
        return self.make("strangers")

    def second_job(self) -> Fleet:
        return self.make(job="ads")

    def throttle(self) -> None:
        self.refusal = ("TooManyRequestsException", "CallerRateLimitExceeded")

    def limit(self) -> None:
        self.refusal = ("TooManyRequestsException", "ReservedFunctionConcurrentInvocationLimitExceeded")

    def lose_answer(self) -> None:
        self.loses_answer = True

    def starve(self) -> None:
        self.starving = True
        self.fleet = self.make(start_timeout_s=1e-3)

    def refuse_node(self, id_: str) -> None:
        self.clock.advance(1.0)

    def recover(self) -> None:
        self.starving = False
        self.crash()


@functools.cache
def _redis() -> LocalRedis:
    """One server for all tests of this process, which is killed when it ends."""
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    server = LocalRedis(Path(folder.name))
    server.start()
    atexit.register(folder.cleanup)
    atexit.register(server.kill)
    return server


@contextmanager
def functions(**changes: Any) -> Iterator[LambdaRig]:
    with pytest.MonkeyPatch.context() as patch:
        fast_botocore.use(patch)
        rig = LambdaRig(_redis(), **changes)
        yield rig
        rig.redis.close()


@contextmanager
def fake() -> Iterator[Rig]:
    yield FakeRig()


@contextmanager
def ec2() -> Iterator[Rig]:
    clock = VirtualClock()
    with moto_market(clock) as market:
        rig = Ec2Rig(market, clock)
        events = rig.ec2.meta.events
        events.register_first("before-send.ec2.*", rig._before_send)
        yield rig
        events.unregister("before-send.ec2.*", rig._before_send)


@contextmanager
def compose() -> Iterator[Rig]:
    with tempfile.TemporaryDirectory() as folder:
        yield ComposeRig(Path(folder))


@contextmanager
def processes() -> Iterator[Rig]:
    # A role that is killed with its fork server may still write a file while the folder is removed.
    made = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with pytest.MonkeyPatch.context() as patch, made as folder:
        patch.setenv("PYTHONPATH", str(SUPPORT))
        with ForkServer(Path(folder) / "forkserver.log", preload=["json"]) as forks:
            yield ProcessRig(forks, Path(folder))


@functools.cache
def _cluster() -> kube_cluster.KubeCluster:
    """One API server for all tests of this process, which is killed when it ends."""
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    cluster = kube_cluster.KubeCluster(Path(folder.name))
    cluster.start()
    atexit.register(folder.cleanup)
    atexit.register(cluster.kill)
    return cluster


@contextmanager
def kubernetes(make_rig: type[KubernetesRig] = KubernetesRig) -> Iterator[Rig]:
    if (reason := kube_cluster.unavailable_reason()) is not None:
        pytest.skip(reason)
    rig = make_rig(_cluster())
    yield rig
    rig.wire.close()


@functools.cache
def _ray_cluster() -> ray_cluster.RayCluster:
    """One cluster for the tests of a module; `end_clusters` ends it, or the end of this process."""
    import ray

    cluster = ray_cluster.RayCluster()
    atexit.register(cluster.close)
    ray.init(cluster.address, namespace=NAMESPACE, log_to_driver=False)
    return cluster


def end_clusters() -> None:
    """End what the rigs have kept for each other: a cluster of Ray is twenty processes."""
    if _ray_cluster.cache_info().currsize:
        _ray_cluster().close()
        atexit.unregister(_ray_cluster().close)
        _ray_cluster.cache_clear()


@contextmanager
def ray_actors() -> Iterator[Rig]:
    if (reason := ray_cluster.unavailable_reason()) is not None:
        pytest.skip(reason)
    rig = RayRig(_ray_cluster())
    yield rig
    rig.end()


RIGS: dict[str, Callable[[], AbstractContextManager[Rig]]] = {
    "fake": fake,
    "ec2": ec2,
    "compose": compose,
    "processes": processes,
    "kubernetes": kubernetes,
    "kubernetes-gangs": lambda: kubernetes(GangRig),
    "ray": ray_actors,
    "lambda": functions,
}


def refused(fleet: Fleet, order: Order) -> LaunchError:
    """The error of a launch that fails; it says something."""
    with pytest.raises(LaunchError) as caught:
        fleet.launch(order)
    assert str(caught.value)
    return caught.value
