"""Which pause between updates belongs to which death of a broker."""

from __future__ import annotations

from benchmarks.cluster import pauses


def test_a_pause_belongs_to_the_kill_after_which_it_ends() -> None:
    updates = [1.0, 2.0, 3.5, 10.0, 11.0, 20.0, 24.0]
    measured = pauses(updates, [(5.0, 1), (19.5, 2)], 25.0)
    assert measured["pauses_s"] == [6.5, 9.0]
    assert measured["pause_max_s"] == 9.0
    assert measured["quiet_pause_max_s"] == 1.5


def test_an_update_that_never_came_is_a_pause() -> None:
    assert pauses([1.0, 2.0], [(3.0, 1)], 23.0)["pauses_s"] == [21.0]
