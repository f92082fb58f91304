"""One place is told when this process will be gone; of several times the earliest counts."""

from __future__ import annotations

import pytest
from doll.consumers.lifecycle.departure import MARGIN_S, Departure


class Desk:
    """A departure on a clock of our own, and what it asked for."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.ends: list[tuple[float, int]] = []
        self.departure = Departure(clock=lambda: self.now_s, end_within=lambda *asked: self.ends.append(asked))


def test_it_stays_until_it_is_told() -> None:
    desk = Desk()
    assert not desk.departure()
    assert desk.departure.left_s() == float("inf")
    assert desk.ends == []


def test_the_process_ends_before_its_time_is_over_whatever_it_is_doing() -> None:
    desk = Desk()
    desk.departure.leave_within(25.0, "notice")
    assert desk.departure()
    assert desk.departure.cause == "notice"
    desk.now_s = 110.0
    assert desk.departure.left_s() == pytest.approx(15.0)
    assert desk.ends == [(pytest.approx(25.0 - MARGIN_S), 0)]


def test_an_earlier_time_wins_and_a_later_one_is_ignored() -> None:
    desk = Desk()
    desk.departure.leave_within(120.0, "notice")
    desk.departure.leave_within(8.0, "sigterm")
    desk.departure.leave_within(30.0, "sigint")
    assert (desk.departure.by_s, desk.departure.cause) == (108.0, "sigterm")
    assert [code for _, code in desk.ends] == [0, 0]
    assert desk.ends[-1][0] == pytest.approx(8.0 - MARGIN_S)


def test_a_time_that_is_over_already_ends_the_process_at_once() -> None:
    desk = Desk()
    desk.departure.leave_within(-10.0, "notice")
    assert desk.ends == [(0.0, 0)]
