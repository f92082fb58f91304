"""The best partition: against all cuts and orders one by one, and against a mixed-integer programme."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest
from benchmarks.paper.partition_reference import (
    Instance,
    all_partitions,
    by_enumeration,
    by_furthest_layer,
    by_integer_programme,
    random_instance,
    stage_bytes,
    stage_times,
)
from doll.errors import ConfigError
from doll.pipeline.planner.partition import DoesNotFitError, MemoryRule
from doll.pipeline.profiling.profile import Device, LayerProfile, Profile, StageSize
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from doll_lab.pipelines import device_orders
from doll_lab.pipelines.network import Network
from doll_lab.pipelines.partition import Partitioning, best_partition

PAPER = MemoryRule(1.0)


def chain(
    compute_s: Sequence[float], output_bytes: Sequence[int] | None = None, *, weights: Sequence[int] | None = None
) -> Profile:
    """A profile with these times, and activations of 10 bytes for each layer."""
    outputs = output_bytes or [0] * len(compute_s)
    parameters = weights or [0] * len(compute_s)
    layers = enumerate(zip(compute_s, outputs, parameters, strict=True))
    return Profile("net", 32, "cpu", tuple(LayerProfile(f"l{n}", t, 0.0, 10, out, w) for n, (t, out, w) in layers))


def devices_of(*speeds: float, memory_bytes: float = math.inf, nodes: str = "") -> list[Device]:
    return [Device(f"device{n}", speed, memory_bytes, node=nodes[n] if nodes else "") for n, speed in enumerate(speeds)]


def solve(instance: Instance, *, raises: bool = False) -> Partitioning | None:
    try:
        return best_partition(
            instance.profile, instance.devices, instance.network, in_flight=instance.in_flight, memory=instance.memory
        )
    except DoesNotFitError:
        if raises:
            raise
        return None


def cuts_of(partition: Partitioning) -> tuple[int, ...]:
    return (0, *(stage.stop for stage in partition.stages))


def problems(instance: Instance, partition: Partitioning) -> list[str]:
    """What is wrong with a partition, by formulas of its own."""
    wrong = []
    stages = partition.stages
    devices, cuts = [stage.device for stage in stages], cuts_of(partition)
    if sorted(devices, key=repr) != sorted(instance.devices, key=repr):
        wrong.append("each device has a stage")
    if any(stage.first != cut for stage, cut in zip(stages, cuts, strict=False)) or any(
        a >= b for a, b in pairwise(cuts)
    ):
        wrong.append("stages are contiguous, with a layer at least")
    if cuts[-1] != len(instance.profile.layers):
        wrong.append("all layers have a stage")
    for number, stage in enumerate(stages):
        need = stage_bytes(instance, stage.first, stage.stop, is_last=number == len(stages) - 1)
        if stage.memory_bytes != need or need > stage.device.memory_bytes:
            wrong.append("stages fit into memory")
    times = stage_times(instance, devices, cuts)
    if times is None or not all(math.isclose(s.total_s, t, abs_tol=1e-9) for s, t in zip(stages, times, strict=True)):
        wrong.append(f"stages take {times}")
    if partition.bottleneck_s != stages[partition.binding].total_s or partition.bottleneck_s != max(
        stage.total_s for stage in stages
    ):
        wrong.append("the binding stage is the slowest")
    return wrong


def test_the_best_of_all_cuts_and_orders_is_found() -> None:
    rng = random.Random(1)
    infeasible = 0
    for number in range(150):
        instance = random_instance(rng, max_layers=6, temporaries=(0, 1, 3))
        ours, expected = solve(instance), by_enumeration(instance)
        assert (ours is None) == (expected is None), number
        if ours is None:
            infeasible += 1
            continue
        assert problems(instance, ours) == [], number
        assert ours.bottleneck_s == pytest.approx(expected, abs=1e-12), number
    assert infeasible >= 5


@pytest.mark.slow
def test_a_mixed_integer_programme_finds_the_same() -> None:
    rng = random.Random(2)
    for number in range(15):
        instance = random_instance(rng, max_layers=6, max_stages=3)
        ours, expected = solve(instance), by_integer_programme(instance)
        assert (ours and ours.bottleneck_s) == (expected and pytest.approx(expected, rel=1e-6)), number


def test_of_equally_good_ones_a_minibatch_takes_least() -> None:
    rng = random.Random(3)
    mattered = 0
    for number in range(100):
        instance = random_instance(rng, max_layers=6)
        ours = solve(instance)
        if ours is None:
            continue
        sums = [sum(times) for _, _, times in all_partitions(instance) if max(times) <= ours.bottleneck_s + 1e-9]
        assert sum(stage.total_s for stage in ours.stages) == pytest.approx(min(sums)), number
        mattered += max(sums) > min(sums) + 1e-9
        assert solve(instance) == ours
    assert mattered >= 10


def in_order(instance: Instance, devices: Sequence[Device]) -> float:
    """The paper's programme for one order of the devices: best[q][j] = min over i of max(best[q - 1][i], T)."""
    layers = instance.profile.layers
    best = np.array([0.0] + [math.inf] * len(layers))
    for q, device in enumerate(devices):

        def sent_s(other: Device, device: Device = device) -> Any:
            sent = (instance.network.transfer_s(other, device, layer.output_bytes) for layer in layers)
            return np.array([0.0, *sent])

        sums = np.cumsum([0.0, *map(sum, instance.profile.times_on(device))])
        seconds = sums[None, :] - sums[:, None]
        if q:
            seconds += sent_s(devices[q - 1])[:, None]
        if q + 1 < len(devices):
            seconds += sent_s(devices[q + 1])[None, :]
        seconds[np.tri(len(sums), dtype=bool)] = math.inf
        best = np.maximum(best[:, None], seconds).min(axis=0)
    return float(best[-1])


