"""The cut for devices in a given order: against all cuts one by one, and what is said if none fits."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from benchmarks.paper.partition_reference import Instance, random_instance, stage_times
from doll.pipeline.planner.partition import DoesNotFitError, MemoryRule, stops_in_order
from doll.pipeline.profiling.profile import Device, LayerProfile, Profile, StageSize

from doll_lab.pipelines.network import Network

PAPER = MemoryRule(1.0)
GB = 1_000_000_000
LARGE = Profile(
    "net", 32, "cpu",
    tuple(LayerProfile(f"conv{n}", 1.0, 1.0, GB, 0, gb * GB) for n, gb in enumerate((1, 1, 2, 1), 1)),
)  # fmt: skip


def instances(seed: int, count: int) -> Iterator[Instance]:
    """Problems whose links take no time."""
    rng = random.Random(seed)
    for _ in range(count):
        yield replace(random_instance(rng, max_layers=7, temporaries=(0, 1, 3)), network=Network())


def stops_of(instance: Instance) -> list[int]:
    return stops_in_order(
        instance.profile, instance.devices, in_flight=instance.in_flight, memory=instance.memory
    )  # fmt: skip


def all_cuts(instance: Instance) -> dict[tuple[int, ...], Sequence[float]]:
    """The times of the stages of each cut that fits, by the ends of its stages."""
    count, k = len(instance.profile.layers), len(instance.devices)
    cuts = [(*inner, count) for inner in combinations(range(1, count), k - 1)]
    times = {stops: stage_times(instance, instance.devices, (0, *stops)) for stops in cuts}
    return {stops: each for stops, each in times.items() if each is not None}


def test_the_best_of_all_cuts_is_found_and_of_equal_ones_a_minibatch_takes_least() -> None:
    infeasible = mattered = 0
    for number, instance in enumerate(instances(1, 300)):
        times = all_cuts(instance)
        if not times:
            with pytest.raises(DoesNotFitError):
                stops_of(instance)
            infeasible += 1
            continue
        ours = times[tuple(stops_of(instance))]
        least = min(map(max, times.values()))
        sums = [sum(each) for each in times.values() if max(each) <= least + 1e-9]
        assert max(ours) == pytest.approx(least, abs=1e-12), number
        assert sum(ours) == pytest.approx(min(sums)), number
        mattered += max(sums) > min(sums) + 1e-9
    assert infeasible >= 20
    assert mattered >= 10


def test_two_hundred_layers() -> None:
    rng = random.Random(2)
    layers = (LayerProfile(f"l{n}", rng.uniform(0.1, 2.0), 0.0, 10, 0, 100) for n in range(200))
    profile = Profile("net", 32, "cpu", tuple(layers))
    devices = [Device(f"device{n}", 1.0 + n % 3) for n in range(8)]
    stops = stops_in_order(profile, devices, in_flight=4, memory=PAPER)
    seconds = [
        sum(layer.compute_s for layer in profile.layers[first:stop]) / device.speed
        for (first, stop), device in zip(pairwise([0, *stops]), devices, strict=True)
    ]
    even_s = sum(layer.compute_s for layer in profile.layers) / sum(device.speed for device in devices)
    assert even_s <= max(seconds) <= even_s + 2.0


def test_memory_of_a_stage() -> None:
    # W (1 + opt) + m A + versions W, of W = 100 and A = 7.
    size, rule = StageSize(100, 7, input_bytes=11, largest_bytes=13), MemoryRule(2.0)
    assert rule.stage_bytes(size, in_flight=4, is_last=False) == 300 + 28 + 400
    assert rule.stage_bytes(size, in_flight=4, is_last=True) == 300 + 7 + 100
    more = MemoryRule(2.0, inputs=True, temporaries=3.0, reserved_bytes=5.0)
    assert more.stage_bytes(size, in_flight=4, is_last=True) == 300 + 7 + 100 + 4 * 11 + 3 * 13 + 5


def test_the_size_of_a_stage() -> None:
    outputs, weights = (30, 50, 20, 0), (1, 2, 4, 8)
    sizes = enumerate(zip(outputs, weights, strict=True))
    profile = Profile("net", 32, "cpu", tuple(LayerProfile(f"l{n}", 1.0, 0.0, 10, out, w) for n, (out, w) in sizes), 40)
    assert profile.size_of(0, 1) == (1, 10, 40, 40)
    assert profile.size_of(0, 4) == (15, 40, 40, 50)
    assert profile.size_of(2, 4) == (12, 20, 50, 50)
    assert profile.size_of(3, 4) == (8, 10, 20, 20)


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
        ((4.5, 100.0), 2, "conv1", ("gpu0",),
         "the layers fit one by one, and no contiguous cut does: layer 'conv1' needs 6 GB with 2 minibatches in "
         "flight, and gpu0 has 4.5 GB: 1 minibatch in flight would fit"),
        ((16.0,), 3, "conv4", ("gpu0",),
         "the layers fit one by one, and no contiguous cut does: layers 'conv1' to 'conv4' ('conv4' is the first too "
         "many) need 19 GB in the only stage, and gpu0 has 16 GB: use more stages or devices with more memory, for "
         "fewer minibatches in flight would not fit"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(
    memory_gb: Sequence[float], in_flight: int, layer: str, devices: tuple[str, ...], message: str
) -> None:
    given = [Device(f"gpu{n}", memory_bytes=gb * GB) for n, gb in enumerate(memory_gb)]
    with pytest.raises(DoesNotFitError) as caught:
        stops_in_order(LARGE, given, in_flight=in_flight, memory=PAPER)
    assert str(caught.value) == message
    assert (caught.value.layer, caught.value.devices) == (layer, devices)


def test_every_instance_that_does_not_fit_is_explained_by_a_need_above_the_memory() -> None:
    errors = []
    for instance in instances(3, 400):
        try:
            stops_of(instance)
        except DoesNotFitError as exc:
            errors.append((instance, exc))
    assert len(errors) >= 20
    for instance, error in errors:
        need = float(str(error).split(" bytes ")[0].rsplit(" ", 1)[1].replace(",", ""))
        has = [device.memory_bytes for device in instance.devices if device.name in error.devices]
        assert has, str(error)
        assert need > min(has), str(error)
        assert error.layer in [layer.name for layer in instance.profile.layers]
