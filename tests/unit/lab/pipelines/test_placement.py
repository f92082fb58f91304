"""Where parameters are, what the links carry, and what waves cost: against figures worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.paper.virtual_workers import VirtualWorkers
from doll.errors import ConfigError
from doll.pipeline.profiling.profile import Device, LayerProfile, Profile
from doll.ps.policies.wsp import WspPolicyConfig

from doll_lab.pipelines.network import Network
from doll_lab.pipelines.partition import Partitioning, StagePlan
from doll_lab.pipelines.placement import LinkTraffic, default_placement, local_placement, traffic
from doll_lab.pipelines.prediction import throughput_in_waves
from doll_lab.pipelines.schedule import StageTimes, simulate

# Outputs of 1, 10, 100 bytes, parameters of 1000, 2000, 4000, 8000.
LAYERS = tuple(LayerProfile(f"l{at}", 1.0, 1.0, 0, 10**at, 1000 * 2**at) for at in range(4))
PROFILE = Profile("m", 2, "d", LAYERS)
A, B = Device("a", node="A"), Device("b", node="B")


def cut(*stages: tuple[Device, int]) -> Partitioning:
    """Stages by device and number of layers."""
    plans, first = [], 0
    for device, count in stages:
        plans.append(StagePlan(first, first + count, device, 1.0 * count, 1.0 * count, 0.0, 0.0, 0.0))
        first += count
    times = [plan.total_s for plan in plans]
    return Partitioning(tuple(plans), max(times), times.index(max(times)))


def test_by_default_layers_are_dealt_to_the_nodes() -> None:
    assert default_placement(4, ["A", "B", "C"]) == ("A", "B", "C", "A")


def test_local_parameters_are_where_their_layer_is_computed() -> None:
    assert local_placement([cut((A, 1), (B, 3)), cut((A, 1), (B, 3))]) == ("A", "B", "B", "B")
    with pytest.raises(ConfigError, match=r"layer 2 on 'B' in virtual worker 1 and on 'A' in 2.*or use ED"):
        local_placement([cut((A, 1), (B, 3)), cut((A, 2), (B, 2))])


def test_links_carry_activations_gradients_and_parameters() -> None:
    # Stage 1 on A: layers 0 and 1, of 3000 bytes; stage 2 on B: layers 2 and 3. Parameters of 0 and 2 on A.
    load = traffic(PROFILE, [cut((A, 2), (B, 2))], default_placement(4, ["A", "B"]))
    assert load.links == {
        ("A", "A"): LinkTraffic(0, 2 * 1000),
        ("A", "B"): LinkTraffic(10, 2000 + 4000),
        ("B", "A"): LinkTraffic(10, 2000 + 4000),
        ("B", "B"): LinkTraffic(0, 2 * 8000),
    }
    assert load.activation_bytes(is_between=True) == 20
    assert load.activation_bytes(is_between=False) == 0
    assert load.parameter_bytes(is_between=True) == 12_000
    assert load.parameter_bytes(is_between=False) == 18_000
    assert load.stage_bytes == 12_000


def test_a_minibatch_carries_its_share_of_the_wave() -> None:
    assert LinkTraffic(100, 60).bytes_per_minibatch(4) == 115


def test_local_placement_has_no_parameters_between_nodes() -> None:
    partitions = [cut((A, 2), (B, 2))] * 3
    load = traffic(PROFILE, partitions, local_placement(partitions))
    assert load.parameter_bytes(is_between=True) == 0
    assert load.parameter_bytes(is_between=False) == 2 * 15_000
    assert load.activation_bytes(is_between=True) == 20
    assert load.links["A", "B"].activation_bytes == 30


def test_stages_of_one_node_send_within_it() -> None:
    load = traffic(PROFILE, [cut((A, 2), (Device("c", node="A"), 2))], ("A",) * 4)
    assert load.activation_bytes(is_between=False) == 20
    assert load.activation_bytes(is_between=True) == 0
    assert load.pace_bound(Network(1.0, 1.0), 2) == (float("inf"), "")


def test_the_busiest_link_bounds_the_pace() -> None:
    load = traffic(PROFILE, [cut((A, 2), (B, 2))], default_placement(4, ["A", "B"]))
    pace, node = load.pace_bound(Network(1e9, 1000.0), in_flight=3)
    assert pace == pytest.approx(1000.0 / (10 + 6000 / 3))
    assert node in ("A", "B")


def test_a_push_and_a_pull_take_the_slowest_link_twice() -> None:
    load = traffic(PROFILE, [cut((A, 2), (B, 2))] * 2, default_placement(4, ["A", "B"]))
    # B pushes layer 2 (4000 bytes) to A, twice; A pushes layer 1 (2000) to B.
    assert load.sync_s(Network(1e9, 1000.0, latency_s=0.5)) == pytest.approx(2 * (0.5 + 8.0))
    # Within a node, each stage has a link of its own: the larger stage has 12,000 bytes.
    assert load.sync_s(Network(1000.0, 1e9)) == pytest.approx(2 * 12.0)


# --- waves -----------------------------------------------------------------------------------------------------------


def test_waves_cost_nothing_where_pushes_and_pulls_take_no_time() -> None:
    stages = [StageTimes(1.0, 2.0), StageTimes(1.5, 1.0)]
    for in_flight in (1, 2, 3):
        plain = simulate(stages, in_flight, 120).throughput()
        assert throughput_in_waves(stages, in_flight, clock_distance=0, push_s=0.0, pull_s=0.0) == plain


@pytest.mark.parametrize("distance", [0, 1, 3])
@pytest.mark.parametrize(("push_s", "pull_s"), [(0.5, 0.0), (2.0, 1.0), (0.0, 7.0)])
def test_one_stage_and_one_minibatch_in_flight_by_formula(distance: int, push_s: float, pull_s: float) -> None:
    """Minibatch p starts when p - 1 is complete and pushed, and p - 1 - D is pulled: D + 1 minibatches in 2 s, a push
    and a pull."""
    rate = throughput_in_waves([StageTimes(1.0, 1.0)], 1, clock_distance=distance, push_s=push_s, pull_s=pull_s)
    assert rate == pytest.approx(min(1 / (2.0 + push_s), (distance + 1) / (2.0 + push_s + pull_s)), rel=0.05)


def test_a_push_is_hidden_by_minibatches_beyond_those_that_keep_the_stages_busy() -> None:
    stages = [StageTimes(1.0, 1.0)] * 4
    with_4, with_6 = (
        throughput_in_waves(stages, in_flight, clock_distance=0, push_s=1.0, pull_s=1.0) for in_flight in (4, 6)
    )
    assert with_4 == pytest.approx(4 / (4 * 2.0 + 2.0)), "four keep four stages busy: the whole time is lost"
    assert with_6 == pytest.approx(1 / 2, rel=1e-3)
    assert throughput_in_waves(stages, 4, clock_distance=1, push_s=0.0, pull_s=2.0) == pytest.approx(1 / 2, rel=1e-3)


def in_steady_state(times_s: list[float], in_flight: int) -> float:
    """Minibatches per second from the middle to the end, between ends of waves."""
    waves = len(times_s) // in_flight
    first, last = (waves // 2) * in_flight - 1, (waves - 2) * in_flight - 1
    return (last - first) / (times_s[last] - times_s[first])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("distance", "push_s", "pull_s"), [(0, 0.0, 0.0), (0, 1.5, 0.7), (0, 6.0, 1.0), (1, 2.0, 0.0), (4, 9.0, 0.0)]
)
def test_rates_are_those_of_the_production_engine(distance: int, push_s: float, pull_s: float) -> None:
    """Under policy `wsp` each virtual worker goes at the pace of the slowest, with its waves; two equal ones where
    D lets the faster one run ahead for long."""
    rng = np.random.default_rng(round(10 * push_s) + distance)
    for _ in range(6):
        in_flight = int(rng.integers(1, 5))
        workers = [[StageTimes(*times) for times in rng.uniform(0.5, 2.0, (3, 2)).tolist()] for _ in range(2)]
        workers[1] = workers[0] if distance > 1 else workers[1]
        system = VirtualWorkers(
            WspPolicyConfig(wave_batches=in_flight, clock_distance=distance), workers, waves=60, push_s=push_s,
            pull_s=pull_s,
        )  # fmt: skip
        system.run()
        alone = [
            throughput_in_waves(stages, in_flight, clock_distance=distance, push_s=push_s, pull_s=pull_s)
            for stages in workers
        ]
        for completions_s in system.completions_s:
            assert in_steady_state(completions_s, in_flight) == pytest.approx(min(alone), rel=0.03)