@pytest.mark.parametrize("small", [device_orders._SMALL, 0], ids=["no limit", "with a limit"])
def test_more_layers_and_devices_than_can_be_enumerated(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_orders, "_SMALL", small)
    rng = random.Random(5)
    for seed in range(4):
        compute_s = [rng.uniform(0.1, 2.0) for _ in range(30)]
        if seed == 1:
            compute_s[7] = 40.0
        profile = chain(compute_s, [rng.randrange(1000) for _ in range(30)])
        devices = devices_of(*(rng.choice((0.5, 1.0, 3.0)) for _ in range(4)), nodes="aabb" if seed % 2 else "abca")
        network = Network(1000.0, 100.0, 0.01 * seed)
        instance = Instance(profile, tuple(devices), network, 4, PAPER)
        ours = solve(instance)
        assert ours is not None
        expected = min(in_order(instance, order) for order in permutations(devices))
        assert ours.bottleneck_s == pytest.approx(expected), seed


class LastStageAsTheOthers(MemoryRule):
    """A mutant: the last stage keeps N_m minibatches too."""

    def stage_bytes(self, size: StageSize, *, in_flight: int, is_last: bool) -> Any:
        return super().stage_bytes(size, in_flight=in_flight, is_last=False)


@pytest.mark.slow
def test_a_last_stage_with_n_m_minibatches_and_a_search_for_the_furthest_layer_are_seen_to_be_wrong() -> None:
    rng = random.Random(6)
    memory = furthest = 0
    for _ in range(200):
        instance = random_instance(rng, max_layers=6)
        expected = by_enumeration(instance)
        rule = LastStageAsTheOthers(instance.memory.optimizer_multiplier, inputs=instance.memory.inputs)
        mutant = solve(replace(instance, memory=rule))
        memory += expected is not None and (mutant is None or mutant.bottleneck_s > expected + 1e-9)
        furthest += by_furthest_layer(instance) != expected
    assert memory >= 1
    assert furthest >= 1


