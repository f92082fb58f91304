"""What each fault does to a job's processes, connections and data, and how it ends."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import record_builders
from doll.config import JobConfig, parse
from doll.kafka.publisher import Delivery
from doll.local.stack import Stack
from doll.local.supervisor import RoleSpec, Supervisor
from doll.services import Services
from statuses import server_status

from doll_lab.drill import actions, stream
from doll_lab.drill.actions import DrillError
from doll_lab.drill.fault_injector import FaultInjector
from doll_lab.drill.plan import FAULT_KINDS, Fault, FaultTarget
from doll_lab.drill.recovery import InjectedFault

JOB = """
job: t
task: {class: 'a:B'}
source: {kind: python, of: examples.synthetic.source:gaussians}
data: {workers: 2}
arrivals: {rate_per_s: 10}
"""
PIPELINES = "worker: {pipeline: {stages: 2}}\ntraining: {policy: {name: wsp}}\n"
ROLES = ("ps", "ps-standby", "worker-0", "worker-1", "producer", "evaluator")
BY_NAME = {kind.name: kind for kind in FAULT_KINDS}
HOLD_S = 2.0
KILL, STOP, CONTINUE, TERMINATE = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGTERM
STAGES = (71, 72)  # process ids of a worker's stages


def fault(kind: str, worker: int = 1, **fields: Any) -> Fault:
    return Fault(1, BY_NAME[kind], worker=worker, gap_s=0.0, hold_s=HOLD_S, overlapping=True, **fields)


class Process:
    """A role's process; SIGKILL ends it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.signals: list[int] = []
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        if number == KILL:
            self.code = -KILL

    def terminate(self) -> None:
        self.send_signal(TERMINATE)

    def kill(self) -> None:
        self.send_signal(KILL)


class Server:
    """A service that the run has started."""

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid: int | None = pid
        self.log_path = folder / "server.log"

    def kill(self) -> None:
        self.pid = None


class Relay:
    def __init__(self) -> None:
        self.cut: str | None = None

    def start_cut(self, how: str) -> None:
        self.cut = how

    def restore(self) -> None:
        self.cut = None


class Relays:
    def __init__(self) -> None:
        self.made: dict[tuple[str, str], Relay] = {}

    def to(self, role: str, service: str) -> tuple[Relay, ...]:
        return (self.made.setdefault((role, service), Relay()),)


class Client:
    """A publisher that delivers at its next poll."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.sent: list[tuple[int, bytes]] = []
        self._reports: list[Callable[[Delivery], None]] = []

    def send(self, topic: str, value: bytes, *, partition: int, on_delivery: Callable[[Delivery], None]) -> None:
        self.sent.append((partition, value))
        self._reports.append(on_delivery)

    def poll(self, timeout_s: float = 0.0) -> list[Any]:
        for at, report in enumerate(self._reports):
            report(Delivery("", at))
        self._reports.clear()
        return []

    def close(self) -> None:
        pass


class Injector(FaultInjector):
    """Injects the faults it is given."""

    planned: Sequence[Fault] = ()

    def plan_for(self, targets: Collection[FaultTarget], brokers: int) -> tuple[Fault, ...]:
        return tuple(self.planned)


class Drill:
    """A job with all its processes and services, and the faults that are injected into it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, job: str = JOB, standby: bool = False) -> None:
        self.now_s = 100.0
        self.said: list[str] = []
        self.killed: list[tuple[int, int]] = []  # of `os.kill`: process id and signal
        self.clients: list[Client] = []
        monkeypatch.setattr(os, "kill", lambda pid, number: self.killed.append((pid, number)))
        monkeypatch.setattr(actions, "children_of", lambda pid: list(STAGES))
        monkeypatch.setattr(stream, "Publisher", self._client)
        self.config: JobConfig = parse(job)
        self.relays = Relays()
        self.injector = Injector(
            self.config, faults=1, seed=0, say=self.said.append, relays=cast(Any, self.relays), run_folder=folder,
            standby=standby, clock=lambda: self.now_s,
        )  # fmt: skip
        self.started: dict[str, list[Process]] = {}
        self.supervisor = Supervisor(self._launch, clock=lambda: self.now_s)
        for role in ROLES:
            self.supervisor.start(RoleSpec(role, "", folder / "log"))
        self.redis, self.nodes = Server(50, folder), [Server(60, folder), Server(61, folder), Server(62, folder)]
        kafka = SimpleNamespace(nodes=tuple(self.nodes))
        services = Services("127.0.0.1:1", "redis://127.0.0.1:2/0")
        self.stack = Stack(services, "local", "local", [], cast(Any, kafka), cast(Any, self.redis))
        self.injector.feed(record_builders.update(1, 1, n_samples=8, samples_total=8, time_s=self.now_s))

    def _client(self, *args: Any, **settings: Any) -> Client:
        self.clients.append(Client())
        return self.clients[-1]

    def _launch(self, spec: RoleSpec) -> Process:
        processes = self.started.setdefault(spec.name, [])
        processes.append(Process(100 * (1 + ROLES.index(spec.name)) + len(processes)))
        return processes[-1]

    def inject(self, *faults: Fault) -> None:
        self.injector.planned = [replace(entry, number=number) for number, entry in enumerate(faults, 1)]
        for _ in faults:
            self.tick()

    def tick(self, after_s: float = 0.0) -> None:
        self.now_s += after_s
        self.injector.tick(self.supervisor, self.stack)

    def signals(self, role: str) -> list[int]:
        """The signals that the first process of a role was sent."""
        return self.started[role][0].signals

    @property
    def injected(self) -> list[InjectedFault]:
        return self.injector._recoveries.injected

    @property
    def num_injected(self) -> int:
        return len(self.injected)


