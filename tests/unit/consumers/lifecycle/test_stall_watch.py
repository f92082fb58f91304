"""A worker whose records do not arrive ends; one that waits, whose log is empty or whose Kafka is away does not."""

from __future__ import annotations

from doll.consumers.lifecycle.stall_watch import StallWatch

TIMEOUT_S = 10.0


def watch() -> StallWatch:
    return StallWatch(TIMEOUT_S, next_command=5, now=100.0)


def observe(made: StallWatch, now: float, *, unread: int = 1, is_waiting: bool = False, commands: int = 5) -> str:
    made.observe(unread=unread, is_waiting=is_waiting, next_command=commands, commands_high=5, now=now)
    return made.problem(now)


def test_records_that_are_there_and_do_not_come_end_the_process() -> None:
    made = watch()
    assert observe(made, 110.0) == ""
    assert made.samples_stalled(110.1)
    assert observe(made, 112.0) == (
        "records are there and none has come for 12 s (worker.stall_timeout_s): starting again"
    )


def test_a_record_that_came_begins_the_time_anew() -> None:
    made = watch()
    made.samples_at_s = 105.0
    assert observe(made, 115.0) == ""
    assert observe(made, 115.5) != ""


def test_a_worker_that_wants_no_records_is_not_stalled() -> None:
    made = watch()
    assert observe(made, 120.0, is_waiting=True) == ""
    assert observe(made, 130.0) == ""
    assert observe(made, 130.5) != ""


def test_nothing_unread_is_no_stall() -> None:
    assert observe(watch(), 120.0, unread=0) == ""


def test_offsets_without_records_are_not_unread() -> None:
    made = watch()
    assert made.unread(90, 100) == 10
    made.record_empty(100, now=115.0)
    assert made.unread(90, 100) == 0
    assert made.unread(90, 103) == 3
    assert made.unread(110, 103) == 0
    assert observe(made, 125.0) == ""


def test_kafka_away_is_no_stall() -> None:
    made = watch()
    made.record_unreachable(119.0)
    assert observe(made, 120.0) == ""


def test_commands_that_do_not_come_end_the_process_too() -> None:
    made = watch()
    made.observe(unread=0, is_waiting=False, next_command=5, commands_high=8, now=105.0)
    assert made.problem(110.0) == ""
    made.observe(unread=0, is_waiting=False, next_command=6, commands_high=8, now=111.0)
    assert made.problem(121.0) == ""
    made.observe(unread=0, is_waiting=False, next_command=6, commands_high=8, now=122.0)
    assert "11 s" in made.problem(122.0)
