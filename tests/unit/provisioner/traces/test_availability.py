"""Up and down times: shares, cycles, and recordings."""

from __future__ import annotations

from itertools import islice, pairwise

import numpy as np
import pytest
from doll.errors import ConfigError
from doll.provisioner.traces.availability import Markov
from doll.provisioner.traces.model import Pool, Series, constant

from doll_lab.simulation.availability import RecordedAvailability
from doll_lab.simulation.randomness import blocks, compute_time, samples_time


def test_a_markov_slot_is_up_its_share_of_the_time_in_cycles_of_the_given_length() -> None:
    spans = list(islice(Markov(0.8, 100.0, np.random.default_rng(1)).spans(0), 20_000))
    up = [seconds for is_up, seconds in spans if is_up]
    down = [seconds for is_up, seconds in spans if not is_up]
    assert np.mean(up) == pytest.approx(80.0, rel=0.03)
    assert np.mean(down) == pytest.approx(20.0, rel=0.03)
    assert all(first[0] != second[0] for first, second in pairwise(spans))


def test_slots_begin_in_their_stationary_state() -> None:
    model = Markov(0.7, 100.0, np.random.default_rng(2))
    assert np.mean([next(model.spans(slot))[0] for slot in range(4000)]) == pytest.approx(0.7, abs=0.03)


def test_full_availability_never_ends() -> None:
    assert next(Markov(1.0, 100.0, np.random.default_rng(0)).spans(0)) == (True, float("inf"))


@pytest.mark.parametrize(("alpha", "cycle_s"), [(0.0, 10.0), (1.1, 10.0), (0.5, 0.0)])
def test_an_impossible_chain_is_refused(alpha: float, cycle_s: float) -> None:
    with pytest.raises(ConfigError, match="availability alpha"):
        Markov(alpha, cycle_s, np.random.default_rng(0))


def test_a_recording_moves_slots_by_rank_and_repeats() -> None:
    pool = Pool("p", 2, 1.0, constant(0.1, 0.0, 60.0), Series(np.array([0.0, 10.0, 30.0]), np.array([2.0, 1.0, 1.0])))
    model = RecordedAvailability.from_pool(pool, num_slots=4)
    assert list(islice(model.spans(0), 3)) == [(True, 10.0), (True, 20.0), (True, 10.0)]
    assert list(islice(model.spans(3), 3)) == [(True, 10.0), (False, 20.0), (True, 10.0)]


def test_a_batchs_time_has_the_mean_and_spread_of_its_samples() -> None:
    """The sum of b times between samples: mean b, variance b c²."""
    for scv in (0.25, 1.0, 4.0):
        draw = samples_time(np.random.default_rng(3), 64, scv)
        times = [draw() for _ in range(40_000)]
        assert np.mean(times) == pytest.approx(64, rel=0.01)
        assert np.var(times) == pytest.approx(64 * scv, rel=0.05)
    assert samples_time(np.random.default_rng(3), 64, 0.0)() == 64


def test_gradient_times_have_their_mean() -> None:
    draw = compute_time(np.random.default_rng(4), 0.5, "exponential")
    assert np.mean([draw() for _ in range(40_000)]) == pytest.approx(0.5, rel=0.03)
    assert compute_time(np.random.default_rng(4), 0.5, "constant")() == 0.5


def test_blocks_give_the_same_numbers_as_one_draw() -> None:
    expected = np.random.default_rng(5).random(4096 * 2)
    draw = blocks(np.random.default_rng(5).random)
    assert [draw() for _ in range(8192)] == expected.tolist()
