"""The clock of a spot run stands still until the market opens."""

from __future__ import annotations

from fake_fleet import VirtualClock

from doll_lab.spot.machines import PausedClock


def test_a_standing_clock_stands_and_then_keeps_pace() -> None:
    real = VirtualClock(1000.0)
    clock = PausedClock(real)
    real.advance(50)
    assert (clock(), clock.runs) == (1000.0, False)
    clock.start()
    real.advance(7)
    clock.start()
    assert (clock(), clock.runs) == (1007.0, True)
    assert clock.at(1055.0) == 1005.0  # a record's time
    assert clock.at(1010.0) == 1000.0  # written before the start


def test_a_clock_may_start_a_little_late() -> None:
    real = VirtualClock(1000.0)
    clock = PausedClock(real)
    real.advance(10)
    clock.start(ago_s=1.5)
    assert clock() == 1001.5
