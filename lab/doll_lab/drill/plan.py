"""The plan of a drill: faults, their order and the times between them. Pure: a seed determines the plan."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal

FaultTarget = Literal[
    "worker", "stage", "ps", "shard", "producer", "evaluator", "redis", "kafka", "broker", "stream"
]  # fmt: skip
FaultAction = Literal[
    "kill", "freeze", "zombie", "preempt", "cut_kafka", "cut_redis", "cut_control", "delete_streams", "poison",
    "truncate",
]  # fmt: skip
Cut = Literal["silent", "reset", "removed"]
Service = Literal["kafka", "redis", "control"]
Link = Literal["local", "redis"]  # channel that carries grants and pushes besides Kafka

_CUTS: Final[tuple[Cut, ...]] = ("silent", "reset")
_CONTROL_CUTS: Final[tuple[Cut, ...]] = ("silent", "reset", "removed")

_CUT_FROM: Final[Mapping[FaultAction, Service]] = {
    "cut_kafka": "kafka", "cut_redis": "redis", "cut_control": "control",
}  # fmt: skip
_BROKEN_LINKS: Final[Mapping[FaultAction, Link]] = {"cut_control": "local", "delete_streams": "redis"}

# Share of the faults that do not wait for the recovery from the previous one.
_OVERLAP_SHARE: Final = 0.2
_GAP_S: Final = (0.3, 1.5)


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One kind of fault.

    Attributes:
        action: kill is SIGKILL; freeze is SIGSTOP and later SIGCONT; zombie is a freeze during which a successor
            starts; preempt is SIGTERM, and a successor when the process has exited; cut_kafka and cut_redis break this
            process's connections to that service only; cut_control breaks a worker's link to the server's socket, or
            the server's links to all workers; delete_streams deletes the job's control streams in Redis; poison sends
            a record that cannot be decoded or that breaks the model; truncate deletes records of a stream that are
            durable in the model.
        weight: relative frequency with which it is drawn.
        hold_s: minimum and maximum duration of a freeze or cut, in seconds.
    """

    target: FaultTarget
    action: FaultAction
    weight: float
    hold_s: tuple[float, float] = (0.0, 0.0)

    @property
    def name(self) -> str:
        return f"{self.target}_{self.action}"

    @property
    def cut_from(self) -> Service | None:
        """The service that its target is disconnected from, if any. "control": the control socket of the server."""
        return _CUT_FROM.get(self.action)

    @property
    def link(self) -> Link | None:
        """The control link that only this kind breaks: it is possible only if the job has such links."""
        return _BROKEN_LINKS.get(self.action)


