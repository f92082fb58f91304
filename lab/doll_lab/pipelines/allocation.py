"""Groupings of a fleet's devices into virtual workers (the HetPipe paper, section 5), and their rates. Pure.

The rules of the paper, for groups of k devices each:

- `node_partition` (NP): a virtual worker has devices of one node. There is little traffic between nodes, but the
  slowest node determines the pace.
- `equal_distribution` (ED): all virtual workers have equal devices and equal pace, but the most traffic between nodes.
- `hybrid` (HD): k/2 strong devices with k/2 weak devices, so that the sums are about equal.

`doll_lab.pipelines.allocation_search` searches for a better grouping.
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
    """A group of devices, each with a part of the model.

    Attributes:
        partition: stages of the virtual worker, first stage first.
        rate: minibatches per second of its pipeline, without waiting for other workers.
    """

    partition: Partitioning
    rate: float

    @property
    def devices(self) -> Group:
        """The devices, in the order of the stages."""
        return tuple(stage.device for stage in self.partition.stages)

    @property
    def stage_times(self) -> tuple[StageTimes, ...]:
        return stage_times(self.partition)


def stage_times(partition: Partitioning) -> tuple[StageTimes, ...]:
    """Return the times of each stage for the simulator; the time to receive is part of a task."""
    return tuple(
        StageTimes(stage.forward_s + stage.receive_forward_s, stage.backward_s + stage.receive_backward_s)
        for stage in partition.stages
    )


# --- the rules of the paper ------------------------------------------------------------------------------------------


def node_partition(fleet: Sequence[Device], k: int) -> Grouping:
    """NP: return groups of k devices of one node; the fastest devices of a node are together.

    Raises:
        ConfigError: the devices of a node cannot be divided into groups of k.
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
    """ED: return groups with the same number of devices of each kind; if possible, also of each node.

    Raises:
        ConfigError: the devices of a kind cannot be divided equally.
    """
    groups = _check(fleet, k)
    for kind, count in Counter(device.kind for device in fleet).items():
        if count % groups:
            raise ConfigError(
                f"ED: expected a multiple of {groups} devices of each kind, one for each of {groups} virtual workers, "
                f"got {count} of {kind[0]!r}"
            )
    # In turn: this also gives equal numbers of each node, if a node's number of a kind is a multiple.
    ordered = sorted(fleet, key=lambda device: (*_fastest_first(device), device.node))
    return tuple(tuple(ordered[number::groups]) for number in range(groups))


def hybrid(fleet: Sequence[Device], k: int) -> Grouping:
    """HD: group the k/2 fastest devices with the k/2 slowest devices, then continue with the rest in the same way.

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
    """Return the number of groups."""
    if k < 1 or not fleet or len(fleet) % k:
        raise ConfigError(
            f"expected a multiple of {k} devices, the number per virtual worker, got {len(fleet)}: leave out "
            f"{len(fleet) % k if k > 0 else 0}, or choose another number per virtual worker"
        )
    return len(fleet) // k


# --- how fast a group is ---------------------------------------------------------------------------------------------


class GroupRates:
    """The best virtual worker of each group of devices for one N_m; computed once for groups that are alike.

    Attributes:
        evaluations: number of groups that were computed.
    """

    def __init__(
        self, profile: Profile, network: Network, memory: MemoryRule, in_flight: int, *, minibatches: int = 100
    ) -> None:
        """
        Args:
            profile, network, memory: costs of the layers, links, and rule for the memory of a stage.
            in_flight: N_m.
            minibatches: length of the simulation of a pipeline, in minibatches.
        """
        self.evaluations = 0
        self._profile, self._network, self._memory, self._in_flight = profile, network, memory, in_flight
        self._minibatches = max(minibatches, 6 * in_flight + 2)
        self._speeds: dict[Kind, float] = {}
        self._model_s = sum(layer.compute_s for layer in profile.layers)
        self._largest_s = max(layer.compute_s for layer in profile.layers)
        self._known: dict[GroupKey, tuple[Group, VirtualWorker | DoesNotFitError]] = {}

    def worker(self, devices: Sequence[Device]) -> VirtualWorker:
        """Return the virtual worker of these devices, in their best order.

        Raises:
            DoesNotFitError: the model does not fit on the devices.
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
        """Return the minibatches per second; 0 if the model does not fit."""
        try:
            return self.worker(devices).rate
        except DoesNotFitError:
            return 0.0

    def bound(self, devices: Sequence[Device], num_workers: int) -> float:
        """Return an upper bound on the slowest rate of `num_workers` virtual workers of the devices, for any grouping.

        For each virtual worker, the work of a stage is at most rate^-1 times its device's speed. So the work of all
        stages (the model) is at most rate^-1 times the sum of the speeds, and the slowest worker has at most the mean
        sum. The largest layer is on one device; in the slowest worker, this is at best the `num_workers`-th fastest
        device. And N_m minibatches, one after another, take at least N_m times the model's work divided by the highest
        speed.
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
        """Return the speed relative to the profiled device, for the layer with the largest speed-up."""
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
    """Return the devices ordered by kind and node, and a key that is equal for groups that differ only in node names.

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
    """Return the same partition on devices that are alike, place by place."""
    free = list(range(len(model)))
    stages = []
    for stage in worker.partition.stages:
        place = next(at for at in free if model[at] == stage.device)
        free.remove(place)
        stages.append(replace(stage, device=devices[place]))
    return replace(worker, partition=replace(worker.partition, stages=tuple(stages)))
