"""Groups of devices: the rules of the HetPipe paper, how fast a group is, and the search against all groupings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
import pytest
from benchmarks.paper.hetpipe_models import GPUS, NETWORK, OPTIMIZER_MULTIPLIER, resnet152, virtual_worker
from doll.errors import ConfigError
from doll.pipeline.planner.partition import DoesNotFitError, MemoryRule
from doll.pipeline.profiling.profile import Device, LayerProfile, Profile

from doll_lab.pipelines import allocation_search
from doll_lab.pipelines.allocation import (
    Group,
    Grouping,
    GroupRates,
    alike,
    equal_distribution,
    hybrid,
    node_partition,
)
from doll_lab.pipelines.allocation_search import Found, search
from doll_lab.pipelines.fleet_plan import plan_fleet
from doll_lab.pipelines.network import Network

PAPER_FLEET = virtual_worker("QVGR" * 4)
NAMES = {device.name: kind for kind, device in GPUS.items()}


def letters(groups: Grouping) -> list[str]:
    return sorted("".join(sorted((NAMES[device.name] for device in group), key="VRGQ".index)) for group in groups)


def test_the_rules_form_the_virtual_workers_of_the_paper() -> None:
    assert letters(node_partition(PAPER_FLEET, 4)) == ["GGGG", "QQQQ", "RRRR", "VVVV"]
    assert letters(equal_distribution(PAPER_FLEET, 4)) == ["VRGQ"] * 4
    assert letters(hybrid(PAPER_FLEET, 4)) == ["RRGG", "RRGG", "VVQQ", "VVQQ"]


def test_equal_distribution_takes_as_many_devices_of_each_node_where_it_can() -> None:
    fleet = [Device("a", node=str(node)) for node in range(3) for _ in range(4)]
    groups = equal_distribution(fleet, 3)
    assert [Counter(device.node for device in group) for group in groups] == [Counter("012")] * 4


@pytest.mark.parametrize(
    ("rule", "fleet", "k", "message"),
    [
        (node_partition, "VVVRRR", 2, "NP: expected a multiple of 2 devices on each node, got 3 on 'V'"),
        (equal_distribution, "VVVR", 2, "ED: expected a multiple of 2 devices of each kind.* got 3 of 'TITAN V'"),
        (hybrid, "VVVRRR", 3, "HD: expected an even number of devices per virtual worker, got 3"),
        (hybrid, "VVV", 2, "expected a multiple of 2 devices.* got 3: leave out 1"),
        (node_partition, "", 2, "expected a multiple of 2 devices.* got 0"),
        (equal_distribution, "VV", 0, "expected a multiple of 0 devices"),
    ],
)
def test_a_rule_that_does_not_apply_says_why(rule: object, fleet: str, k: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rule(virtual_worker(fleet), k)  # type: ignore[operator]


# --- how fast a group is ---------------------------------------------------------------------------------------------


def random_profile(rng: np.random.Generator, layers: int) -> Profile:
    return Profile(
        "random", 8, "base",
        tuple(
            LayerProfile(
                f"l{number}", *rng.lognormal(0.0, 0.5, 2).tolist(), *rng.integers(1, 100, 3).tolist()
            )
            for number in range(layers)
        ),
    )  # fmt: skip


def random_fleet(rng: np.random.Generator, count: int) -> list[Device]:
    """Few kinds on few nodes, so that some devices are interchangeable and others are not."""
    kinds = [(name, float(rng.uniform(0.3, 2.0)), float(rng.uniform(200, 3000))) for name in "abc"]
    return [Device(*kinds[rng.integers(3)], node=f"n{rng.integers(3)}") for _ in range(count)]


def test_groups_that_are_alike_are_worked_out_once_and_keep_their_devices() -> None:
    profile = random_profile(np.random.default_rng(3), 6)
    rates = GroupRates(profile, Network(1e3, 1e2), MemoryRule(1.0), 2)
    kinds = {"a": Device("a", 1.0), "b": Device("b", 2.0)}
    groups = [
        [Device(name, kinds[name].speed, node=f"{name}{number}", usd_per_h=number) for name in "ab"]
        for number in (1, 2)
    ]
    first, second = (rates.worker(group) for group in groups)
    assert rates.evaluations == 1
    assert first.rate == second.rate
    assert set(first.devices) == set(groups[0])
    assert set(second.devices) == set(groups[1])
    assert [device.name for device in first.devices] == [device.name for device in second.devices]
    rates.worker([groups[0][0], groups[0][1].__class__("b", 2.0, node="a1")])  # on one node: not alike
    assert rates.evaluations == 2


def test_no_virtual_worker_exceeds_the_bound() -> None:
    rng = np.random.default_rng(11)
    close = 0.0
    for _ in range(40):
        profile, k = random_profile(rng, 6), int(rng.integers(1, 4))
        fleet = [Device(str(number), float(rng.uniform(0.3, 2.0))) for number in range(k)]
        rates = GroupRates(profile, Network(1e4, 1e3), MemoryRule(1.0), int(rng.integers(1, 5)), minibatches=60)
        rate, bound = rates.rate(fleet), rates.bound(fleet, 1)
        assert 0.0 < rate <= bound * (1 + 1e-9)
        close = max(close, rate / bound)
    assert close > 0.9


def test_devices_on_which_layers_were_measured_count_by_their_best_layer() -> None:
    layers = (LayerProfile("x", 1.0, 1.0, 0, 0, 0), LayerProfile("y", 1.0, 1.0, 0, 0, 0))
    profile = Profile("m", 1, "base", layers, times_by_device={"fast at y": ((1.0, 1.0), (0.1, 0.1))})
    fleet = [Device("fast at y"), Device("base")]
    rates = GroupRates(profile, Network(), MemoryRule(0.0), 4)
    assert rates.rate(fleet) <= rates.bound(fleet, 1)
    rates = GroupRates(profile, Network(), MemoryRule(0.0), 9)
    assert rates.bound([Device("fast at y")], 1) == pytest.approx(10 / 4)


def test_a_rule_of_memory_for_each_n_m() -> None:
    profile = random_profile(np.random.default_rng(3), 4)
    fleet = [Device("a", memory_bytes=2_000.0)]
    rules = {1: MemoryRule(1.0), 2: MemoryRule(1e6)}
    candidate = plan_fleet(profile, fleet, Network(), rules.__getitem__, k=1, rules=["NP"]).candidates[0]
    rate = GroupRates(profile, Network(), rules[1], 1).rate(fleet)
    assert candidate.by_in_flight == ((1, pytest.approx(profile.batch_size * rate)),)


def test_resnet_152_does_not_fit_on_a_lone_rtx_2060() -> None:
    rates = GroupRates(resnet152(), NETWORK, MemoryRule(OPTIMIZER_MULTIPLIER), 1)
    with pytest.raises(DoesNotFitError, match="GeForce RTX 2060"):
        rates.worker(virtual_worker("G"))
    assert rates.rate(virtual_worker("G")) == 0.0
    assert rates.rate(virtual_worker("R")) > 0.0


# --- the search against all groupings --------------------------------------------------------------------------------


class TableRates:
    """A rate for each group of devices that are alike, drawn when it is first asked for."""

    def __init__(self, seed: int, share_that_fits: float) -> None:
        self._rng = np.random.default_rng(seed)
        self._share = share_that_fits
        self.known: dict[object, float] = {}

    def rate(self, devices: Sequence[Device]) -> float:
        key = alike(devices)[1]
        if key not in self.known:
            fits = self._rng.random() < self._share
            self.known[key] = float(self._rng.integers(1, 1000)) if fits else 0.0
        return self.known[key]

    def bound(self, devices: Sequence[Device], num_workers: int) -> float:
        return 1000.0


class TightRates(TableRates):
    """The bound of a group is its rate: it rules out as much as a bound can."""

    def bound(self, devices: Sequence[Device], num_workers: int) -> float:
        return self.rate(devices) if num_workers == 1 and len(devices) < 4 else 1000.0


def groupings(devices: tuple[Device, ...], k: int) -> Iterator[tuple[Group, ...]]:
    """All groupings, with the devices that are left out; no two of them are the same."""
    yield ()
    if len(devices) < k:
        return
    first, rest = devices[0], devices[1:]
    for others in combinations(range(len(rest)), k - 1):
        group = (first, *(rest[at] for at in others))
        left = tuple(device for at, device in enumerate(rest) if at not in others)
        for more in groupings(left, k):
            yield (group, *more)
    yield from groupings(rest, k)


def best_of_all(fleet: Sequence[Device], k: int, rates: TableRates) -> float:
    return max(
        len(groups) * min((rates.rate(group) for group in groups), default=0.0) for groups in groupings(tuple(fleet), k)
    )


def check_found(answer: Found, fleet: Sequence[Device], k: int, rates: TableRates) -> None:
    used = [device for group in answer.groups for device in group]
    assert Counter((*used, *answer.spare)) == Counter(fleet)
    assert all(len(group) == k for group in answer.groups)
    value = len(answer.groups) * min((rates.rate(group) for group in answer.groups), default=0.0)
    assert answer.value == value


@pytest.mark.parametrize("rates_class", [TableRates, TightRates])
def test_the_search_finds_the_best_of_all_groupings(rates_class: type[TableRates]) -> None:
    rng = np.random.default_rng(5)
    left_out = 0
    for seed in range(60):
        k = int(rng.integers(1, 4))
        fleet = random_fleet(rng, int(rng.integers(k, 8)))
        rates = rates_class(seed, share_that_fits=float(rng.choice([0.3, 1.0])))
        answer = search(fleet, k, rates)
        check_found(answer, fleet, k, rates)
        assert answer.is_exact
        assert answer.value == answer.bound == best_of_all(fleet, k, rates), (seed, fleet, k)
        left_out += len(answer.spare) >= k
    assert left_out > 5


def test_a_search_that_confuses_nodes_would_miss_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: groups with the same kinds are taken for alike, on whatever nodes."""

    def keys_by_kind(devices: Sequence[Device]) -> object:
        return tuple(sorted(device.kind for device in devices))

    rng = np.random.default_rng(5)
    missed = 0
    for seed in range(20):
        fleet = random_fleet(rng, 6)
        rates = TableRates(seed, 1.0)
        exact = search(fleet, 2, rates).value
        known = {keys_by_kind(group): rates.rate(group) for group in combinations(fleet, 2)}

        class Confused(TableRates):
            def rate(self, devices: Sequence[Device], known: dict[object, float] = known) -> float:
                return known[keys_by_kind(devices)]

        groups = search(fleet, 2, Confused(seed, 1.0)).groups
        missed += len(groups) * min(rates.rate(group) for group in groups) < exact
    assert missed > 5