FAULT_KINDS: Final = (
    FaultKind("worker", "kill", 30),
    FaultKind("worker", "freeze", 8, (1.0, 6.0)),
    FaultKind("worker", "zombie", 8, (1.0, 3.0)),
    FaultKind("worker", "preempt", 8),
    FaultKind("ps", "kill", 15),
    FaultKind("ps", "freeze", 5, (0.5, 3.0)),
    FaultKind("ps", "zombie", 5, (1.0, 3.0)),
    FaultKind("ps", "preempt", 4),
    FaultKind("redis", "kill", 8),
    FaultKind("redis", "freeze", 3, (0.5, 3.0)),
    FaultKind("kafka", "kill", 4),
    FaultKind("kafka", "freeze", 3, (0.5, 4.0)),
    FaultKind("worker", "cut_kafka", 6, (1.0, 8.0)),
    FaultKind("worker", "cut_redis", 5, (1.0, 6.0)),
    FaultKind("ps", "cut_kafka", 4, (0.5, 4.0)),
    FaultKind("ps", "cut_redis", 4, (0.5, 4.0)),
    FaultKind("producer", "cut_kafka", 2, (0.5, 3.0)),
    FaultKind("producer", "kill", 2),
    FaultKind("evaluator", "kill", 2),
    FaultKind("producer", "preempt", 2),
    FaultKind("broker", "kill", 6),
    FaultKind("broker", "freeze", 3, (0.5, 4.0)),
    FaultKind("stream", "poison", 4),
    FaultKind("stream", "truncate", 3),
    FaultKind("worker", "cut_control", 17, (1.0, 8.0)),
    FaultKind("ps", "cut_control", 14, (1.0, 8.0)),
    FaultKind("redis", "delete_streams", 7),
    # For a worker that is a pipeline. If a stage is frozen longer than its worker waits, the worker also ends.
    FaultKind("stage", "kill", 25),
    FaultKind("stage", "freeze", 10, (1.0, 12.0)),
    FaultKind("stage", "preempt", 8),
    FaultKind("shard", "kill", 20),
    FaultKind("shard", "freeze", 8, (1.0, 10.0)),
    FaultKind("shard", "preempt", 6),
    FaultKind("shard", "cut_redis", 6, (1.0, 8.0)),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        number: number of the fault, from 1.
        worker: number of the worker or stream, for kinds that target one.
        gap_s: minimum time after the previous fault or, unless `overlapping`, after the recovery from it.
        hold_s: duration of the freeze or cut, in seconds.
        cut: effect of a cut on connections; see `doll_lab.drill.relay`.
        overlapping: whether it does not wait for the recovery from the previous fault.
        broker: number of the broker, from 0, for kinds that target one.
        stage: number of the worker's stage, from 0, for kinds that target one.
        shard: number of the shard, from 0, for kinds that target one.
    """

    number: int
    kind: FaultKind
    worker: int
    gap_s: float
    hold_s: float
    overlapping: bool
    cut: Cut = "silent"
    broker: int = 0
    stage: int = 0
    shard: int = 0

    @property
    def role(self) -> str:
        """The name of the process (`worker-3`, `ps`, `redis`, `broker-2`) or stream (`stream-3`)."""
        match self.kind.target:
            case "stage":
                return f"worker-{self.worker}"
            case "worker" | "stream":
                return f"{self.kind.target}-{self.worker}"
            case "broker":
                return f"broker-{self.broker + 1}"
            case "shard":
                return f"shard-{self.shard}"
            case _:
                return self.kind.target


def make_plan(
    faults: int,
    seed: int,
    *,
    workers: int,
    targets: Collection[FaultTarget],
    links: Collection[Link] = (),
    standby: bool = False,
    brokers: int = 1,
    stages: int = 0,
    shards: int = 0,
    without: Collection[str] = (),
    only: FaultTarget | None = None,
) -> tuple[Fault, ...]:
    """Draw `faults` faults on `targets`. Each possible kind is drawn once, heaviest first; the rest is drawn by weight.

    Args:
        targets: processes that may fail. Connections are cut only to services in `targets`. If there are several
            brokers, one at a time fails, never Kafka as a whole.
        only: the only target of faults; None: all targets.
        links: kinds of control links that the job uses.
        stages: number of stages of each worker that is a pipeline; 0: no worker is.
        shards: number of shards of the model; 0: it is not divided.
        standby: whether the job has a standby parameter server, so that no other process may start a successor.
        without: names of kinds to exclude.

    Raises:
        ValueError: fewer than one fault, or no possible kind.
    """
    kinds = [
        kind
        for kind in FAULT_KINDS
        if kind.target in targets
        and (kind.link in links if kind.link is not None else kind.cut_from is None or kind.cut_from in targets)
        and not (standby and kind.name == "ps_zombie")
        and not (brokers > 1 and kind.target == "kafka")
        and not (brokers == 1 and kind.target == "broker")
        and not (kind.target == "stage" and not stages)
        and not (kind.target == "shard" and not shards)
        and kind.name not in without
        and (only is None or kind.target == only)
    ]
    if faults < 1 or not kinds:
        raise ValueError(f"expected at least one fault and one target, got {faults} and {only or sorted(targets)}")
    rng = random.Random(seed)

    drawn = sorted(kinds, key=lambda kind: -kind.weight)[:faults]
    rng.shuffle(drawn)
    drawn += rng.choices(kinds, [kind.weight for kind in kinds], k=faults - len(drawn))
    return tuple(
        Fault(
            number=number,
            kind=kind,
            worker=rng.randrange(workers),
            gap_s=rng.uniform(*_GAP_S),
            hold_s=rng.uniform(*kind.hold_s),
            overlapping=rng.random() < _OVERLAP_SHARE,
            cut=rng.choice(_CONTROL_CUTS if kind.cut_from == "control" else _CUTS),
            broker=rng.randrange(brokers),
            stage=rng.randrange(stages) if stages else 0,
            shard=rng.randrange(shards) if shards else 0,
        )
        for number, kind in enumerate(drawn, 1)
    )
