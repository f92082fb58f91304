"""Which devices of a fleet form a virtual worker together (the HetPipe paper, section 5), and how fast those are. Pure.

Rules of the paper, for groups of k devices each:

- `node_partition` (NP): a virtual worker has devices of one node. Little traffic between nodes; the slowest node sets
  the pace.
- `equal_distribution` (ED): all virtual workers have the same devices. Equal pace; most traffic between nodes.
- `hybrid` (HD): k/2 strong devices with k/2 weak ones, so that the sums are about equal.

`doll_lab.pipelines.allocation_search` looks for a better grouping than these.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from doll.errors import ConfigError
from doll.pipeline.planner.partition import DoesNotFitError, MemoryRule
from doll.pipeline.profiling.profile import Device, Profile

from doll_lab.pipelines.network import Network
from doll_lab.pipelines.partition import Partitioning, best_partition
from doll_lab.pipelines.schedule import StageTimes, simulate

Group = tuple[Device, ...]
Grouping = tuple[Group, ...]
Kind = tuple[str, float, float]
GroupKey = tuple[tuple[Kind, ...], ...]
"""The kinds of a group's devices, node by node: groups with the same key are equally fast."""


@dataclass(frozen=True)
class VirtualWorker:
    """A group of devices with a part of the model on each.

    Attributes:
        partition: its stages, first stage first.
        rate: minibatches per second of its pipeline, where it waits for nobody.
    """

    partition: Partitioning
    rate: float

    @property
    def devices(self) -> Group:
        """First stage first."""
        return tuple(stage.device for stage in self.partition.stages)

    @property
    def stage_times(self) -> tuple[StageTimes, ...]:
        return stage_times(self.partition)


def stage_times(partition: Partitioning) -> tuple[StageTimes, ...]:
    """What the simulator needs of each stage; the time to receive is part of a task."""
    return tuple(
        StageTimes(stage.forward_s + stage.receive_forward_s, stage.backward_s + stage.receive_backward_s)
        for stage in partition.stages
    )


# --- the rules of the paper ------------------------------------------------------------------------------------------


def node_partition(fleet: Sequence[Device], k: int) -> Grouping:
    """NP: groups of k devices of one node, the fastest of a node together.

    Raises:
        ConfigError: a node's devices do not make whole groups.
    """
    _check(fleet, k)
    nodes = defaultdict[str, list[Device]](list)
    for device in fleet:
        nodes[device.node].append(device)
    for node, devices in nodes.items():
        if len(devices) % k:
            raise ConfigError(
                f"NP: expected a multiple of {k} devices on each node, got {len(devices)} on {node!r}: choose another "
                "number of devices per virtual worker"
            )
    return tuple(
        tuple(devices[at : at + k])
        for devices in (sorted(each, key=_fastest_first) for each in nodes.values())
        for at in range(0, len(devices), k)
    )


def equal_distribution(fleet: Sequence[Device], k: int) -> Grouping:
    """ED: each group has as many devices of each kind as the others; of each node too, where that is possible.

    Raises:
        ConfigError: the devices of a kind cannot be shared out equally.
    """
    groups = _check(fleet, k)
    for kind, count in Counter(device.kind for device in fleet).items():
        if count % groups:
            raise ConfigError(
                f"ED: expected a multiple of {groups} devices of each kind, one for each of {groups} virtual workers, "
                f"got {count} of {kind[0]!r}"
            )
    # In turn: equal numbers of each node, too, where a node's number of a kind is a multiple.
    ordered = sorted(fleet, key=lambda device: (*_fastest_first(device), device.node))
    return tuple(tuple(ordered[number::groups]) for number in range(groups))


def hybrid(fleet: Sequence[Device], k: int) -> Grouping:
    """HD: the k/2 fastest devices with the k/2 slowest, the next ones with the next ones, and so on.

    Raises:
        ConfigError: k is odd.
    """
    groups = _check(fleet, k)
    if k % 2:
        raise ConfigError(f"HD: expected an even number of devices per virtual worker, got {k}")
    ordered = sorted(fleet, key=lambda device: (*_fastest_first(device), device.node))
    half = k // 2
    blocks = [tuple(ordered[at : at + half]) for at in range(0, len(ordered), half)]
    return tuple(blocks[number] + blocks[-1 - number] for number in range(groups))


RULES: dict[str, Callable[[Sequence[Device], int], Grouping]] = {
    "NP": node_partition,
    "ED": equal_distribution,
    "HD": hybrid,
}


def _fastest_first(device: Device) -> tuple[float, str, float]:
    return (-device.speed, device.name, -device.memory_bytes)


def _check(fleet: Sequence[Device], k: int) -> int:
    """The number of groups."""
    if k < 1 or not fleet or len(fleet) % k:
        raise ConfigError(
            f"expected a multiple of {k} devices, the number per virtual worker, got {len(fleet)}: leave out "
            f"{len(fleet) % k if k > 0 else 0}, or choose another number per virtual worker"
        )
    return len(fleet) // k


