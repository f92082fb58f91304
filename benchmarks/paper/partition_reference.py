"""Other ways to the best partition, for comparison: all cuts and orders one by one, and a mixed-integer programme.

They share nothing with `doll_lab.pipelines.partition` but its types: the formulas of the HetPipe paper are here once
more.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

import numpy as np
from doll.pipeline.planner.partition import MemoryRule
from doll.pipeline.profiling.profile import Device, LayerProfile, Profile

from doll_lab.pipelines.network import Network


@dataclass(frozen=True)
class Instance:
    """One problem: what `best_partition` takes."""

    profile: Profile
    devices: tuple[Device, ...]
    network: Network
    in_flight: int
    memory: MemoryRule


def random_instance(
    rng: random.Random, *, max_layers: int = 7, max_stages: int = 4, temporaries: Sequence[int] = (0,)
) -> Instance:
    """A small problem: devices alike or not, on one node or several, transfers from nothing to more than the layers
    take, memory from plenty to too little. Bytes are whole numbers, and a limit is between two of them.

    Args:
        temporaries: of the memory rule, one of these. The integer programme knows 0 alone.
    """
    stages = rng.randint(1, max_stages)
    num_layers = rng.randint(stages, max_layers)
    most_s = rng.choice((3, 100))  # with few values, many partitions are equally good
    layers = tuple(
        LayerProfile(
            f"layer{number}", rng.randint(0, most_s) / 8, rng.randint(1, most_s) / 8, rng.randint(0, 60),
            rng.choice((0, rng.randint(1, 400))), rng.choice((0, rng.randint(1, 40))),
        )
        for number in range(num_layers)
    )  # fmt: skip
    in_flight = rng.randint(1, 6)
    opt = rng.randint(0, 3)
    memory = MemoryRule(
        float(opt), inputs=rng.random() < 0.5, temporaries=rng.choice(temporaries)
    )  # fmt: skip
    whole = sum(layer.parameter_bytes * (1 + opt + in_flight) + layer.activation_bytes * in_flight for layer in layers)
    whole += sum(layer.output_bytes * in_flight for layer in layers) if memory.inputs else 0
    kinds = [
        (rng.choice((0.25, 0.5, 1.0, 2.0)), rng.choice((math.inf, int(whole * rng.uniform(0.15, 1.2)) + 0.5)))
        for _ in range(rng.randint(1, stages))
    ]
    devices = []
    for number in range(stages):
        speed, memory_bytes = rng.choice(kinds)
        devices.append(Device(f"device{number}", speed, memory_bytes, node=f"node{rng.randrange(3)}"))
    measured = {}
    if rng.random() < 0.3:
        measured[devices[0].name] = tuple((rng.randint(1, most_s) / 8, rng.randint(0, most_s) / 8) for _ in layers)
    network = Network(rng.choice((math.inf, 64.0, 8.0)), rng.choice((math.inf, 32.0, 4.0)), rng.choice((0.0, 0.125)))
    profile = Profile("net", 32, "cpu", layers, rng.randint(0, 100), measured)
    return Instance(profile, tuple(devices), network, in_flight, memory)


def layer_bytes(instance: Instance, layer: LayerProfile, *, is_last: bool) -> float:
    """What one layer adds to the memory of its stage."""
    flights = 1 if is_last else instance.in_flight
    weights = layer.parameter_bytes * (1 + instance.memory.optimizer_multiplier + flights)
    return weights + layer.activation_bytes * flights


def boundary_bytes(instance: Instance, first: int, stop: int) -> float:
    """What a stage takes besides its layers."""
    layers, rule = instance.profile.layers, instance.memory
    taken = layers[first - 1].output_bytes if first else instance.profile.input_bytes
    largest = max(taken, *(layer.output_bytes for layer in layers[first:stop]))
    return (taken * instance.in_flight if rule.inputs else 0) + rule.temporaries * largest


def stage_bytes(instance: Instance, first: int, stop: int, *, is_last: bool) -> float:
    """Memory of the stage with layers [first, stop)."""
    layers = instance.profile.layers[first:stop]
    inside = sum(layer_bytes(instance, layer, is_last=is_last) for layer in layers)
    return inside + boundary_bytes(instance, first, stop)


def stage_times(instance: Instance, devices: Sequence[Device], cuts: Sequence[int]) -> list[float] | None:
    """Seconds of each stage; None where one does not fit.

    Args:
        devices: in order.
        cuts: first layer of each stage, and the number of layers.
    """
    layers, times = instance.profile.layers, []
    for number, device in enumerate(devices):
        first, stop, is_last = cuts[number], cuts[number + 1], number == len(devices) - 1
        if stage_bytes(instance, first, stop, is_last=is_last) > device.memory_bytes:
            return None
        seconds = sum(forward + backward for forward, backward in instance.profile.times_on(device)[first:stop])
        if number:
            seconds += instance.network.transfer_s(devices[number - 1], device, layers[first - 1].output_bytes)
        if not is_last:
            seconds += instance.network.transfer_s(devices[number + 1], device, layers[stop - 1].output_bytes)
        times.append(seconds)
    return times


def all_partitions(instance: Instance) -> Iterator[tuple[tuple[Device, ...], tuple[int, ...], list[float]]]:
    """(devices in order, cuts, seconds of each stage) of each partition that fits."""
    count, stages = len(instance.profile.layers), len(instance.devices)
    for devices in permutations(instance.devices):
        for inner in combinations(range(1, count), stages - 1):
            cuts = (0, *inner, count)
            times = stage_times(instance, devices, cuts)
            if times is not None:
                yield devices, cuts, times


def by_enumeration(instance: Instance) -> float | None:
    """The least bottleneck; None where nothing fits."""
    return min((max(times) for _, _, times in all_partitions(instance)), default=None)


def by_furthest_layer(instance: Instance) -> float | None:
    """As a greedy search would have it: for a bottleneck, each stage takes as many layers as it can. It is wrong where
    a stage gets faster by a layer more, or the next one does by a layer fewer."""
    seconds = sorted({time for _, _, times in all_partitions(instance) for time in times})
    return next((limit for limit in seconds if any(_furthest(instance, devices, limit)
                 for devices in permutations(instance.devices))), None)  # fmt: skip


def _furthest(instance: Instance, devices: Sequence[Device], limit: float) -> bool:
    count, stages = len(instance.profile.layers), len(devices)
    cuts = [0]
    for number in range(stages):
        least = count if number == stages - 1 else cuts[-1] + 1
        for stop in range(count - (stages - 1 - number), least - 1, -1):
            neighbours = devices[max(0, number - 1) : number + 2]
            if _one_stage(instance, neighbours, min(number, 1), cuts[-1], stop, number == stages - 1) <= limit:
                cuts.append(stop)
                break
        else:
            return False
    return True


def _one_stage(
    instance: Instance, devices: Sequence[Device], at: int, first: int, stop: int, is_last: bool
) -> float:  # fmt: skip
    layers, device = instance.profile.layers, devices[at]
    if stage_bytes(instance, first, stop, is_last=is_last) > device.memory_bytes:
        return math.inf
    seconds = sum(forward + backward for forward, backward in instance.profile.times_on(device)[first:stop])
    if at:
        seconds += instance.network.transfer_s(devices[at - 1], device, layers[first - 1].output_bytes)
    if not is_last:
        seconds += instance.network.transfer_s(devices[at + 1], device, layers[stop - 1].output_bytes)
    return seconds


def by_integer_programme(instance: Instance) -> float | None:
    """The least bottleneck by HiGHS; None where nothing fits.

    Binaries x[l, q, d]: layer l is in stage q, on device d; y[q, d]: stage q is on d. z[l, q, d, e] is 1 where stage q
    on d ends with layer l and stage q + 1 is on e. Minimize T, the largest time of a stage.

    Raises:
        RuntimeError: HiGHS gives neither an optimum nor a proof that there is none.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    layers, devices = instance.profile.layers, instance.devices
    num_layers, k = len(layers), len(devices)
    x = np.arange(num_layers * k * k).reshape(num_layers, k, k)
    y = x.size + np.arange(k * k).reshape(k, k)
    z = x.size + y.size + np.arange((num_layers - 1) * (k - 1) * k * k).reshape(num_layers - 1, k - 1, k, k)
    last = x.size + y.size + z.size  # T
    rows: list[dict[int, float]] = []
    low: list[float] = []
    high: list[float] = []

    def add(row: dict[int, float], least: float, most: float) -> None:
        rows.append(row)
        low.append(least)
        high.append(most)

    stage_of = [{int(x[at, q, d]): float(q) for q in range(k) for d in range(k)} for at in range(num_layers)]
    for at in range(num_layers):
        add({int(v): 1.0 for v in x[at].ravel()}, 1, 1)
        if at + 1 < num_layers:  # the next layer is in the same stage or the next one
            add({**stage_of[at + 1], **{v: -q for v, q in stage_of[at].items()}}, 0, 1)
    for number in range(k):
        add({int(v): 1.0 for v in y[number]}, 1, 1)
        add({int(v): 1.0 for v in y[:, number]}, 1, 1)
        add({int(v): 1.0 for v in x[:, number].ravel()}, 1, math.inf)
    add({int(v): 1.0 for v in x[0, 0]}, 1, 1)
    add({int(v): 1.0 for v in x[-1, k - 1]}, 1, 1)
    times = [instance.profile.times_on(device) for device in devices]
    for q in range(k):
        stage_s: dict[int, float] = {last: 1.0}
        for d, device in enumerate(devices):
            need = [layer_bytes(instance, layer, is_last=q == k - 1) for layer in layers]
            for at in range(num_layers):
                add({int(x[at, q, d]): 1.0, int(y[q, d]): -1.0}, -math.inf, 0)
                stage_s[int(x[at, q, d])] = -sum(times[d][at])
            if device.memory_bytes < math.inf:
                stage_need = {int(x[at, q, d]): need[at] for at in range(num_layers)}
                if instance.memory.inputs and q:
                    inputs = {
                        int(z[at, q - 1, e, d]): float(instance.in_flight * layers[at].output_bytes)
                        for at in range(num_layers - 1)
                        for e in range(k)
                    }
                    stage_need |= inputs
                elif instance.memory.inputs:
                    stage_need[int(y[q, d])] = float(instance.in_flight * instance.profile.input_bytes)
                add(stage_need, -math.inf, device.memory_bytes)
        for at in range(num_layers - 1):
            for d in range(k):
                for e in range(k):
                    transfer_s = instance.network.transfer_s(devices[d], devices[e], layers[at].output_bytes)
                    if q < k - 1:  # receives the gradient
                        cut = int(z[at, q, d, e])
                        add({cut: 1.0, int(x[at, q, d]): -1.0, int(x[at + 1, q + 1, e]): -1.0}, -1, math.inf)
                        stage_s[cut] = -transfer_s
                    if q:  # receives the activation
                        stage_s[int(z[at, q - 1, d, e])] = -transfer_s
        add(stage_s, 0, math.inf)
    entries = [(number, column, value) for number, row in enumerate(rows) for column, value in row.items() if value]
    at_row, at_column, values = zip(*entries, strict=True)
    matrix = coo_array((values, (at_row, at_column)), shape=(len(rows), last + 1)).tocsc()
    goal = np.zeros(last + 1)
    goal[last] = 1.0
    integrality = np.ones(last + 1)
    integrality[x.size + y.size :] = 0  # z follows from x, and T is a time
    upper = np.ones(last + 1)
    upper[last] = math.inf
    answer = milp(
        goal, constraints=LinearConstraint(matrix, low, high), integrality=integrality, bounds=Bounds(0, upper),
        options={"mip_rel_gap": 0.0},
    )  # fmt: skip
    if answer.status == 2:
        return None
    if answer.status != 0:
        raise RuntimeError(f"HiGHS: {answer.message}")
    return float(answer.fun)