def test_transfers_are_slower_between_nodes() -> None:
    network = Network(within_node_bytes_per_s=100, between_nodes_bytes_per_s=10, latency_s=1)
    a, b, c = Device("a", node="1"), Device("b", node="1"), Device("c", node="2")
    assert network.transfer_s(a, b, 100) == 2
    assert network.transfer_s(b, c, 100) == 11
    assert Network().transfer_s(a, c, 1e12) == 0


def test_devices_of_one_node_are_neighbours_where_that_is_faster() -> None:
    # With equal speeds, each link between nodes costs 5 s on both of its sides: one is enough.
    profile = chain([1.0] * 4, [10] * 4)
    ours = best_partition(
        profile, devices_of(1, 1, 1, 1, nodes="xyxy"), Network(1e9, 2.0), in_flight=1, memory=PAPER
    )  # fmt: skip
    assert "".join(stage.device.node for stage in ours.stages) in ("xxyy", "yyxx")
    assert ours.bottleneck_s == pytest.approx(6.0)


def test_transfers_are_counted_at_both_sides_of_a_cut() -> None:
    profile = chain([1.0, 1.0, 1.0], [2, 6, 100])
    ours = best_partition(profile, devices_of(1, 1, 1), Network(2.0, 2.0), in_flight=1, memory=PAPER)
    first, second, third = ours.stages
    assert (first.receive_forward_s, first.receive_backward_s) == (0.0, 1.0)
    assert (second.receive_forward_s, second.receive_backward_s) == (1.0, 3.0)
    assert (third.receive_forward_s, third.receive_backward_s) == (3.0, 0.0)
    assert (ours.bottleneck_s, ours.binding) == (5.0, 1)


def test_alike_devices_are_one_type_and_many_of_them_are_quick() -> None:
    ours = best_partition(chain([1.0] * 26), devices_of(*[1.0] * 13, *[2.0] * 3), Network(), in_flight=1, memory=PAPER)
    assert len(ours.stages) == 16
    assert len({stage.device.name for stage in ours.stages}) == 16
    assert ours.bottleneck_s == 2.0


def test_with_fewer_stages_than_devices_the_best_devices_are_used() -> None:
    ours = best_partition(
        chain([1.0] * 6), devices_of(0.1, 2.0, 1.0, 0.2), Network(), in_flight=1, memory=PAPER, stages=2
    )
    assert sorted(stage.device.name for stage in ours.stages) == ["device1", "device2"]
    assert ours.bottleneck_s == 2.0


def test_too_many_different_devices_need_an_order() -> None:
    devices = devices_of(*(1.0 + n for n in range(13)))
    profile = chain([1.0] * 20)
    with pytest.raises(ConfigError, match=r"13 devices of 13 types have 8192 sets, at most 4096 .* give the order"):
        best_partition(profile, devices, Network(), in_flight=1, memory=PAPER)


def most_in_flight(profile: Profile, devices: Sequence[Device], *, limit: int = 64) -> int:
    """Max_m: the most minibatches in flight that fit, up to `limit`."""
    for count in range(1, limit + 1):
        try:
            best_partition(profile, devices, Network(), in_flight=count, memory=PAPER)
        except DoesNotFitError:
            return count - 1
    return limit


def test_the_most_minibatches_in_flight() -> None:
    profile = chain([1.0, 1.0], weights=[100, 100])
    # The first stage needs 200 + 110 N_m bytes, the last one 310.
    devices = devices_of(1, 1, memory_bytes=640)
    assert most_in_flight(profile, devices) == 4
    # The last stage needs 210 + 100 N_m bytes with a version for each minibatch: it is the one with less memory.
    unequal = [Device("small", memory_bytes=310), Device("large", memory_bytes=1e9)]
    assert most_in_flight(profile, unequal) == 64
    assert most_in_flight(profile, devices_of(1, 1, memory_bytes=300)) == 0