def test_a_large_fleet_gets_a_grouping_with_a_gap_that_holds() -> None:
    rng = np.random.default_rng(8)
    exact_values, values = [], []
    for seed in range(30):
        fleet = random_fleet(rng, 6)
        rates = TableRates(seed, 1.0)
        exact = search(fleet, 2, rates)
        rough = search(fleet, 2, rates, max_steps=0)
        check_found(rough, fleet, 2, rates)
        assert not rough.is_exact
        assert rough.value <= exact.value <= rough.bound == pytest.approx(rough.value * (1 + rough.gap))
        exact_values.append(exact.value)
        values.append(rough.value)
    assert sum(values) > 0.75 * sum(exact_values)
    assert values != exact_values


def test_improvement_starts_from_the_groupings_it_is_given() -> None:
    fleet = [Device(str(number)) for number in range(6)]
    rates = TableRates(1, 1.0)
    best = search(fleet, 2, rates)
    assert search(fleet, 2, rates, starts=[best.groups], max_steps=0).value == best.value


def test_sixteen_gpus_of_four_kinds_take_few_groups() -> None:
    class Counting(TableRates):
        def bound(self, devices: Sequence[Device], num_workers: int) -> float:
            return math.inf

    rates = Counting(2, 1.0)
    answer = search(PAPER_FLEET, 4, rates)
    assert answer.is_exact
    assert len(answer.groups) >= 1
    # 35 sets of 4 out of 4 kinds; the nodes are named by their kinds.
    assert len(rates.known) <= 35


def test_fewer_devices_than_a_group() -> None:
    with pytest.raises(ValueError, match="expected 3 devices at least, a whole group, got 2"):
        search(PAPER_FLEET[:2], 3, TableRates(0, 1.0))


def test_parts_of_a_node_are_distinct() -> None:
    parts = list(allocation_search._parts((0, 0, 1, 2, 2), 3))
    assert len(parts) == len(set(parts))
    wanted = {pick for size in range(4) for pick in combinations((0, 0, 1, 2, 2), size)}
    assert set(parts) == wanted
