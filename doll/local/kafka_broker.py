"""Run a local Apache Kafka on loopback: one node, or a cluster that tolerates the failure of one node.

A node is a broker and a KRaft controller in one Java process. A cluster replicates topics to all of its nodes.
"""

from __future__ import annotations

import base64
import re
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from doll.errors import ConfigError, ServiceUnavailableError
from doll.kafka.readiness import is_ready
from doll.local import kafka_jars, processes
from doll.process.files import write_atomically

_BIND_TRIES: Final = 5
# C1 compiler only: in 160 s under load C2 never recovered its cost (114 ms of CPU per second without, 134 with it).
# A small initial heap: Java's default, 1/64 of the machine's memory, fills with garbage for hours before a collection.
_JVM_FLAGS: Final = (
    "-Xms64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "-XX:-UsePerfData",
)  # fmt: skip
_HEAP_MB: Final = 512
_CLUSTER_HEAP_MB: Final = 256
_CLUSTER_GRACE_S: Final = 5.0
_EARLY_EXIT_S: Final = 3.0  # no node starts faster than this
_MAX_EARLY_EXITS: Final = 5

# Few threads, and no idle records in the metadata log: 15 ms of CPU per second when idle, instead of 25.
# Broker sessions of 3 s: with Kafka's default of 9 s a killed broker serves again after 14 s instead of 6.
_PROPERTIES: Final = """\
process.roles=broker,controller
node.id={node}
controller.quorum.voters={voters}
listeners={listeners}
advertised.listeners={advertised}
inter.broker.listener.name=PLAINTEXT
controller.listener.names=CONTROLLER
listener.security.protocol.map={protocols}
log.dirs={folder}/data
auto.create.topics.enable=false
delete.topic.enable=true
num.partitions=1
default.replication.factor={replicas}
min.insync.replicas={in_sync}
offsets.topic.replication.factor={replicas}
offsets.topic.num.partitions=1
transaction.state.log.replication.factor={replicas}
transaction.state.log.min.isr={in_sync}
transaction.state.log.num.partitions=1
share.coordinator.state.topic.replication.factor={replicas}
share.coordinator.state.topic.min.isr={in_sync}
group.initial.rebalance.delay.ms=0
broker.session.timeout.ms={session_ms}
broker.heartbeat.interval.ms={heartbeat_ms}
message.max.bytes=33554432
replica.fetch.max.bytes=33554432
log.segment.bytes=134217728
log.retention.check.interval.ms=30000
log.cleaner.dedupe.buffer.size=4194304
num.network.threads=1
num.io.threads=2
background.threads=2
group.coordinator.threads=1
share.coordinator.threads=1
metadata.max.idle.interval.ms=0
"""
# Failure detection. Writes wait until the controller has removed a dead replica from the ISR and, if the controller
# itself died, for an election before that: with Kafka's defaults of 9 s and 2 s a job would stall for 12 s.
_CLUSTER_PROPERTIES: Final = """\
controller.quorum.fetch.timeout.ms=800
controller.quorum.election.timeout.ms=400
controller.quorum.election.backoff.max.ms=200
controller.quorum.request.timeout.ms=1000
"""


