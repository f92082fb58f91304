"""Partition of a model's layers into the stages of one virtual worker, on devices in a given order. Pure.

A stage consists of consecutive layers. The best partition fits into the memory of the devices and has the smallest
bottleneck, which is the time of its slowest stage (the HetPipe paper, section 5). Transfer times of links are ignored.
The fleet planner of doll-lab also chooses devices and their order, and includes transfers
(`doll_lab.pipelines.partition`).

>>> from doll.pipeline.profiling.profile import LayerProfile
>>> layers = tuple(LayerProfile(name, 1.0, 2.0, 10, 4, 100) for name in "abcdef")
>>> devices = [Device("slow"), Device("fast", speed=2.0)]
>>> stops_in_order(Profile("net", 32, "slow", layers), devices, in_flight=4, memory=MemoryRule(optimizer_multiplier=1))
[2, 6]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from doll.errors import ConfigError
from doll.pipeline.profiling.profile import Device, Profile, StageSize

Floats = npt.NDArray[np.float64]


class DoesNotFitError(ConfigError):
    """No partition fits into the memory of the devices, or there are too few devices or layers.

    Attributes:
        layer: name of the layer that does not fit; "" if the number of layers or devices is the cause.
        devices: names of the devices that the layer does not fit on.
    """

    def __init__(self, message: str, *, layer: str = "", devices: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.layer = layer
        self.devices = tuple(devices)


@dataclass(frozen=True, slots=True)
class MemoryRule:
    """The memory of a stage with W bytes of weights and A bytes of activations: W * (1 + opt) + m * (W + A), plus
    inputs, temporaries and reserved bytes if the rule has them.

    m is the number of minibatches that are between their forward and backward pass. It is 1 at the last stage, which
    runs both passes in one step. At the other stages m is at most N_m, the number of minibatches in flight; it depends
    on the times of the stages.

    Attributes:
        optimizer_multiplier: opt, number of arrays of the weights' size besides the weights: gradients, optimizer
            state.
        inputs: whether to count the inputs of N_m minibatches, which wait or are kept; the paper does not count them.
        temporaries: number of arrays with the size of the largest input or output of the stage's layers.
        reserved_bytes: additional memory of each stage, in bytes.
    """

    optimizer_multiplier: float
    inputs: bool = False
    temporaries: float = 0.0
    reserved_bytes: float = 0.0

    def stage_bytes(self, size: StageSize, *, in_flight: int, is_last: bool) -> Any:
        """Return the memory of one stage in bytes; an array if `size` contains arrays.

        Args:
            in_flight: N_m, the number of minibatches in flight.
        """
        kept = 1 if is_last else in_flight
        weights = (1.0 + self.optimizer_multiplier + kept) * size.parameter_bytes
        activations = kept * size.activation_bytes + (in_flight * size.input_bytes if self.inputs else 0.0)
        return weights + activations + self.temporaries * size.largest_bytes + self.reserved_bytes


def stops_in_order(profile: Profile, devices: Sequence[Device], *, in_flight: int, memory: MemoryRule) -> list[int]:
    """Return the end of each stage in the partition with the smallest bottleneck, then the smallest sum of times.

    Args:
        devices: one device for each stage, in the order of the stages; at most as many as layers.
        in_flight: N_m, the number of minibatches in flight.

    Raises:
        DoesNotFitError: no partition fits.
    """
    end = len(profile.layers)
    seconds = _stage_seconds(profile, devices, in_flight, memory)
    bottleneck = _least(seconds, np.maximum)[-1][end]
    if not np.isfinite(bottleneck):
        raise _explain(profile, devices, in_flight, memory)
    seconds = [np.where(table <= bottleneck, table, np.inf) for table in seconds]
    sums = _least(seconds, np.add)
    stops = [end]
    for stage in range(len(devices) - 1, 0, -1):
        stops.insert(0, int((sums[stage] + seconds[stage][:, stops[0]]).argmin()))
    return stops


def stage_needs(profile: Profile, in_flight: int, memory: MemoryRule) -> tuple[Floats, Floats]:
    """Return two arrays of shape (L + 1, L + 1), where L is the number of layers. The first array is for stages before
    the last one, the second array for the last stage. The entry [i, j] is the memory of a stage with the layers i to j
    - 1. Only entries with j > i have a meaning.
    """
    layers = profile.layers
    parameters = np.cumsum([0.0, *(layer.parameter_bytes for layer in layers)])
    activations = np.cumsum([0.0, *(layer.activation_bytes for layer in layers)])
    inputs = np.array([profile.input_bytes, *(layer.output_bytes for layer in layers)], dtype=float)
    largest = np.maximum.accumulate(np.triu(np.tile(inputs, (len(inputs), 1))), axis=1)
    size = StageSize(
        parameters[None, :] - parameters[:, None], activations[None, :] - activations[:, None], inputs[:, None], largest
    )
    before, last = (memory.stage_bytes(size, in_flight=in_flight, is_last=is_last) for is_last in (False, True))
    return before, last


def _stage_seconds(profile: Profile, devices: Sequence[Device], in_flight: int, memory: MemoryRule) -> list[Floats]:
    """Return, for each device, the seconds of layers i to j - 1 at [i, j]; infinite without such a stage or memory."""
    needs = stage_needs(profile, in_flight, memory)
    tables = []
    for number, device in enumerate(devices, 1):
        sums = np.cumsum([0.0, *map(sum, profile.times_on(device))])
        table = sums[None, :] - sums[:, None]
        table[np.tri(len(sums), dtype=bool) | (needs[number == len(devices)] > device.memory_bytes)] = np.inf
        tables.append(table)
    return tables


def _least(seconds: Sequence[Floats], join: Callable[[Floats, Floats], Floats]) -> list[Floats]:
    """Return, at [q][j], the smallest value of layers 0 to j - 1 in the first q stages; `join` combines stage times."""
    values = [np.full(len(seconds[0]), np.inf)]
    values[0][0] = 0.0
    for table in seconds:
        values.append(join(values[-1][:, None], table).min(axis=0))
    return values


def _explain(profile: Profile, devices: Sequence[Device], in_flight: int, memory: MemoryRule) -> DoesNotFitError:
    """Return the error if no partition fits. It names a layer that fits on no device, or those that do fit."""
    end, k = len(profile.layers), len(devices)
    names = [layer.name for layer in profile.layers]
    needs = stage_needs(profile, in_flight, memory)

    def error(what: str, layer: int, need_bytes: float, short: Sequence[Device], is_last: bool) -> DoesNotFitError:
        fewer = next((n for n in range(in_flight - 1, 0, -1) if np.isfinite(reached(n)[-1][end])), 0)
        return misfit(what, names[layer], need_bytes, short, in_flight, fewer, is_last=is_last, is_only=k == 1)

    def reached(count: int) -> list[Floats]:
        return _least(_stage_seconds(profile, devices, count, memory), np.maximum)

    most = max(device.memory_bytes for device in devices)
    for n in range(end):
        is_last = k == 1 or n == end - 1
        # Each stage before the last one needs a layer.
        if needs[is_last][n, n + 1] > most and not (n >= k - 1 and needs[1][n, end] <= most):
            return error(
                f"layer {names[n]!r} fits on no device: it needs", n, needs[is_last][n, n + 1], devices, is_last
            )
    # Each stage after these needs a layer.
    rooms = [np.isfinite(values[: end - (k - q) + 1]) for q, values in enumerate(reached(in_flight)[:-1])]
    stage = next((q for q, room in enumerate(rooms) if not room.any()), k) - 1
    first = int(np.flatnonzero(rooms[stage])[-1])
    is_last = stage == k - 1
    over = first
    if is_last:
        over = next(n for n in range(first, end) if needs[1][first, n + 1] > devices[stage].memory_bytes)
    what = furthest_text(names, first, end if is_last else first + 1, over, [device.name for device in devices[:stage]])
    need = needs[is_last][first, end if is_last else first + 1]
    return error(what, over, need, devices[stage : stage + 1], is_last)


def furthest_text(names: Sequence[str], first: int, stop: int, over: int, used: Sequence[str]) -> str:
    """Describe a partition of the layers before `first` on the devices `used`, which leaves layers [first, stop).

    Args:
        over: index of the first of these layers that is too large for its device.
    """
    at_best = f" at best, {_layers(names[:first])} on {', '.join(used)}; then" if used else ""
    too_many = f" ({names[over]!r} is the first too many)" if stop > first + 1 else ""
    needs = "needs" if stop == first + 1 else "need"
    rest = _layers(names[first:stop])
    return f"the layers fit one by one, and no contiguous cut does:{at_best} {rest}{too_many} {needs}"


def misfit(
    what: str, layer: str, need_bytes: float, devices: Sequence[Device], in_flight: int, fewer: int, *, is_last: bool,
    is_only: bool,
) -> DoesNotFitError:  # fmt: skip
    """Return the error for layers that do not fit, with their need, the memory of `devices`, and a solution.

    Args:
        what: beginning of the sentence, up to "needs".
        fewer: a smaller number of minibatches in flight with which a partition fits; 0: there is no such number.
        is_last, is_only: whether the layers would be in the last stage, and whether this stage is the only one.
    """
    has = list(dict.fromkeys(f"{device.name} has {gigabytes(device.memory_bytes)}" for device in devices))
    remedy = f"{_minibatches(fewer)} in flight would fit" if fewer else "use more stages or devices with more memory"
    if not fewer and in_flight > 1:
        remedy += ", for fewer minibatches in flight would not fit"
    place = f"in the {'only' if is_only else 'last'} stage" if is_last else f"with {_minibatches(in_flight)} in flight"
    return DoesNotFitError(
        f"{what} {gigabytes(need_bytes)} {place}, and {'; '.join(has)}: {remedy}",
        layer=layer,
        devices=list(dict.fromkeys(device.name for device in devices)),
    )


def _minibatches(count: int) -> str:
    return "1 minibatch" if count == 1 else f"{count} minibatches"


def _layers(names: Sequence[str]) -> str:
    return f"layer {names[0]!r}" if len(names) == 1 else f"layers {names[0]!r} to {names[-1]!r}"


def gigabytes(num_bytes: float) -> str:
    """
    >>> gigabytes(7.23e9), gigabytes(512.0)
    ('7.23 GB', '512 bytes')
    """
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e7 else f"{num_bytes:,.0f} bytes"
