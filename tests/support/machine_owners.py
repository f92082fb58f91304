"""Owners of machines in memory, on a virtual clock, each behind its real fleet adapter.

A day of a job takes parts of a second. The contract suite (tests/contract/) holds the adapters to real servers; what is
tested here is a controller above them.
An owner keeps the truth: which machines there were, and when each began and ended, whatever an adapter knows of it.
"""

from __future__ import annotations

import builtins
import copy
import dataclasses
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import fake_docker
import redis
from doll.config import KubernetesFleetConfig, LambdaFleetConfig, RayFleetConfig
from doll.errors import ServiceUnavailableError
from doll.local.supervisor import RoleSpec
from doll.provisioner.fleets.aws_lambda.fleet import LambdaFleet
from doll.provisioner.fleets.compose import ComposeFleet
from doll.provisioner.fleets.ec2.fleet import Ec2Fleet
from doll.provisioner.fleets.kubernetes.fleet import ApiError, KubernetesFleet
from doll.provisioner.fleets.port import EndReason, Fleet, Instance, InstanceState
from doll.provisioner.fleets.processes import ProcessFleet
from doll.provisioner.fleets.ray.actors import Actor
from doll.provisioner.fleets.ray.fleet import RayError, RayFleet
from doll.provisioner.planning.state import Market
from doll.storage.invocations import Invocation, Invocations
from fake_fleet import VirtualClock
from job_world import ON_DEMAND, SPOT

_ENDING_S = 5.0
_CLUSTER = "shared"
JOB = "digits"


class Owner:
    """The machines of one job, and of the jobs beside it.

    Attributes:
        job: whose machines `alive`, `all_instances` and `paid` are.
        machines: all that there ever were, of every job, by id.
        refuses: orders are refused for a reason of configuration.
        away: no call is answered.
        refused: how many calls it has refused.
        usd_per_h: prices of both markets.
    """

    usd_per_h = (SPOT, ON_DEMAND)

    def __init__(self, clock: VirtualClock, folder: Path, boot_s: float) -> None:
        self.clock, self.folder, self.boot_s, self.job = clock, folder, boot_s, JOB
        self.machines: dict[str, Instance] = {}
        self.refuses = self.away = False
        self.refused = 0
        self._ending_at_s: dict[str, float] = {}
        self._earlier: list[Instance] = []  # what was paid of machines that were started again

    def beside(self, job: str) -> Owner:
        """The same machines, for another job of the same cluster."""
        other = copy.copy(self)
        other.job = job
        return other

    def fleet(self) -> Fleet:
        """The adapter of a process that has just started."""
        raise NotImplementedError

    # --- what a test does

    def alive(self) -> list[Instance]:
        return [machine for machine in self.all_instances() if machine.is_alive]

    def all_instances(self) -> list[Instance]:
        """As they are by now."""
        return [machine for machine in self._by_now() if machine.job == self.job]

    def paid(self) -> list[Instance]:
        """What there is to pay for: each machine, and again for each time that it was started."""
        return self.all_instances() + [machine for machine in self._earlier if machine.job == self.job]

    def kept(self) -> list[str]:
        """Ids of what is left of machines, running or not, which costs or is in the way."""
        return [machine.id for machine in self.all_instances() if machine.state is not InstanceState.ENDED]

    def _by_now(self) -> list[Instance]:
        for id_, machine in self.machines.items():
            if machine.state is InstanceState.PENDING and self.clock() >= machine.launched_s + self.boot_s:
                self._put(id_, state=InstanceState.RUNNING)
            elif machine.ended_s is None and self.clock() >= self._ending_at_s.get(id_, float("inf")):
                self.has_ended(id_, EndReason.TERMINATED, self._ending_at_s[id_])
        return list(self.machines.values())

    def has_ended(self, id_: str, reason: EndReason, at_s: float | None = None) -> None:
        """It has ended now, or at this time."""
        if self.machines[id_].ended_s is None:
            ended_s = self.clock() if at_s is None else at_s
            self._put(id_, state=InstanceState.ENDED, ended_s=ended_s, end_reason=reason)

    def stop(self, id_: str) -> None:
        """A person stops it, who may start it again."""
        self._put(id_, state=InstanceState.STOPPED, ended_s=self.clock(), end_reason=EndReason.TERMINATED)

    def start(self, id_: str) -> None:
        """A person starts it again, if it is still there."""
        machine = self.machines[id_]
        if machine.state is InstanceState.STOPPED:
            self._earlier.append(dataclasses.replace(machine, id=f"{id_} before {self.clock():.0f}"))
            self._put(
                id_, state=InstanceState.PENDING, launched_s=self.clock(), ended_s=None, end_reason=EndReason.NONE
            )

    def take(self, id_: str) -> None:
        """The market takes it without a notice; where there is none, it ends by itself."""
        self.has_ended(id_, EndReason.INTERRUPTED if self.machines[id_].market == "spot" else EndReason.FAILED)

    # --- what its calls do

    def buy(self, id_: str, slot: int, incarnation: int, market: str, job: str = JOB) -> None:
        if id_ not in self.machines:
            self.machines[id_] = Instance(
                id=id_, slot=slot, incarnation=incarnation, market=cast("Market", market), pool="one",
                state=InstanceState.PENDING, launched_s=self.clock(), job=job,
            )  # fmt: skip

    def ask_to_end(self, id_: str) -> None:
        if id_ in self.machines and self.machines[id_].is_alive:
            self._put(id_, state=InstanceState.ENDING)
            self._ending_at_s[id_] = self.clock() + _ENDING_S

    def forgotten(self, machine: Instance) -> bool:
        """It ended an hour ago, and is not listed any more."""
        return machine.ended_s is not None and self.clock() - machine.ended_s > 3600

    def listed(self) -> list[Instance]:
        return [machine for machine in self._by_now() if not self.forgotten(machine)]

    def _put(self, id_: str, **changes: Any) -> None:
        self.machines[id_] = dataclasses.replace(self.machines[id_], **changes)