@pytest.fixture
def drill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drill:
    return Drill(tmp_path, monkeypatch)


def test_every_kind_of_fault_has_an_action() -> None:
    assert {kind.action for kind in FAULT_KINDS} == actions.ACTIONS.keys()


# --- processes


@pytest.mark.parametrize("kind", ["worker_kill", "ps_kill", "producer_kill", "evaluator_kill"])
def test_kill_is_sigkill_and_counts_as_no_failure_of_the_role(drill: Drill, kind: str) -> None:
    role = fault(kind).role
    drill.inject(fault(kind))
    assert drill.signals(role) == [KILL]
    assert role not in {name for name, process in drill.supervisor.handles().items() if process.poll() is None}
    assert drill.said == [f"fault 1 of 1: kill {role}"]


@pytest.mark.parametrize("kind", ["worker_freeze", "ps_freeze"])
def test_a_frozen_process_continues_after_its_time(drill: Drill, kind: str) -> None:
    role = fault(kind).role
    drill.inject(fault(kind))
    drill.tick(HOLD_S - 0.1)
    assert drill.signals(role) == [STOP]
    assert not drill.injector.is_recovered
    drill.tick(0.2)
    assert drill.signals(role) == [STOP, CONTINUE]


@pytest.mark.parametrize("kind", ["worker_zombie", "ps_zombie"])
def test_a_zombie_has_a_successor_and_exits_after_it_continues(drill: Drill, kind: str) -> None:
    role = fault(kind).role
    drill.inject(fault(kind))
    zombie, successor = drill.started[role]
    assert drill.supervisor.handles()[role] is successor
    drill.tick(HOLD_S)
    assert zombie.signals == [STOP, CONTINUE]
    zombie.code = 1
    drill.tick()
    assert drill.supervisor.handles()[role] is successor
    assert len(drill.started[role]) == 2


def test_a_zombie_whose_successor_has_left_is_the_role_again(drill: Drill) -> None:
    drill.inject(fault("worker_zombie"))
    zombie, successor = drill.started["worker-1"]
    drill.tick(HOLD_S)
    successor.code = 0
    drill.supervisor.poll()
    drill.tick()
    assert drill.supervisor.handles()["worker-1"] is zombie


def test_a_zombie_that_does_not_exit_fails_the_drill(drill: Drill) -> None:
    drill.inject(fault("worker_zombie"))
    drill.tick(HOLD_S)
    with pytest.raises(DrillError, match=r"worker-1 \(process 400\) was replaced: expected its exit within 90 s"):
        drill.tick(91.0)


