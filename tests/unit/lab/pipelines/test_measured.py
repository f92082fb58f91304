"""Timelines of what stages did: whole minibatches in a row."""

from __future__ import annotations

from doll.pipeline.runtime.messages import StageTask

from doll_lab.pipelines.measured import timeline_of
from doll_lab.pipelines.schedule import StageTimes, simulate, simulate_as_measured


def tasks(minibatches: int, first: int = 8) -> list[StageTask]:
    timeline = simulate([StageTimes(1.0, 2.0)] * 3, 4, minibatches)
    return [
        StageTask(span.stage, span.kind, span.minibatch - 1 + first, 100 + span.start_s, 100 + span.end_s)
        for span in timeline.spans
    ]


def test_a_timeline_begins_with_the_first_task() -> None:
    timeline = timeline_of(tasks(9), 3, 4)
    expected = simulate([StageTimes(1.0, 2.0)] * 3, 4, 9)
    assert [timeline.order(stage) for stage in range(3)] == [expected.order(stage) for stage in range(3)]
    assert timeline.end_s == expected.end_s
    assert simulate_as_measured(timeline).end_s == expected.end_s


def test_what_a_killed_process_has_not_finished_is_left_out() -> None:
    cut = [task for task in tasks(9) if task.end_s < 115]
    timeline = timeline_of(cut, 3, 4)
    assert 0 < len(timeline.completions_s) < 9
    assert len(timeline.spans) == 5 * len(timeline.completions_s)
    assert timeline_of([], 3, 4).spans == ()


def test_a_minibatch_that_is_computed_again_ends_the_row() -> None:
    twice = [*tasks(9), *(task for task in tasks(9) if task.batch == 11)]
    assert len(timeline_of(twice, 3, 4).completions_s) == 3