class ProcessOwner(Owner):
    """A fork server that forks nothing."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._roles: dict[str, _Role] = {}

    def fleet(self) -> Fleet:
        forks = SimpleNamespace(launch=self._launch, running=lambda: [*self._roles.values()])
        spec = RoleSpec("", "none:none", self.folder / "log", [])
        return ProcessFleet(
            forks, lambda _: spec, self.folder, boot_s=self.boot_s, drain_s=_ENDING_S, clock=self.clock,  # type: ignore[arg-type]
        )  # fmt: skip

    def _launch(self, spec: RoleSpec) -> _Role:
        env = spec.env
        self.buy(spec.name, int(env["DOLL_WORKER"]), int(env["DOLL_INCARNATION"]), env["DOLL_MARKET"])
        self._roles[spec.name] = _Role(self, spec.name, 1000 + len(self._roles))
        return self._roles[spec.name]


@dataclasses.dataclass
class _Role:
    """A process that runs until its machine has ended."""

    owner: Owner
    name: str
    pid: int

    @property
    def exitcode(self) -> int | None:
        self.owner.alive()
        machine = self.owner.machines[self.name]
        return None if machine.ended_s is None else 0 if machine.end_reason is EndReason.TERMINATED else 1

    def poll(self) -> int | None:
        return self.exitcode

    def terminate(self) -> None:
        self.owner.ask_to_end(self.name)

    kill = terminate


class ComposeOwner(Owner):
    """The likeness of docker, called in this process."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        (self.folder / "docker-compose.yml").touch()
        self.state: dict[str, Any] = {"containers": {}, "services": ["worker"], "made": 0, "stubborn": []}

    def fleet(self) -> Fleet:
        fleet = ComposeFleet(
            cluster=_CLUSTER, job=self.job, project="doll", file=self.folder / "docker-compose.yml", clock=self.clock
        )  # fmt: skip
        fleet._call = self._docker  # type: ignore[method-assign]
        return fleet

    def has_ended(self, id_: str, reason: EndReason, at_s: float | None = None) -> None:
        super().has_ended(id_, reason, at_s)
        container = self.state["containers"].get(id_)
        if container is not None and container["State"]["Running"]:
            self.state["now_s"] = self.clock()
            fake_docker.end(self.state, container, 0 if reason is EndReason.TERMINATED else 1)

    def _docker(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        _, verb, *words = command
        self.state["now_s"], out, error = self.clock(), "", ""
        if self.away:
            error = fake_docker.DAEMON
        elif verb == "compose":
            error = "image doll:local is not there" if self.refuses else ""
            self.refused += self.refuses
            out = "" if error else fake_docker.compose(self.state, words)
        elif verb == "ps":
            out = fake_docker.ps(self.state, words)
        else:
            out, error = fake_docker.over(self.state, verb, words)
        for name, container in self.state["containers"].items():
            labels = container["Config"]["Labels"]
            self.buy(
                name, int(labels["doll.worker"]), int(labels["doll.incarnation"]), labels["doll.market"],
                labels["doll.job"],
            )  # fmt: skip
            if not container["State"]["Running"]:
                super().has_ended(name, EndReason.TERMINATED)
        return subprocess.CompletedProcess(command, bool(error), out, error)


class Ec2Owner(Owner):
    """The calls of EC2 that the fleet makes, with one subnet and one type.

    Attributes:
        protects: nobody may end an instance.
        late_s: so long after its launch a new instance is not listed.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.protects, self.late_s = False, 0.0
        self._listed_from_s: dict[str, float] = {}
        self._ended_after_stop_s: dict[str, float] = {}
        self._tags: dict[str, list[dict[str, str]]] = {}
        self._by_token: dict[str, str] = {}

    def fleet(self) -> Fleet:
        return Ec2Fleet(
            self, cluster=_CLUSTER, job=self.job, launch_template="lt-1", version=1, subnets=["subnet-1"],
            instance_types=["c5.xlarge"], api_calls_per_s=1e6, clock=self.clock,
        )  # fmt: skip

    def describe_subnets(self, **_: Any) -> Any:
        self._answer("DescribeSubnets")
        return {
            "Subnets": [{"SubnetId": "subnet-1", "AvailabilityZone": "zone-a", "AvailabilityZoneId": "a1"}]
        }  # fmt: skip

    def get_paginator(self, name: str) -> Any:
        return SimpleNamespace(paginate=getattr(self, f"_{name}"))

    def create_fleet(self, *, ClientToken: str, TagSpecifications: Any, **_: Any) -> Any:
        self._answer("CreateFleet", refuses=self.refuses)
        tags = TagSpecifications[0]["Tags"]
        id_ = self._by_token.setdefault(ClientToken, f"i-{len(self._by_token):017x}")
        of = {tag["Key"]: tag["Value"] for tag in tags}
        self._tags[id_] = tags
        self.buy(id_, int(of["doll:worker"]), int(of["doll:incarnation"]), of["doll:market"], of["doll:job"])
        self._listed_from_s.setdefault(id_, self.clock() + self.late_s)
        return {"Instances": [{"InstanceIds": [id_], "InstanceType": "c5.xlarge"}]}

    def terminate_instances(self, *, InstanceIds: Sequence[str]) -> None:
        self._answer("TerminateInstances", refuses=self.protects)
        if any(self._is_late(id_) for id_ in InstanceIds):
            self._refuse("TerminateInstances", "InvalidInstanceID.NotFound")
        for id_ in InstanceIds:
            if self.machines[id_].state is InstanceState.STOPPED:
                self._put(id_, state=InstanceState.ENDED)
                self._ended_after_stop_s[id_] = self.clock()
            self.ask_to_end(id_)

    def _is_late(self, id_: str) -> bool:
        return self.clock() < self._listed_from_s[id_]

    def close(self) -> None:
        pass

    def _describe_instance_type_offerings(self, **_: Any) -> Any:
        self._answer("DescribeInstanceTypeOfferings")
        return [{"InstanceTypeOfferings": [{"InstanceType": "c5.xlarge", "Location": "zone-a"}]}]

    def _describe_instances(self, *, Filters: Any, **_: Any) -> Any:
        self._answer("DescribeInstances")
        wanted = {each["Name"].removeprefix("tag:"): each["Values"] for each in Filters}
        ids = wanted.pop("instance-id", None)
        wanted.pop("tag-key")
        described = []
        for machine in self.listed():
            if self._is_late(machine.id):
                continue
            tags = {tag["Key"]: tag["Value"] for tag in self._tags[machine.id]}
            if all(tags.get(key) in values for key, values in wanted.items()) and (ids is None or machine.id in ids):
                described.append(self._described(machine))
        return [{"Reservations": [{"Instances": described}]}]

    def _described(self, machine: Instance) -> dict[str, Any]:
        states = {InstanceState.ENDING: "shutting-down", InstanceState.ENDED: "terminated"}
        causes = {
            EndReason.INTERRUPTED: "Server.SpotInstanceTermination",
            EndReason.TERMINATED: "Client.UserInitiatedShutdown",
            EndReason.FAILED: "Client.InstanceInitiatedShutdown",
        }  # fmt: skip
        ended_s = self._ended_after_stop_s.get(machine.id, machine.ended_s or 0.0)
        ended = datetime.fromtimestamp(ended_s, UTC)
        return {
            "InstanceId": machine.id, "Tags": self._tags[machine.id], "InstanceType": "c5.xlarge",
            "Placement": {"AvailabilityZone": "zone-a"},
            "LaunchTime": datetime.fromtimestamp(machine.launched_s, UTC),
            "State": {"Name": states.get(machine.state, machine.state.value)},
            "StateReason": {"Code": causes.get(machine.end_reason, "")},
            "StateTransitionReason": f"ended ({ended:%Y-%m-%d %H:%M:%S} GMT)" if machine.ended_s else "",
        }  # fmt: skip

    def _answer(self, call: str, *, refuses: bool = False) -> None:
        from botocore.exceptions import EndpointConnectionError

        if self.away:
            raise EndpointConnectionError(endpoint_url="https://ec2")
        if refuses:
            self.refused += 1
            self._refuse(call, "UnauthorizedOperation", 403)

    @staticmethod
    def _refuse(call: str, code: str, status: int = 400) -> NoReturn:
        from botocore.exceptions import ClientError

        error = {"Code": code, "Message": f"{code}, as EC2 words it"}
        raise ClientError({"Error": error, "ResponseMetadata": {"HTTPStatusCode": status}}, call)


class KubernetesOwner(Owner):
    """Pods by name, each with a node from the start.

    Attributes:
        wrong_image: nobody can pull the image.
        unpulled: pods whose node cannot pull it now.
    """

    namespace = "default"
    wrong_image = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._pods: dict[str, dict[str, Any]] = {}
        self.unpulled: set[str] = set()
        self._evicted_s: dict[str, float] = {}

    def fleet(self) -> Fleet:
        template = {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"name": "worker", "image": "doll"}]}}
        settings = KubernetesFleetConfig(kind="kubernetes", pod_template=Path("pod.yaml"))
        return KubernetesFleet(
            self, cluster=_CLUSTER, job=self.job, template=template, settings=settings, clock=self.clock  # type: ignore[arg-type]
        )  # fmt: skip

    def create(self, manifest: Any) -> Any:
        self._answer("create", refuses=self.refuses)
        labels = manifest["metadata"]["labels"]
        name = manifest["metadata"]["name"]
        slot, incarnation = int(labels["doll/worker"]), int(labels["doll/incarnation"])
        self.buy(name, slot, incarnation, labels["doll/market"], labels["doll/job"])
        pod = json.loads(json.dumps(manifest))
        pod["spec"]["nodeName"] = "n1"
        pod["metadata"]["creationTimestamp"] = self._stamp(self.clock())
        self._pods[name] = pod
        return self._seen(name)

    def read(self, name: str) -> Any:
        self._answer("read")
        if name not in self._pods:
            raise ApiError("read", 404, "not found")
        return self._seen(name)

    def list(self, selector: str) -> Any:
        self._answer("list")
        self._by_now()
        key, _, value = selector.partition("=")
        for name in [name for name in self._pods if self.machines[name].end_reason is EndReason.TERMINATED]:
            del self._pods[name]
        return [self._seen(name) for name, pod in self._pods.items() if pod["metadata"]["labels"].get(key) == value]

    def delete(self, name: str) -> None:
        self._answer("delete")
        if name not in self._evicted_s:
            self.ask_to_end(name)
        if name in self.machines and self.machines[name].ended_s is not None:
            self._pods.pop(name, None)

    def close(self) -> None:
        pass

    def kept(self) -> builtins.list[str]:
        return [name for name in self._pods if self.machines[name].job == self.job]

    def evict(self, name: str) -> None:
        """Its node has not answered for a while: the pod is marked, and stays until its node is gone."""
        self._evicted_s[name] = self.clock()

    def node_gone(self, name: str) -> None:
        """Its cloud takes the node away, and the pod with it."""
        self.has_ended(name, EndReason.FAILED)
        self._pods.pop(name, None)

    def _seen(self, name: str) -> dict[str, Any]:
        self._by_now()
        pod, machine = self._pods[name], self.machines[name]
        phases = {InstanceState.PENDING: "Pending", InstanceState.ENDED: "Failed"}
        scheduled = {
            "type": "PodScheduled", "status": "True", "lastTransitionTime": pod["metadata"]["creationTimestamp"]
        }  # fmt: skip
        status: dict[str, Any] = {"phase": phases.get(machine.state, "Running"), "conditions": [scheduled]}
        if machine.end_reason is EndReason.INTERRUPTED or name in self._evicted_s:
            status["conditions"].append({"type": "DisruptionTarget", "status": "True"})
        if machine.ended_s is not None:
            ended = {"exitCode": 1, "finishedAt": self._stamp(machine.ended_s)}
            status["containerStatuses"] = [{"name": "worker", "state": {"terminated": ended}}]
        elif self.wrong_image or name in self.unpulled:
            waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling image doll"}
            status |= {"phase": "Pending", "containerStatuses": [{"name": "worker", "state": {"waiting": waiting}}]}
        metadata = dict(pod["metadata"])
        if name in self._evicted_s:
            metadata["deletionTimestamp"] = self._stamp(self._evicted_s[name] + _ENDING_S)
        elif machine.state is InstanceState.ENDING:
            metadata["deletionTimestamp"] = self._stamp(self._ending_at_s[name])
        return {**pod, "metadata": metadata, "status": status}

    @staticmethod
    def _stamp(at_s: float) -> str:
        return datetime.fromtimestamp(at_s, UTC).isoformat()

    def _answer(self, call: str, *, refuses: bool = False) -> None:
        if self.away:
            raise ApiError(call, 0, "the API server does not answer")
        if refuses:
            self.refused += 1
            raise ApiError(call, 403, 'pods is forbidden: User "doll" cannot create resource "pods"')


class RayOwner(Owner):
    """Actors by name, each with a node of its own.

    Attributes:
        failing: so many of the next actors do not start.
        stuck: actors do not hear that they should end.
    """

    failing, stuck = 0, False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._labels: dict[str, Mapping[str, str]] = {}
        self._unstarted: set[str] = set()

    def fleet(self) -> Fleet:
        """As `doll.provisioner.fleets.ray.fleet.connect`, which needs the head."""
        if self.away:
            raise ServiceUnavailableError("fleet.address: expected a Ray cluster of this machine")
        settings = RayFleetConfig(kind="ray")
        return RayFleet(
            self, cluster=_CLUSTER, job=self.job, settings=settings, drain_s=_ENDING_S, clock=self.clock,  # type: ignore[arg-type]
        )  # fmt: skip

    def lose_table(self) -> None:
        """The head starts again with an empty table: all actors have ended, and nothing says so."""
        for machine in self.alive():
            self.has_ended(machine.id, EndReason.FAILED)
        self._labels.clear()

    def create(self, name: str, identity: Any, labels: Mapping[str, str], placement: Any) -> None:
        self._answer("create", refuses=self.refuses)
        self._labels[name] = labels
        slot, incarnation = int(labels["doll-worker"]), int(labels["doll-incarnation"])
        self.buy(name, slot, incarnation, labels["doll-market"], labels["doll-job"])
        if self.failing:
            self.failing -= 1
            self._unstarted.add(name)
            self.has_ended(name, EndReason.FAILED)

    def actors_of(self, cluster: str) -> list[Actor]:
        self._answer("list")
        states = {InstanceState.PENDING: "PENDING_CREATION", InstanceState.ENDED: "DEAD"}
        causes = {EndReason.INTERRUPTED: "node", EndReason.TERMINATED: "exited", EndReason.FAILED: "failed"}
        return [
            Actor(
                name=machine.id, labels=self._labels[machine.id], state=states.get(machine.state, "ALIVE"),
                node=f"node-{machine.id}", end_s=machine.ended_s,
                started=machine.state is not InstanceState.PENDING and machine.id not in self._unstarted,
                start_s=None if machine.state is InstanceState.PENDING else machine.launched_s,
                cause="start" if machine.id in self._unstarted else cast("Any", causes.get(machine.end_reason, "")),
                detail="ModuleNotFoundError: No module named 'doll'" if machine.id in self._unstarted else "",
            )
            for machine in self.listed() if machine.id in self._labels
        ]  # fmt: skip

    def draining(self) -> dict[str, float]:
        self._answer("list draining nodes")
        return {}

    def end(self, name: str, grace_s: float = 0.0) -> None:
        self._answer("end")
        if not self.stuck:
            self.ask_to_end(name)

    def kill(self, name: str) -> None:
        self._answer("kill")
        self.has_ended(name, EndReason.TERMINATED)

    def renew(self, key: str) -> None:
        self._answer("renew")

    def close(self) -> None:
        pass

    def _answer(self, call: str, *, refuses: bool = False) -> None:
        if self.away or refuses:
            self.refused += refuses
            raise RayError(f"{call}: Ray does not answer")


class LambdaOwner(Owner):
    """Invocations of a function, played as `doll.run.function` would live by now, and their records in memory.

    Attributes:
        is_busy: the concurrency of the function is used up; events wait.
        is_twice: each event is delivered twice.
    """

    usd_per_h = (SPOT, SPOT)  # functions have one market
    is_busy = is_twice = False
    LIMIT_S = 900.0
    LEAD_S = 125.0  # a turn of the test, and the drain

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.records: dict[str, dict[str, dict[str, Any]]] = {}  # by job and name
        self._events: list[dict[str, Any]] = []

    def fleet(self) -> Fleet:
        """As `doll.provisioner.fleets.aws_lambda.fleet.connect`, which asks about the function."""
        if self.away:
            raise ServiceUnavailableError("function doll: AWS Lambda does not answer")
        settings = LambdaFleetConfig(kind="lambda", function="doll", start_s=self.boot_s)
        return LambdaFleet(
            self, _Records(self, self.job), settings, cluster=_CLUSTER, job=self.job, job_text=self.job,
            lead_s=self.LEAD_S, clock=self.clock,
        )  # fmt: skip

    def invoke(self, *, Payload: bytes, **_: Any) -> None:
        from botocore.exceptions import ClientError, EndpointConnectionError

        if self.away:
            raise EndpointConnectionError(endpoint_url="https://lambda")
        if self.refuses:
            self.refused += 1
            error = {"Code": "AccessDeniedException", "Message": "not authorized to perform: lambda:InvokeFunction"}
            raise ClientError({"Error": error, "ResponseMetadata": {"HTTPStatusCode": 403}}, "Invoke")
        self._events += [json.loads(Payload)] * (2 if self.is_twice else 1)

    def close(self) -> None:
        pass

    def has_ended(self, id_: str, reason: EndReason, at_s: float | None = None) -> None:
        was_alive = self.machines[id_].ended_s is None
        super().has_ended(id_, reason, at_s)
        machine, record = self.machines[id_], self._record(id_)
        if was_alive and record is not None and not self.away and "ended_s" not in record:
            causes = {EndReason.FAILED: "failed", EndReason.LIMIT: "successor"}
            record.update(ended_s=machine.ended_s, cause=causes.get(reason, "asked"))

    def take(self, id_: str) -> None:
        """Its environment is gone, and nothing writes its end."""
        self._by_now()
        Owner.has_ended(self, id_, EndReason.FAILED)

    @property
    def handed_on(self) -> int:
        """Invocations that have ended at their time limit, or handed their place on before it."""
        return sum(machine.end_reason is EndReason.LIMIT for machine in self.all_instances())

    def _record(self, id_: str) -> dict[str, Any] | None:
        return self.records.get(self.machines[id_].job, {}).get(id_)

    def _by_now(self) -> list[Instance]:
        self._start()
        machines, now_s = super()._by_now(), self.clock()
        for machine in [each for each in machines if each.is_alive]:
            record = self._record(machine.id) or {}
            ends_s = machine.launched_s + self.LIMIT_S - _ENDING_S
            if "asked_s" in record or "ended_s" in record:
                self._ending_at_s.setdefault(machine.id, record.get("asked_s", now_s) + _ENDING_S)
            for other in machines:
                is_successor = (other.job, other.slot) == (machine.job, machine.slot)
                if is_successor and other.incarnation > machine.incarnation and other.is_alive:
                    ends_s = min(ends_s, other.launched_s + self.boot_s)
            if ends_s <= now_s and machine.id not in self._ending_at_s:
                self.has_ended(machine.id, EndReason.LIMIT, ends_s + _ENDING_S)
            elif not self.away:
                record.update(seen_s=now_s)
                if now_s >= machine.launched_s + self.boot_s:
                    record.setdefault("warm_s", machine.launched_s + self.boot_s)
        return super()._by_now()

    def _start(self) -> None:
        """What waits starts, if it is wanted by now; whoever comes second does no work."""
        if self.is_busy or self.away:
            return
        for event in self._events:
            records = self.records.setdefault(event["job"], {})
            identity = {key: event[key] for key in ("slot", "incarnation", "market")}
            record = records.setdefault(event["name"], identity | {"launched_s": self.clock()})
            if "started_s" not in record and "ended_s" not in record:
                now_s = self.clock()
                record.update(started_s=now_s, seen_s=now_s, limit_s=now_s + self.LIMIT_S)
                self.buy(event["name"], event["slot"], event["incarnation"], event["market"], event["job"])
        self._events.clear()


class _Records(Invocations):
    """The records of one job in the owner's memory, which do not answer while it is away."""

    def __init__(self, owner: LambdaOwner, job: str) -> None:
        self._owner, self._job = owner, job

    def order(self, name: str, fields: Mapping[str, Any]) -> None:
        self._kept().setdefault(name, {}).update(fields)

    def mark(self, name: str, **values: Any) -> None:
        self._kept().setdefault(name, {}).update(values)

    def end(self, name: str, at_s: float, cause: str, trouble: str = "") -> bool:
        record = self._kept().setdefault(name, {})
        if "ended_s" in record:
            return False
        record.update(ended_s=at_s, cause=cause, trouble=trouble)
        return True

    def forget(self, name: str) -> None:
        self._kept().pop(name, None)

    def get(self, name: str) -> Invocation | None:
        record = self._kept().get(name)
        return None if record is None else Invocation(name=name, **record)

    def all(self) -> builtins.list[Invocation]:
        return [Invocation(name=name, **record) for name, record in sorted(self._kept().items())]

    def _kept(self) -> dict[str, dict[str, Any]]:
        if self._owner.away:
            raise redis.ConnectionError("the job's Redis is away")
        self._owner._by_now()
        return self._owner.records.setdefault(self._job, {})


OWNERS: dict[str, Callable[..., Owner]] = {
    "processes": ProcessOwner,
    "compose": ComposeOwner,
    "ec2": Ec2Owner,
    "kubernetes": KubernetesOwner,
    "ray": RayOwner,
    "lambda": LambdaOwner,
}
