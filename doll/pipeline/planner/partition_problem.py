"""The problem of `doll.pipeline.planner.partition` as arrays: layers, types of devices, links, memory. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from typing import Any, Final

import numpy as np

from doll.errors import ConfigError
from doll.pipeline.planner.device_orders import Costs, Sets, reachable
from doll.pipeline.profiling.profile import Device, Network, Profile, StageSize

MAX_SETS: Final = 4_096
"""Sets of devices that are searched: the sets of 12 different devices, or of 2 x 63."""


class DoesNotFitError(ConfigError):
    """No partition fits into the memory of the devices, or there are too few devices or layers.

    Attributes:
        layer: name of the layer that does not fit; "" where the number of layers or of devices is the reason.
        devices: names of the devices that it does not fit on.
    """

    def __init__(self, message: str, *, layer: str = "", devices: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.layer = layer
        self.devices = tuple(devices)


@dataclass(frozen=True, slots=True)
class MemoryRule:
    """Memory of a stage with weights of W bytes and activations of A: W (1 + opt) + m (W + A), and, where a rule has
    them, inputs, temporaries and reserved bytes.

    m is the number of minibatches between their forward and backward pass: N_m, and 1 at the last stage, which does
    both at once. N_m is reached at the other stages with some times of theirs.

    Attributes:
        optimizer_multiplier: opt, arrays of the weights' size besides the weights: gradients, the optimizer's state.
        inputs: whether the inputs of N_m minibatches are counted, which wait or are kept; not in the paper.
        temporaries: arrays of the size of the largest input or output of the stage's layers.
        reserved_bytes: what each stage takes besides.
    """

    optimizer_multiplier: float
    inputs: bool = False
    temporaries: float = 0.0
    reserved_bytes: float = 0.0

    def stage_bytes(self, size: StageSize, *, in_flight: int, is_last: bool) -> Any:
        """Memory of one stage, in bytes; an array where `size` has arrays.

        Args:
            in_flight: N_m.
        """
        kept = 1 if is_last else in_flight
        weights = (1.0 + self.optimizer_multiplier + kept) * size.parameter_bytes
        activations = kept * size.activation_bytes + (in_flight * size.input_bytes if self.inputs else 0.0)
        return weights + activations + self.temporaries * size.largest_bytes + self.reserved_bytes


class Problem:
    """A profile and devices as arrays.

    Attributes:
        groups: all devices of each type. Devices of one type are alike for a partition.
        types: the first device of each type.
        forward_s, backward_s: shape (types, L + 1); of layers 0 to i - 1.
        transfer_s: as in `Costs`.
    """

    def __init__(
        self, profile: Profile, devices: Sequence[Device], network: Network, memory: MemoryRule, num_stages: int, *,
        in_order: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            in_order: the devices stay in this order, and each is a type of its own.

        Raises:
            DoesNotFitError: there are fewer layers or devices than stages.
            ConfigError: there are too many different devices to try all orders, or one has no speed.
            ValueError: no stage.
        """
        _check(profile, devices, num_stages)
        self.profile, self.memory, self.num_stages, self.in_order = profile, memory, num_stages, in_order
        pairs = {network.bytes_per_s(a, b): (a, b) for a, b in combinations(devices, 2)}
        rates = sorted(pairs)
        self.groups = _groups(profile, devices, in_order, have_nodes=len(rates) > 1)
        self.types = [group[0] for group in self.groups]
        self.sets = Sets.in_order(num_stages) if in_order else _sets(self.groups, num_stages)
        self.forward_s, self.backward_s = (
            np.array([_sums(times[way] for times in profile.times_on(device)) for device in self.types])
            for way in (0, 1)
        )
        layers = profile.layers
        self._parameters = np.array(_sums(float(layer.parameter_bytes) for layer in layers))
        self._activations = np.array(_sums(float(layer.activation_bytes) for layer in layers))
        self._inputs = np.array([profile.input_bytes, *(layer.output_bytes for layer in layers)], dtype=float)
        # The largest of the inputs and outputs of layers [first, stop).
        self._largest = np.maximum.accumulate(np.triu(np.tile(self._inputs, (len(layers) + 1, 1))), axis=1)
        # The class of a link is the place of its rate in `rates`. A type of one device has no link to itself.
        classes = {rate: number for number, rate in enumerate(rates)}
        self._link = np.array([[classes.get(network.bytes_per_s(a, b), 0) for b in self.types] for a in self.types])
        # What crosses the cut before layer i; nothing does before the first layer.
        self.transfer_s = np.zeros((len(rates) + 1, len(layers) + 1))
        for number, rate in enumerate(rates):
            self.transfer_s[number, 1:] = [network.transfer_s(*pairs[rate], layer.output_bytes) for layer in layers]

    def bytes_of(self, first: Any, stop: Any, in_flight: int, *, is_last: bool) -> Any:
        """Memory of layers [first, stop)."""
        size = StageSize(
            self._parameters[stop] - self._parameters[first], self._activations[stop] - self._activations[first],
            self._inputs[first], self._largest[first, stop],
        )  # fmt: skip
        return self.memory.stage_bytes(size, in_flight=in_flight, is_last=is_last)

    def costs(self, in_flight: int) -> Costs:
        if in_flight < 1:
            raise ValueError(f"expected a minibatch in flight at least, got {in_flight}")
        cuts = np.arange(len(self.profile.layers) + 1)
        first, stop = cuts[:, None], cuts[None, :]
        need = [self.bytes_of(first, stop, in_flight, is_last=is_last) for is_last in (False, True)]
        fits = np.array([[(need_ <= device.memory_bytes) & (first < stop) for need_ in need] for device in self.types])
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


def _groups(profile: Profile, devices: Sequence[Device], in_order: bool, *, have_nodes: bool) -> list[list[Device]]:
    """Devices by type. `have_nodes`: nodes make a difference, since links do."""
    groups: dict[object, list[Device]] = {}
    for number, device in enumerate(devices):
        alike = (tuple(profile.times_on(device)), device.memory_bytes, device.node if have_nodes else "")
        groups.setdefault(number if in_order else alike, []).append(device)
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
    """0, then the sums of the first 1, 2, ... values."""
    return list(accumulate(values, initial=0.0))