GB = 1_000_000_000
LARGE = Profile(
    "net", 32, "cpu",
    tuple(LayerProfile(f"conv{n}", 1.0, 1.0, GB, 0, gb * GB) for n, gb in enumerate((1, 1, 2, 1), 1)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("memory_gb", "in_flight", "layer", "devices", "message"),
    [
        # Before the last stage, conv3 needs 2 x 2 + 4 (2 + 1) = 16 GB.
        ((6.0, 10.0), 4, "conv3", ("gpu0", "gpu1"),
         "layer 'conv3' fits on no device: it needs 16 GB with 4 minibatches in flight, and gpu0 has 6 GB; gpu1 has "
         "10 GB: use more stages or devices with more memory, for fewer minibatches in flight would not fit"),
        ((9.5, 11.0), 2, "conv4", ("gpu1",),
         "the layers fit one by one, and no contiguous cut does: at best, layer 'conv1' on gpu0; then layers 'conv2' "
         "to 'conv4' ('conv4' is the first too many) need 15 GB in the last stage, and gpu1 has 11 GB: 1 minibatch in "
         "flight would fit"),
        ((6.0, 6.0), 1, "conv3", ("gpu0",),
         "layer 'conv3' fits on no device: it needs 7 GB with 1 minibatch in flight, and gpu0 has 6 GB: "
         "use more stages or devices with more memory"),
        # The whole model would fit as the last stage, and there must be another one.
        ((19.0, 19.0), 20, "conv1", ("gpu0",),
         "layer 'conv1' fits on no device: it needs 42 GB with 20 minibatches in flight, and gpu0 has 19 GB: "
         "8 minibatches in flight would fit"),
        ((100.0, 100.0, 2.5), 1, "conv1", ("gpu2",),
         "3 stages need as many devices, and even the layer that needs least, 'conv1', is too large for some: it needs "
         "4 GB with 1 minibatch in flight, and gpu2 has 2.5 GB: use more stages or devices with more memory"),
        ((8.0, 8.0), 1, "conv4", ("gpu1",),
         "the layers fit one by one, and no contiguous cut does: at best, layers 'conv1' to 'conv2' on gpu0; then "
         "layers 'conv3' to 'conv4' ('conv4' is the first too many) need 11 GB in the last stage, and gpu1 has 8 GB: "
         "use more stages or devices with more memory"),
        ((10.0, 6.0, 5.0, 4.0), 2, "conv3", ("gpu2", "gpu3"),
         "the layers fit one by one, and no contiguous cut does: at best, layers 'conv1' to 'conv2' on gpu0, gpu1; "
         "then layer 'conv3' needs 10 GB with 2 minibatches in flight, and gpu2 has 5 GB; gpu3 has 4 GB: 1 minibatch "
         "in flight would fit"),
        ((16.0,), 3, "conv4", ("gpu0",),
         "the layers fit one by one, and no contiguous cut does: layers 'conv1' to 'conv4' ('conv4' is the first too "
         "many) need 19 GB in the only stage, and gpu0 has 16 GB: use more stages or devices with more memory, for "
         "fewer minibatches in flight would not fit"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(
    memory_gb: Sequence[float], in_flight: int, layer: str, devices: tuple[str, ...], message: str
) -> None:
    fleet = [Device(f"gpu{n}", memory_bytes=gb * GB) for n, gb in enumerate(memory_gb)]
    with pytest.raises(DoesNotFitError) as caught:
        best_partition(LARGE, fleet, Network(), in_flight=in_flight, memory=PAPER)
    assert str(caught.value) == message
    assert (caught.value.layer, caught.value.devices) == (layer, devices)


def test_every_instance_that_does_not_fit_is_explained_by_a_need_above_the_memory() -> None:
    rng = random.Random(7)
    errors = []
    for _ in range(400):
        instance = random_instance(rng)
        try:
            solve(instance, raises=True)
        except DoesNotFitError as exc:
            errors.append((instance, exc))
    assert len(errors) >= 20
    for instance, error in errors:
        need = float(str(error).split(" bytes ")[0].rsplit(" ", 1)[1].replace(",", ""))
        has = [device.memory_bytes for device in instance.devices if device.name in error.devices]
        assert has, str(error)
        assert need > max(has), str(error)
        assert error.layer in [layer.name for layer in instance.profile.layers]


@pytest.mark.parametrize(
    ("layers", "devices", "stages", "message"),
    [
        (6, 2, 3, "expected 3 devices, one for each stage, got 2: device0, device1"),
        (2, 3, 3, "expected 3 layers at least, one for each stage, got the 2 of net"),
    ],
)
def test_fewer_devices_or_layers_than_stages(layers: int, devices: int, stages: int, message: str) -> None:
    with pytest.raises(DoesNotFitError, match=message):
        best_partition(
            chain([1.0] * layers), devices_of(*[1.0] * devices), Network(), in_flight=1, memory=PAPER, stages=stages
        )


def test_a_device_without_speed_and_no_minibatch_in_flight_are_refused() -> None:
    with pytest.raises(ConfigError, match="'device0': expected a speed above 0"):
        best_partition(chain([1.0]), devices_of(0.0), Network(), in_flight=1, memory=PAPER)
    with pytest.raises(ValueError, match="expected a minibatch in flight at least, got 0"):
        best_partition(chain([1.0]), devices_of(1.0), Network(), in_flight=0, memory=PAPER)
    with pytest.raises(ValueError, match="expected a stage and a device at least"):
        best_partition(chain([1.0]), [], Network(), in_flight=1, memory=PAPER)


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), more=st.floats(1.0, 4.0))
def test_what_holds_for_each_partition(seed: int, more: float) -> None:
    instance = random_instance(random.Random(seed), max_layers=14, max_stages=5)
    instance = replace(instance, profile=replace(instance.profile, times_by_device={}))
    ours = solve(instance)
    roomier = solve(
        replace(
            instance,
            devices=tuple(replace(device, memory_bytes=device.memory_bytes * more) for device in instance.devices),
        )
    )
    if ours is None:
        return
    assert problems(instance, ours) == []
    total_s = sum(layer.compute_s for layer in instance.profile.layers)
    assert ours.bottleneck_s >= total_s / sum(device.speed for device in instance.devices) - 1e-9
    assert roomier is not None, "more memory fits what fits less"
    assert roomier.bottleneck_s <= ours.bottleneck_s + 1e-9


def test_two_hundred_layers_on_eight_different_devices() -> None:
    """40,320 orders. How long it takes is for `make paper`."""
    rng = random.Random(8)
    profile = chain_of(200, rng)
    devices = devices_of(*(rng.uniform(0.3, 2.0) for _ in range(8)), nodes="abababab")
    network = Network(2000.0, 500.0, 0.01)
    ours = best_partition(profile, devices, network, in_flight=4, memory=PAPER)
    instance = Instance(profile, tuple(devices), network, 4, PAPER)
    assert problems(instance, ours) == []
    assert ours.bottleneck_s == pytest.approx(in_order(instance, [stage.device for stage in ours.stages]))
    for _ in range(5):
        rng.shuffle(devices)
        assert ours.bottleneck_s <= in_order(instance, devices) + 1e-9


def chain_of(count: int, rng: random.Random) -> Profile:
    return Profile(
        "net", 32, "cpu",
        tuple(
            LayerProfile(f"layer{n}", rng.uniform(0.1, 2.0), rng.uniform(0.1, 3.0), rng.randrange(1000),
                         rng.randrange(1000), rng.randrange(1000))
            for n in range(count)
        ),
    )  # fmt: skip