@pytest.mark.parametrize("kind", ["worker_preempt", "ps_preempt", "producer_preempt"])
def test_a_preempted_process_is_asked_to_leave_and_then_replaced(drill: Drill, kind: str) -> None:
    role = fault(kind).role
    drill.inject(fault(kind))
    assert drill.signals(role) == [TERMINATE]
    assert role not in drill.supervisor.handles()
    drill.started[role][0].code = 0
    drill.tick()
    assert drill.supervisor.handles()[role] is drill.started[role][1]


def test_a_preempted_process_that_stays_fails_the_drill(drill: Drill) -> None:
    drill.inject(fault("worker_preempt"))
    with pytest.raises(DrillError, match="was asked to leave: expected its exit"):
        drill.tick(91.0)


def test_of_two_servers_the_leader_is_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drill = Drill(tmp_path, monkeypatch, standby=True)
    drill.inject(fault("ps_kill"))
    assert drill.num_injected == 0  # who leads is not known yet
    leader = drill.started["ps-standby"][0]
    drill.injector.feed(server_status(term=2, pid=leader.pid))
    drill.tick()
    assert leader.signals == [KILL]


# --- services and connections


def test_a_service_is_killed(drill: Drill) -> None:
    drill.inject(fault("redis_kill"), fault("kafka_kill"), fault("broker_kill", broker=2))
    assert drill.redis.pid is None
    assert [node.pid for node in drill.nodes] == [None, 61, None]
    assert drill.killed == []


def test_a_service_is_frozen_and_continues(drill: Drill) -> None:
    drill.inject(fault("redis_freeze"), fault("broker_freeze", broker=1))
    assert drill.killed == [(50, STOP), (61, STOP)]
    drill.tick(HOLD_S)
    assert drill.killed[2:] == [(50, CONTINUE), (61, CONTINUE)]


def test_kafka_of_one_broker_is_frozen(drill: Drill) -> None:
    drill.inject(fault("kafka_freeze"))
    assert drill.killed == [(60, STOP)]


@pytest.mark.parametrize(
    ("kind", "role", "service"),
    [
        ("worker_cut_kafka", "worker-1", "kafka"), ("worker_cut_redis", "worker-1", "redis"),
        ("ps_cut_kafka", "ps", "kafka"), ("ps_cut_redis", "ps", "redis"), ("producer_cut_kafka", "producer", "kafka"),
        ("worker_cut_control", "worker-1", "control"), ("ps_cut_control", "ps", "control"),
    ],
)  # fmt: skip
def test_a_cut_is_of_one_role_and_one_service(drill: Drill, kind: str, role: str, service: str) -> None:
    drill.inject(fault(kind, cut="reset"))
    assert {place for place, relay in drill.relays.made.items() if relay.cut == "reset"} == {(role, service)}
    assert drill.said == [f"fault 1 of 1: cut {role} from {service} (reset, 2.0 s)"]
    drill.tick(HOLD_S)
    assert not any(relay.cut for relay in drill.relays.made.values())


# --- stages


@pytest.fixture
def pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drill:
    return Drill(tmp_path, monkeypatch, job=f"{JOB}{PIPELINES}")


def test_a_stage_is_killed_or_frozen_alone(pipelines: Drill) -> None:
    pipelines.inject(fault("stage_kill", stage=1))
    assert pipelines.killed == [(72, KILL)]
    assert pipelines.said == ["fault 1 of 1: kill stage 2 of worker-1"]
    assert pipelines.signals("worker-1") == []


def test_a_frozen_stage_continues(pipelines: Drill) -> None:
    pipelines.inject(fault("stage_freeze", stage=0))
    pipelines.tick(HOLD_S)
    assert pipelines.killed == [(71, STOP), (71, CONTINUE)]


def test_the_worker_of_a_preempted_stage_leaves(pipelines: Drill) -> None:
    pipelines.inject(fault("stage_preempt", stage=1))
    assert pipelines.killed == [(72, TERMINATE)]
    assert "worker-1" not in pipelines.supervisor.handles()
    pipelines.started["worker-1"][0].code = 0
    pipelines.tick()
    assert len(pipelines.started["worker-1"]) == 2


