"""Bad samples are found among good ones, and only they."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import pytest
from doll.consumers.compute.bisection import RunningMedian, beyond, failing, harmful, usual_norm
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(1, 300), st.sets(st.integers(0, 299)))
def test_bisection_finds_exactly_those_that_fail(count: int, chosen: set[int]) -> None:
    bad = {at for at in chosen if at < count}
    probes = 0

    def problem_of(part: Sequence[int]) -> str:
        nonlocal probes
        probes += 1
        here = sorted(bad.intersection(part))
        return f"it is {here[0]}" if here else ""

    assert failing(range(count), problem_of) == {at: f"it is {at}" for at in sorted(bad)}
    assert probes <= 1 + len(bad) * 2 * math.ceil(math.log2(count + 1))


def test_a_part_that_fails_although_its_halves_do_not_is_left_alone() -> None:
    assert failing(range(4), lambda part: "together" if len(part) > 2 else "") == {}


def test_long_gradients_are_found_without_looking_into_usual_parts() -> None:
    norms = [1.0, 1.0, 500.0, 1.0, 1.0, math.inf, 1.0, 1.0]
    looked: list[list[int]] = []

    def norm_of(part: Sequence[int]) -> float:
        looked.append(list(part))
        return sum(norms[at] for at in part)

    assert beyond(range(8), 100.0, norm_of) == [2, 5]
    assert [6, 7] in looked
    assert [6] not in looked


def test_the_scale_follows_the_median_and_looks_at_a_first_batch() -> None:
    scale = RunningMedian()
    assert scale.unusual(1.0, 10.0)
    for value in (1.0, 1.0, 1e30):  # one that should not have been learned does not open the door for the next
        scale.add(value)
    assert not scale.unusual(10.0, 10.0)
    assert scale.unusual(11.0, 10.0)
    assert scale.unusual(math.nan, 10.0)
    for _ in range(64):
        scale.add(100.0)
    assert not scale.unusual(900.0, 10.0)


@given(st.lists(st.floats(0, 1e38) | st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=200))
def test_the_running_median_is_that_of_the_last_64(values: list[float]) -> None:
    scale = RunningMedian()
    for at, value in enumerate(values):
        scale.add(value)
        assert scale.usual == median(values[max(0, at - 63) : at + 1])


def test_the_anchor_is_not_moved_by_bad_samples_while_they_are_the_fewer() -> None:
    assert usual_norm([1.0, 1.0, math.inf, 1.0, 1e30]) == 1.0
    assert usual_norm([]) == 0.0


@pytest.mark.parametrize(
    ("before", "wrong", "after", "expected"),
    [
        (0.4, 2.0, 1e36, True),
        (0.4, 2.0, math.nan, True),
        (0.4, 2.0, math.inf, True),
        (0.4, 2.0, 0.5, False),
        (1e-6, 8.0, 1e-3, False),  # a thousand times more, and still nothing
        (1e-6, 8.0, 2.5, True),
        (0.69, 0.69, 1.5, True),
        (-3.0, -1.0, -2.5, False),  # of a density
        (-3.0, -1.0, 4.0, True),
    ],
)
def test_harm_is_what_ordinary_samples_lose(before: float, wrong: float, after: float, expected: bool) -> None:
    assert harmful(before, wrong, after) is expected
