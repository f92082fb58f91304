"""The problem of `doll_lab.pipelines.partition` as arrays: layers, types of devices, links, memory. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, combinations
from typing import Final

import numpy as np
from doll.errors import ConfigError
from doll.pipeline.planner.partition import DoesNotFitError, Floats, MemoryRule, stage_needs
from doll.pipeline.profiling.profile import Device, Profile

from doll_lab.pipelines.device_orders import Costs, Sets, reachable
from doll_lab.pipelines.network import Network

MAX_SETS: Final = 4_096
"""Sets of devices that are searched: the sets of 12 different devices, or of 2 x 63."""


class Problem:
    """A profile and devices as arrays.

    Attributes:
        groups: all devices of each type. Devices of one type are alike for a partition.
        types: first device of each type.
        forward_s, backward_s: seconds of layers 0 to i - 1, shape (types, L + 1).
        transfer_s: as in `Costs`.
    """

    def __init__(
        self, profile: Profile, devices: Sequence[Device], network: Network, memory: MemoryRule, num_stages: int
    ) -> None:
        """
        Raises:
            DoesNotFitError: there are fewer layers or devices than stages.
            ConfigError: there are too many different devices to try all orders, or a device has no speed.
            ValueError: there is no stage.
        """
        _check(profile, devices, num_stages)
        self.profile, self.num_stages = profile, num_stages
        self._memory = memory
        self._needs: dict[int, tuple[Floats, Floats]] = {}  # by number of minibatches in flight
        pairs = {network.bytes_per_s(a, b): (a, b) for a, b in combinations(devices, 2)}
        rates = sorted(pairs)
        self.groups = _groups(profile, devices, have_nodes=len(rates) > 1)
        self.types = [group[0] for group in self.groups]
        self.sets = _sets(self.groups, num_stages)
        self.forward_s, self.backward_s = (
            np.array([_sums(times[way] for times in profile.times_on(device)) for device in self.types])
            for way in (0, 1)
        )
        layers = profile.layers
        # The class of a link is the index of its rate in `rates`. A type with one device has no link to itself.
        classes = {rate: number for number, rate in enumerate(rates)}
        self._link = np.array([[classes.get(network.bytes_per_s(a, b), 0) for b in self.types] for a in self.types])
        # The values that cross the cut before layer i; there are none before the first layer.
        self.transfer_s = np.zeros((len(rates) + 1, len(layers) + 1))
        for number, rate in enumerate(rates):
            self.transfer_s[number, 1:] = [network.transfer_s(*pairs[rate], layer.output_bytes) for layer in layers]

    def bytes_of(self, first: int, stop: int, in_flight: int, *, is_last: bool) -> float:
        """Return the memory of layers [first, stop) in bytes."""
        return float(self._stage_needs(in_flight)[is_last][first, stop])

    def _stage_needs(self, in_flight: int) -> tuple[Floats, Floats]:
        if in_flight not in self._needs:
            self._needs[in_flight] = stage_needs(self.profile, in_flight, self._memory)
        return self._needs[in_flight]

    def costs(self, in_flight: int) -> Costs:
        if in_flight < 1:
            raise ValueError(f"expected a minibatch in flight at least, got {in_flight}")
        cuts = np.arange(len(self.profile.layers) + 1)
        is_stage = cuts[:, None] < cuts[None, :]
        needs = self._stage_needs(in_flight)
        fits = np.array([[(need <= device.memory_bytes) & is_stage for need in needs] for device in self.types])
        return Costs(self.forward_s + self.backward_s, self.transfer_s, self._link, fits)

    def fits(self, in_flight: int) -> bool:
        return reachable(self.costs(in_flight), self.sets)[1]


def _check(profile: Profile, devices: Sequence[Device], num_stages: int) -> None:
    if num_stages < 1:
        raise ValueError(f"expected a stage and a device at least, got {num_stages} stages")
    if len(devices) < num_stages:
        raise DoesNotFitError(
            f"expected {num_stages} devices, one for each stage, got {len(devices)}: "
            f"{', '.join(device.name for device in devices) or 'none'}"
        )
    if len(profile.layers) < num_stages:
        raise DoesNotFitError(
            f"expected {num_stages} layers at least, one for each stage, got the {len(profile.layers)} of "
            f"{profile.model}: use fewer stages, or layers that are smaller"
        )
    for device in devices:
        if not (device.speed > 0.0 and device.memory_bytes >= 0.0):
            raise ConfigError(
                f"device {device.name!r}: expected a speed above 0 and a memory of 0 bytes or more, got "
                f"{device.speed} and {device.memory_bytes}"
            )


def _groups(profile: Profile, devices: Sequence[Device], *, have_nodes: bool) -> list[list[Device]]:
    """Return the devices by type. `have_nodes`: nodes make a difference, because links do."""
    groups: dict[object, list[Device]] = {}
    for device in devices:
        alike = (tuple(profile.times_on(device)), device.memory_bytes, device.node if have_nodes else "")
        groups.setdefault(alike, []).append(device)
    return list(groups.values())


def _sets(groups: Sequence[Sequence[Device]], num_stages: int) -> Sets:
    counts = [min(len(group), num_stages) for group in groups]
    if (num_sets := math.prod(count + 1 for count in counts)) > MAX_SETS:
        raise ConfigError(
            f"expected devices of few types, so that all orders can be tried: {sum(map(len, groups))} devices of "
            f"{len(counts)} types have {num_sets} sets, at most {MAX_SETS} can be tried: give the order"
        )
    return Sets.of(counts, num_stages)


def _sums(values: Iterable[float]) -> list[float]:
    """Return 0, then the sums of the first 1, 2, ... values."""
    return list(accumulate(values, initial=0.0))