def replication_settings(brokers: int) -> dict[str, int]:
    """Return the settings that depend on the number of brokers."""
    session_ms, heartbeat_ms = (3000, 1000) if brokers == 1 else (1000, 200)
    return {
        "replicas": brokers, "in_sync": max(1, brokers - 1), "session_ms": session_ms, "heartbeat_ms": heartbeat_ms,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class ClusterMember:
    """The position of a node in a cluster."""

    node: int  # number of the node, from 1
    controllers: tuple[int, ...]  # the controller port of each node
    cluster_id: str  # cluster id with which all data folders are formatted


class LocalKafka(processes.LocalServer):
    """One Kafka node.

    The data of the node (in `folder`) and its ports persist across `stop`, `kill` and `restart`; a restart takes about
    7 s. If the folder already contains data, the node serves them.

    Args:
        folder: folder for data, settings and log of the node.
        say: function that gets one line of text when a step takes long.
        advertised_ports: loopback ports that additional plaintext listeners advertise, by the listener's name (letters,
            digits, `-`); a relay on such a port must forward to `listener_port`.
        member: position of the node in a cluster.
        host: host at which a single node listens.
    """

    _grace_s: ClassVar[float] = 10.0

    def __init__(
        self,
        folder: Path,
        *,
        say: Callable[[str], None] = lambda text: None,
        advertised_ports: Mapping[str, int] | None = None,
        member: ClusterMember | None = None,
        host: processes.Host = processes.THIS_HOST,
    ) -> None:
        """Raise ConfigError if Kafka cannot have its data in `folder`."""
        self._folder = folder.resolve()
        if "," in str(self._folder):  # Kafka would put what follows the comma below the working directory
            raise ConfigError(f"{self._folder}: expected a path without a comma: Kafka takes it for two; move the run")
        super().__init__(self._folder / "kafka.log")
        self._say = say
        self._advertised_ports = dict(advertised_ports or {})
        self._listener_ports: dict[str, int] = {}
        self._cluster_id = ""
        self._member = member
        self._host = host

    @property
    def cluster_id(self) -> str:
        """The cluster id of the data folder; empty before the first start."""
        return self._cluster_id

    def dead_nodes(self) -> list[int]:
        """Return the numbers of exited nodes, as in `KafkaCluster`: [1] if the process has exited."""
        return [] if self.pid is not None else [1]

    def restart_dead(self) -> None:
        """Restart the node if its process has exited, and wait until it answers; see `KafkaCluster`."""
        if self.pid is None:
            self.start()

    @property
    def nodes(self) -> tuple[LocalKafka, ...]:
        """The node itself, in the form of the nodes of a `KafkaCluster`."""
        return (self,)

    @property
    def address(self) -> str:
        """The address `127.0.0.1:port`; empty before the first start."""
        return f"{self._host.address}:{self._port}" if self._port else ""

    def listener_port(self, name: str) -> int:
        """Return the port of the listener `name` of `advertised_ports`, which is known after the first start."""
        return self._listener_ports[name]

    def start(self) -> None:
        """Start the node, and return after it has acknowledged a record and committed an offset."""
        for _ in range(1 if self._port else _BIND_TRIES):
            self.launch()
            if _answer(self, self.cluster_id):
                return
            if "Address already in use" not in processes.tail(self.log_path, 200):
                break
            self._port = 0  # another process took a port meanwhile: choose others
        raise ServiceUnavailableError(
            f"Kafka does not start; the end of {self.log_path}:\n{processes.tail(self.log_path)}"
        )

    def launch(self) -> None:
        """Start the process without waiting. It answers after it has joined its cluster. Raise ServiceUnavailableError
        if Java or the jars are missing, or its data folder cannot be formatted."""
        jars = kafka_jars.ensure(self._say)
        if not self._port:
            self._configure()
            self._format(jars)
        self._process = self._java(jars, "kafka.Kafka", [str(self._properties)])

    def _configure(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self.log_path.unlink(missing_ok=True)
        self._port = processes.free_port()
        self._listener_ports = {name: processes.free_port() for name in self._advertised_ports}
        controllers = self._member.controllers if self._member is not None else (processes.free_port(),)
        node, several = (self._member.node, True) if self._member is not None else (1, False)
        controller_port = controllers[node - 1]
        listeners = {"PLAINTEXT": self._port, "CONTROLLER": controller_port}  # the probe and the broker use the first
        advertised = {"PLAINTEXT": self._port}
        named = {name: name.upper().replace("-", "_") for name in self._advertised_ports}
        listeners |= {named[name]: port for name, port in self._listener_ports.items()}
        advertised |= {named[name]: port for name, port in self._advertised_ports.items()}
        text = _PROPERTIES.format(
            node=node, folder=_escaped(self._folder),
            voters=",".join(f"{number}@{self._host.address}:{port}" for number, port in enumerate(controllers, 1)),
            listeners=self._endpoints(listeners), advertised=self._endpoints(advertised),
            protocols=",".join(f"{name}:PLAINTEXT" for name in listeners),
            **replication_settings(len(controllers)),
        )  # fmt: skip
        text += _CLUSTER_PROPERTIES if several else ""
        # One network thread per listener, for its one client, instead of Kafka's three.
        text += "".join(f"listener.name.{name.lower()}.num.network.threads=1\n" for name in named.values())
        self._properties.write_text(text, encoding="ascii")

    def _format(self, jars: Path) -> None:
        """Format an empty data folder. Existing data also get a new cluster id, because another broker may serve a copy
        of the data at the same time. Workers of both may use the same Redis, and the cluster id distinguishes their
        slot leases."""
        meta = self._folder / "data" / "meta.properties"
        self._cluster_id = self._member.cluster_id if self._member is not None else new_cluster_id()
        if meta.is_file():
            text = re.sub("(?m)^cluster.id=.*$", f"cluster.id={self._cluster_id}", meta.read_text(encoding="utf-8"))
            write_atomically(meta, text, durable=True)
            return
        # With `=`: one id in 64 begins with a dash and would be parsed as an option.
        arguments = ["format", f"--cluster-id={self._cluster_id}", "-c", str(self._properties)]
        if self._java(jars, "kafka.tools.StorageTool", arguments).wait() != 0:
            raise ServiceUnavailableError(f"Kafka cannot format its data folder:\n{processes.tail(self.log_path)}")

    def _endpoints(self, listeners: Mapping[str, int]) -> str:
        return ",".join(f"{name}://{self._host.address}:{port}" for name, port in listeners.items())

    @property
    def _properties(self) -> Path:
        return self._folder / "server.properties"

    def _java(self, jars: Path, main_class: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        java = kafka_jars.find_java()
        assert java is not None, "kafka_jars.ensure has checked for it"
        quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Dorg.slf4j.simpleLogger.showDateTime=true"
        heap = f"-Xmx{_HEAP_MB if self._member is None else _CLUSTER_HEAP_MB}m"
        command = [*self._host.prefix, java, heap, *_JVM_FLAGS, *quiet, "-cp", f"{jars}/*", main_class, *arguments]
        return processes.spawn(command, self.log_path, {"LC_ALL": "C.UTF-8"})  # Java decodes paths with this encoding


class KafkaCluster(processes.Server):
    """A cluster that replicates topics to all of its nodes. `min.insync.replicas` is the number of nodes minus 1.

    The data (in `folder`) and the ports persist across crashes. A node has a heap of at most 256 MB, and takes 210 MB
    after its start.

    Args:
        folder: folder for data, settings and logs of the nodes.
        advertised_ports: one mapping for each node, as in `LocalKafka`. A cluster needs 3 nodes to tolerate the failure
            of one.
        say: function that gets one line of text when a step takes long.
    """

    def __init__(
        self,
        folder: Path,
        advertised_ports: Sequence[Mapping[str, int]],
        *,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        if len(advertised_ports) < 2:
            raise ValueError(f"expected at least 2 nodes, got {len(advertised_ports)}")
        self._folder = folder
        self._advertised_ports = tuple(advertised_ports)
        self._say = say
        self._restarted_s: dict[int, float] = {}
        self._early_exits = 0
        self.nodes: tuple[LocalKafka, ...] = ()

    @property
    def address(self) -> str:
        """The address `127.0.0.1:port` of each node, separated by commas; empty before the start."""
        return ",".join(node.address for node in self.nodes)

    def start(self) -> None:
        """Start all nodes, and return after they have acknowledged a record and committed an offset."""
        for _ in range(_BIND_TRIES):
            cluster_id = new_cluster_id()
            ports = tuple(processes.free_port() for _ in self._advertised_ports)
            self.nodes = tuple(
                LocalKafka(
                    node_folder(self._folder, number), say=self._say, advertised_ports=advertised_ports, member=member
                )
                for number, advertised_ports in enumerate(self._advertised_ports, 1)
                for member in (ClusterMember(number, ports, cluster_id),)
            )
            try:
                for node in self.nodes:
                    node.launch()
            except BaseException:
                self.kill()
                raise
            if _answer(self, cluster_id):
                return
            logs = [processes.tail(node.log_path, 200) for node in self.nodes]
            if not any("Address already in use" in log for log in logs):
                break  # otherwise another process took a port meanwhile: choose others
        log_tails = "\n".join(f"the end of {node.log_path}:\n{processes.tail(node.log_path)}" for node in self.nodes)
        raise ServiceUnavailableError(f"the Kafka cluster does not start; {log_tails}")

    def dead_nodes(self) -> list[int]:
        """Return the numbers, from 1, of the nodes whose process has exited."""
        return [number for number, node in enumerate(self.nodes, 1) if node.pid is None]

    def restart_dead(self) -> None:
        """Restart each node whose process has exited, without waiting for it, because the others answer. Raise
        ServiceUnavailableError, which contains a log, if nodes repeatedly exit right after their start."""
        for number in self.dead_nodes():
            node = self.nodes[number - 1]
            now_s = time.monotonic()
            # A drill may kill a node while it starts, so only several early exits in a row are an error.
            early = now_s - self._restarted_s.get(number, float("-inf")) < _EARLY_EXIT_S
            self._early_exits = self._early_exits + 1 if early else 0
            if self._early_exits >= _MAX_EARLY_EXITS:
                raise ServiceUnavailableError(
                    f"Kafka's node {number} exits right after its start; the end of {node.log_path}:\n"
                    f"{processes.tail(node.log_path)}"
                )
            self._restarted_s[number] = now_s
            node.launch()

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def stop(self) -> None:
        # All at the same time: a single remaining node would wait for a quorum.
        for node in self.nodes:
            node.terminate()
        deadline_s = time.monotonic() + _CLUSTER_GRACE_S
        for node in self.nodes:
            node.stop(max(0.0, deadline_s - time.monotonic()))


def _answer(brokers: LocalKafka | KafkaCluster, cluster_id: str) -> bool:
    """Return whether all nodes answer; False if a process exits or does not answer in time. Then kill all of them."""
    answers = False
    try:
        answers = is_ready(brokers.address, cluster_id, lambda: not brokers.dead_nodes(), len(brokers.nodes))
    finally:
        if not answers:
            brokers.kill()
    return answers


def _escaped(path: Path) -> str:
    """Return a path in the format of Java's properties files: Latin-1, with escapes that begin with a backslash."""
    units = str(path).encode("utf-16-be", "surrogatepass")
    pairs = (int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2))
    return "".join(chr(unit) if 32 <= unit < 127 and unit != ord("\\") else f"\\u{unit:04x}" for unit in pairs)


def node_folder(folder: Path, number: int) -> Path:
    """Return the folder of node `number`, counted from 1."""
    return folder / f"node-{number}"


def nodes_with_data(folder: Path) -> int:
    """Return the number of nodes of an earlier cluster with data in this folder."""
    number = 0
    while (node_folder(folder, number + 1) / "data" / "meta.properties").is_file():
        number += 1
    return number


def new_cluster_id() -> str:
    """Return a random cluster id in Kafka's format (base64 of a UUID)."""
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