# --- how fast a group is ---------------------------------------------------------------------------------------------


class GroupRates:
    """The best virtual worker of each group of devices for one N_m; groups that are alike are worked out once.

    Attributes:
        evaluations: how many groups have been worked out.
    """

    def __init__(
        self, profile: Profile, network: Network, memory: MemoryRule, in_flight: int, *, minibatches: int = 100
    ) -> None:
        """
        Args:
            in_flight: N_m.
            minibatches: length of the simulation of a pipeline.
        """
        self.evaluations = 0
        self._profile, self._network, self._memory, self._in_flight = profile, network, memory, in_flight
        self._minibatches = max(minibatches, 6 * in_flight + 2)
        self._speeds: dict[Kind, float] = {}
        self._model_s = sum(layer.compute_s for layer in profile.layers)
        self._largest_s = max(layer.compute_s for layer in profile.layers)
        self._known: dict[GroupKey, tuple[Group, VirtualWorker | DoesNotFitError]] = {}

    def worker(self, devices: Sequence[Device]) -> VirtualWorker:
        """The virtual worker of these devices, in their best order.

        Raises:
            DoesNotFitError: the model does not fit on them.
        """
        ordered, key = alike(devices)
        if key not in self._known:
            self.evaluations += 1
            self._known[key] = (ordered, self._work_out(ordered))
        model, result = self._known[key]
        if isinstance(result, DoesNotFitError):
            raise result
        return result if model == ordered else _with_devices(result, model, ordered)

    def rate(self, devices: Sequence[Device]) -> float:
        """Minibatches per second; 0 if the model does not fit."""
        try:
            return self.worker(devices).rate
        except DoesNotFitError:
            return 0.0

    def bound(self, devices: Sequence[Device], num_workers: int) -> float:
        """A rate that the slowest of `num_workers` virtual workers of these devices cannot exceed, however grouped.

        For each virtual worker: a stage's work is at most rate^-1 times its device's speed, so that the work of all
        stages, the model, is at most rate^-1 times the sum of speeds, and the slowest has at most the mean sum. The
        largest layer is on one device, in the slowest worker at best on the `num_workers`-th fastest. And N_m
        minibatches take N_m times the model's work by the highest speed at least, one after another.
        """
        speeds = sorted((self._speed(device) for device in devices), reverse=True)
        if not self._model_s:
            return math.inf
        return min(
            sum(speeds) / (num_workers * self._model_s),
            speeds[num_workers - 1] / self._largest_s,
            self._in_flight * speeds[0] / self._model_s,
        )

    def _speed(self, device: Device) -> float:
        """How many times as fast as the profiled device at its best layer."""
        if device.kind not in self._speeds:
            times = zip(self._profile.layers, self._profile.times_on(device), strict=True)
            ratios = [
                layer.compute_s / sum(pair) if sum(pair) else math.inf for layer, pair in times if layer.compute_s
            ]
            self._speeds[device.kind] = max(ratios, default=device.speed)
        return self._speeds[device.kind]

    def _work_out(self, devices: Group) -> VirtualWorker | DoesNotFitError:
        try:
            partition = best_partition(
                self._profile, devices, self._network, in_flight=self._in_flight, memory=self._memory
            )
        except DoesNotFitError as error:
            return error
        throughput = simulate(stage_times(partition), self._in_flight, self._minibatches).throughput()
        return VirtualWorker(partition, min(throughput, 1.0 / partition.bottleneck_s))


def alike(devices: Sequence[Device]) -> tuple[Group, GroupKey]:
    """The devices in an order by kind and node, and what all groups share that differ by the names of nodes alone.

    >>> a, b = Device("A", node="1"), Device("B", node="2")
    >>> alike([a, b])[1] == alike([Device("B", node="7"), Device("A", node="8")])[1]
    True
    >>> alike([a, b])[1] == alike([Device("A", node="1"), Device("B", node="1")])[1]
    False
    """
    nodes = defaultdict[str, list[Device]](list)
    for device in devices:
        nodes[device.node].append(device)
    kinds = sorted((tuple(sorted(device.kind for device in each)), node) for node, each in nodes.items())
    ordered = tuple(device for _, node in kinds for device in sorted(nodes[node], key=lambda device: device.kind))
    return ordered, tuple(key for key, _ in kinds)


def _with_devices(worker: VirtualWorker, model: Group, devices: Group) -> VirtualWorker:
    """The same partition on devices that are alike, place by place."""
    free = list(range(len(model)))
    stages = []
    for stage in worker.partition.stages:
        place = next(at for at in free if model[at] == stage.device)
        free.remove(place)
        stages.append(replace(stage, device=devices[place]))
    return replace(worker, partition=replace(worker.partition, stages=tuple(stages)))
