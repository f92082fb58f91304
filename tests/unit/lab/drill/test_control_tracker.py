"""What a drill counts of control links, and which workers have not returned to the fastest one."""

from __future__ import annotations

import pytest
from statuses import gone_worker, live_worker, server_status

from doll_lab.drill.report_lines import control_line
from doll_lab.drill.status_trackers import ControlKind, ControlTracker


def test_it_counts_falls_to_kafka_and_returns_of_one_process() -> None:
    tracker = ControlTracker("local")
    for control, session in (
        ("kafka", 5),  # joined, no link yet: not a fall
        ("local", 5),
        ("kafka", 5),  # a fall
        ("local", 5),  # and back
        ("kafka", 6),  # a successor
        ("local", 6),
        ("local", 7),
        ("kafka", 7),  # a fall, and it never returns
        ("local", 8),
    ):
        tracker.feed(server_status([live_worker(0, session=session, control=control)]))
    report = tracker.report()
    assert (report["kind"], report["fallbacks"], report["returns"]) == ("local", 2, 1)


def test_links_are_summed_over_terms() -> None:
    tracker = ControlTracker("auto")
    tracker.feed(server_status(term=1, counters={"control_local": 2, "control_broken": 1}))
    tracker.feed(server_status(term=1, counters={"control_local": 3, "control_broken": 1}))
    tracker.feed(server_status(term=2, counters={"control_local": 4, "control_redis": 1, "control_refused": 1}))
    report = tracker.report()
    assert report["links_opened"] == {"local": 7, "redis": 1}
    assert (report["links_broken"], report["links_refused"]) == (1, 1)
    assert "links opened 7 local, 1 redis, broken 1, refused 1" in control_line(report)


@pytest.mark.parametrize(
    ("kind", "controls", "behind"),
    [
        ("auto", ("local", "local"), ()),
        ("auto", ("local", "redis"), (1,)),
        ("auto", ("kafka", "redis"), (0, 1)),
        ("redis", ("redis", "kafka"), (1,)),
        ("kafka", ("kafka", "kafka"), ()),
    ],
)
def test_workers_on_a_slower_link_are_behind(
    kind: ControlKind, controls: tuple[str, ...], behind: tuple[int, ...]
) -> None:
    tracker = ControlTracker(kind)
    tracker.feed(
        server_status([live_worker(number, control=control) for number, control in enumerate(controls)], time_s=7.0)
    )
    assert (tracker.behind, tracker.updated_s) == (behind, 7.0)


def test_a_worker_that_is_down_is_behind() -> None:
    tracker = ControlTracker("local")
    tracker.feed(server_status([live_worker(0, control="local"), gone_worker(1)]))
    assert tracker.behind == (1,)