@pytest.mark.parametrize("first", ["stage_freeze", "worker_freeze"])
def test_a_stage_waits_while_its_worker_or_a_stage_of_it_is_frozen(pipelines: Drill, first: str) -> None:
    pipelines.inject(fault(first), fault("stage_kill", stage=1))
    assert pipelines.num_injected == 1
    pipelines.tick(HOLD_S)
    assert pipelines.num_injected == 2


def test_a_worker_whose_stages_are_starting_is_left_alone(pipelines: Drill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "children_of", lambda pid: [71])
    pipelines.inject(fault("stage_kill"))
    assert pipelines.num_injected == 0


# --- data


def test_poison_is_sent_to_its_stream(drill: Drill) -> None:
    drill.inject(fault("stream_poison"))
    drill.tick()
    ((partition, value),) = [sent for client in drill.clients for sent in client.sent]
    assert (partition, struct.unpack_from("<f", value, 80)) == (1, (2,)), "a class that does not exist"
    (entry,) = drill.injected
    assert entry.poison is not None
    assert (entry.poison.records, entry.poison.offsets) == (1, {0})


def test_truncation_deletes_what_is_durable(drill: Drill, monkeypatch: pytest.MonkeyPatch) -> None:
    durable_until: dict[int, int | None] = {1: None}
    monkeypatch.setattr(stream.SamplesTopic, "truncate", lambda self, partition: durable_until[partition])
    drill.inject(fault("stream_truncate"))
    assert drill.num_injected == 0  # nothing is durable yet
    durable_until[1] = 77
    drill.tick()
    assert drill.said == ["fault 1 of 1: truncate stream-1 below offset 77"]


def test_the_control_streams_are_deleted(drill: Drill, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [False, True]
    monkeypatch.setattr(actions, "delete_keys", lambda services, pattern: answers.pop(0))
    drill.inject(fault("redis_delete_streams"))
    assert drill.num_injected == 0  # Redis does not answer
    drill.tick()
    assert drill.num_injected == 1


# --- what a fault waits for


def test_a_process_that_is_frozen_or_gone_is_not_hit(drill: Drill) -> None:
    drill.inject(fault("worker_freeze"), fault("worker_kill"))
    assert drill.num_injected == 1
    drill.tick(HOLD_S)
    assert drill.signals("worker-1") == [STOP, CONTINUE, KILL]


def test_a_service_that_is_down_is_not_hit(drill: Drill) -> None:
    drill.redis.pid = None
    drill.inject(fault("redis_kill"))
    assert drill.num_injected == 0


def test_a_process_that_leaves_is_not_hit_and_one_whose_zombie_lives_is(drill: Drill) -> None:
    drill.inject(fault("worker_preempt"), fault("worker_kill"))
    assert drill.num_injected == 1


def test_one_cut_of_control_links_at_a_time(drill: Drill) -> None:
    drill.inject(fault("ps_cut_control"), fault("worker_cut_control"))
    assert drill.num_injected == 1
    drill.tick(HOLD_S)
    assert drill.num_injected == 2


def test_a_frozen_kafka_is_not_asked_for_anything(drill: Drill) -> None:
    drill.inject(fault("broker_freeze", broker=1), fault("stream_truncate"))
    assert drill.num_injected == 1


def test_close_lets_frozen_processes_continue_and_kills_those_that_leave(drill: Drill) -> None:
    drill.inject(fault("worker_freeze", worker=0), fault("worker_preempt"), fault("ps_cut_redis"))
    drill.injector.close()
    drill.injector.close()
    assert drill.signals("worker-0") == [STOP, CONTINUE]
    assert drill.signals("worker-1") == [TERMINATE, KILL]
    assert not any(relay.cut for relay in drill.relays.made.values())


def test_no_recovery_in_time_fails_the_drill(drill: Drill) -> None:
    drill.inject(fault("worker_kill"))
    with pytest.raises(DrillError, match=r"no update for 301 s after fault 1 \(worker_kill of worker-1\)"):
        drill.tick(301.0)
