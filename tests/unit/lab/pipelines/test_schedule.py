"""The schedule of a virtual worker: Figure 1 of the HetPipe paper, its rules, and the gain of more in flight."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from benchmarks.paper.hetpipe_fig3 import saturation, utilization
from benchmarks.paper.hetpipe_staleness import LastInFirstOut

from doll_lab.pipelines.schedule import Pipeline, StageTimes, simulate, simulate_as_measured
from doll_lab.pipelines.timeline import Kind, Span, Timeline

UNIT = [StageTimes(1.0, 1.0)] * 4
STAGE_0 = "F1 F2 F3 F4 B1 F5 B2 F6 B3 F7 B4 F8 B5 F9 B6 F10 B7 F11 B8 F12"
# As printed. Of two tasks that arrive at the same moment, the forward one comes first.
FIGURE_1 = (
    STAGE_0,
    "F1 F2 F3 F4 B1 B2 F5 B3 F6 B4 F7 B5 F8 B6 F9 B7 F10 B8 F11 B9",
    "F1 F2 F3 F4 B1 B2 B3 F5 B4 F6 B5 F7 B6 F8 B7 F9 B8 F10 B9 F11 B10",
    "FB1 FB2 FB3 FB4 FB5 FB6 FB7 FB8 FB9 FB10",
)


class ForwardFirst(Pipeline):
    """Forward tasks before backward ones, whenever they arrived: no order of arrival."""

    def _next(self, stage: int) -> tuple[Kind, int] | None:
        if self._forward[stage]:
            return "FB" if stage == self._last else "F", self._forward[stage].popleft()[1]
        return ("B", self._backward[stage].popleft()[1]) if self._backward[stage] else None


def random_stages(rng: np.random.Generator, k: int | None = None) -> list[StageTimes]:
    k = k or int(rng.integers(1, 6))
    return [StageTimes(*times) for times in rng.lognormal(0.0, 0.7, (k, 2)).tolist()]


def broken_rules(timeline: Timeline) -> set[str]:
    """Which of the rules a timeline breaks, worked out from its spans alone."""
    last, broken = timeline.num_stages - 1, set()
    begin = {(span.stage, span.kind, span.minibatch): span for span in timeline.spans}
    arrives: dict[Span, float] = {}
    completions = timeline.completions_s
    for span in timeline.spans:
        stage, p = span.stage, span.minibatch
        if span.kind != "B" and stage == 0:
            arrives[span] = 0.0 if p <= timeline.in_flight else completions[p - timeline.in_flight - 1]
        elif span.kind != "B":
            arrives[span] = begin[stage - 1, "F", p].end_s
        else:
            arrives[span] = begin[stage + 1, "FB" if stage + 1 == last else "B", p].end_s
    for stage in range(timeline.num_stages):
        spans = timeline.of_stage(stage)
        for kind in "FB":
            numbers = [span.minibatch for span in spans if kind in span.kind]
            if numbers != sorted(numbers):
                broken.add(f"{kind} in order")
        if stage == last and {span.kind for span in spans} != {"FB"}:
            broken.add("the last stage does both in one task")
        free_s = 0.0
        for span in spans:
            if span.start_s != max(free_s, arrives[span]):
                broken.add("begins as soon as it can")
            free_s = span.end_s
        if [arrives[span] for span in spans] != sorted(arrives[span] for span in spans):
            broken.add("first in, first out")
    return broken


# --- Figure 1 ---------------------------------------------------------------------------------------------------------


def test_figure_1_is_reproduced_as_printed() -> None:
    timeline = simulate(UNIT, 4, 16, forward_first=True)
    for stage, order in enumerate(FIGURE_1):
        assert timeline.order(stage).startswith(order + " "), stage


def test_figure_1_backward_first_keeps_fewer_activations() -> None:
    timeline = simulate(UNIT, 4, 16)
    assert timeline.order(0).startswith(STAGE_0 + " ")
    assert timeline.order(3).startswith(FIGURE_1[3] + " ")
    assert timeline.order(2).startswith("F1 F2 F3 B1 F4 B2 B3 F5 B4 F6 ")
    assert [timeline.max_in_flight(stage) for stage in range(4)] == [4, 4, 3, 1]
    forward_first = simulate(UNIT, 4, 16, forward_first=True)
    assert [forward_first.max_in_flight(stage) for stage in range(4)] == [4, 4, 4, 1]


def test_last_in_first_out_is_not_figure_1() -> None:
    assert not simulate(UNIT, 4, 16, pipeline=LastInFirstOut).order(0).startswith(STAGE_0)


# --- the rules --------------------------------------------------------------------------------------------------------


def test_the_rules_hold_for_random_virtual_workers() -> None:
    rng = np.random.default_rng(1)
    for _ in range(150):
        stages, in_flight = random_stages(rng), int(rng.integers(1, 7))
        factors = rng.lognormal(0.0, 0.3, (len(stages), 2, 41))

        def jitter(stage: int, kind: Kind, minibatch: int, factors: Any = factors) -> float:
            return float(factors[stage, int(kind == "B"), minibatch])

        timeline = simulate(stages, in_flight, 40, jitter=jitter)
        assert broken_rules(timeline) == set()
        assert len(timeline.spans) == 40 * (2 * len(stages) - 1)
        assert timeline.completions_s == sorted(timeline.completions_s)


@pytest.mark.parametrize(("mutant", "rule"), [(LastInFirstOut, "B in order"), (ForwardFirst, "first in, first out")])
def test_a_pipeline_that_breaks_a_rule_is_caught(mutant: type[Pipeline], rule: str) -> None:
    rng = np.random.default_rng(2)
    assert any(rule in broken_rules(simulate(random_stages(rng, 4), 4, 40, pipeline=mutant)) for _ in range(20))


def test_one_minibatch_in_flight_is_computed_alone() -> None:
    stages = [StageTimes(1.0, 2.0), StageTimes(0.5, 4.0), StageTimes(3.0, 0.25)]
    timeline = simulate(stages, 1, 5)
    assert timeline.completions_s == pytest.approx([10.75 * p for p in range(1, 6)])
    assert timeline.throughput() == pytest.approx(1 / 10.75)
    assert timeline.max_in_flight(0) == 1


def test_a_schedule_follows_from_measured_durations() -> None:
    rng = np.random.default_rng(5)
    measured = simulate(random_stages(rng, 3), 3, 30, jitter=lambda stage, kind, p: float(rng.lognormal(0.0, 0.3)))
    again = simulate_as_measured(measured)
    assert [again.order(stage) for stage in range(3)] == [measured.order(stage) for stage in range(3)]
    assert again.completions_s == pytest.approx(measured.completions_s)
    spans = tuple(span for span in measured.spans if span[:3] != (1, "B", 7))
    with pytest.raises(ValueError, match="expected all tasks of minibatch 7, got no B of stage 1"):
        simulate_as_measured(Timeline(3, 3, spans))


def test_a_minibatch_waits_until_it_is_admitted() -> None:
    timeline = simulate(UNIT, 4, 8, admitted_s=lambda p: 100.0 if p == 3 else 0.0)
    starts = [span.start_s for span in timeline.of_stage(0) if span.kind == "F"]
    assert starts[:4] == [0.0, 1.0, 100.0, 101.0]
    assert broken_rules(simulate(UNIT, 4, 8, admitted_s=lambda p: 0.0)) == set()


def test_a_stage_without_work_takes_no_time() -> None:
    timeline = simulate([StageTimes(0.0, 0.0), StageTimes(1.0, 1.0), StageTimes(0.0, 0.0)], 3, 10)
    assert timeline.end_s == 20.0
    assert broken_rules(timeline) == set()


@pytest.mark.parametrize(
    ("stages", "in_flight", "words"),
    [
        ([], 1, "got 0 stages and 1"),
        (UNIT, 0, "got 4 stages and 0"),
        ([StageTimes(1.0, 1.0), StageTimes(1.0, -2.0)], 1, "stage 1: expected times of 0 s or more"),
        ([StageTimes(float("nan"), 1.0)], 1, "stage 0: expected times of 0 s or more"),
    ],
)
def test_what_is_no_pipeline_is_refused(stages: list[StageTimes], in_flight: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        simulate(stages, in_flight, 5)


def test_a_pipeline_refuses_a_minibatch_without_room_and_an_end_without_a_task() -> None:
    pipeline = Pipeline(UNIT, 1)
    pipeline.start(0.0)
    with pytest.raises(ValueError, match="minibatch 2: expected 1 to be complete, got 0"):
        pipeline.start(0.0)
    with pytest.raises(ValueError, match="stage 2: expected a task under way"):
        pipeline.end(2, 0.0)


# --- minibatches in flight, memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", range(2, 7))
def test_with_equal_stages_the_stages_behind_keep_less(k: int) -> None:
    """Up to N_m = 4: with more, tasks that arrived in the beginning are done before the first backward ones."""
    for in_flight in range(1, min(k, 4) + 1):
        timeline = simulate([StageTimes(1.0, 1.0)] * k, in_flight, 30)
        most = [timeline.max_in_flight(stage) for stage in range(k)]
        assert most == [min(in_flight, 2 * (k - stage) - 1) for stage in range(k)]
    assert simulate([StageTimes(1.0, 1.0)] * k, 2 * k, 30).max_in_flight(0) == 2 * k


def test_with_any_times_all_stages_but_the_last_may_keep_all_minibatches_in_flight() -> None:
    rng = np.random.default_rng(3)
    most = [0] * 4
    for _ in range(100):
        timeline = simulate(random_stages(rng, 4), 4, 40)
        counts = [timeline.max_in_flight(stage) for stage in range(4)]
        assert max(counts) <= 4
        assert counts[-1] == 1
        most = [max(pair) for pair in zip(most, counts, strict=True)]
    assert most == [4, 4, 4, 1]


def test_memory_over_time_follows_the_minibatches_in_flight() -> None:
    timeline = simulate(UNIT, 4, 16)
    sizes: dict[str, Any] = {"parameter_bytes": 10.0, "activation_bytes": 3.0, "optimizer_multiplier": 2.0}
    assert timeline.memory_steps(0, **sizes)[:3] == [(0.0, 30.0), (0.0, 43.0), (1.0, 56.0)]
    assert max(value for _, value in timeline.memory_steps(0, **sizes)) == 30.0 + 4 * 13.0
    assert max(value for _, value in timeline.memory_steps(3, **sizes)) == 30.0 + 13.0
    assert timeline.memory_steps(0, **sizes)[-1] == (timeline.end_s, 30.0)


# --- throughput -------------------------------------------------------------------------------------------------------


def gains(times: list[float], most: int = 6) -> tuple[list[float], list[float]]:
    """Throughput by N_m over that of N_m = 1: in steady state, and of 200 minibatches from beginning to end."""
    timelines = [simulate([StageTimes(t, t) for t in times], n, 200) for n in range(1, most + 1)]
    one = timelines[0]
    return [t.throughput() / one.throughput() for t in timelines], [one.end_s / t.end_s for t in timelines]


def test_four_equal_stages_gain_up_to_four_minibatches() -> None:
    steady, whole = gains([1.0, 1.0, 1.0, 1.0])
    assert steady == pytest.approx([1.0, 2.0, 3.0, 4.0, 4.0, 4.0], rel=0.01)
    assert whole == pytest.approx([1.0, 2.0, 2.97, 3.94, 3.94, 3.94], abs=0.006)


def test_a_stage_four_times_as_slow_leaves_little_to_gain() -> None:
    steady, _ = gains([1.0, 4.0, 1.0, 1.0])
    assert steady == pytest.approx([1.0] + [1.75] * 5, rel=0.01)


def test_throughput_grows_up_to_the_slowest_stage() -> None:
    rng = np.random.default_rng(4)
    for _ in range(20):
        stages = random_stages(rng, 4)
        throughputs = [simulate(stages, n, 60 + 6 * n).throughput() for n in range(1, 13)]
        assert throughputs[-1] / throughputs[0] == pytest.approx(saturation(stages), rel=0.02)
        assert all(after >= 0.98 * before for before, after in pairwise(throughputs))


def test_in_steady_state_the_slowest_stage_is_never_idle() -> None:
    timeline = simulate([StageTimes(1.0, 1.0), StageTimes(3.0, 3.0), StageTimes(1.0, 1.0)], 4, 60)
    assert utilization(timeline, 1) == pytest.approx(1.0)
    assert utilization(timeline, 0) == pytest.approx(1 / 3, rel=0.01)
    idle_s = [sum(b.start_s - a.end_s for a, b in pairwise(timeline.of_stage(stage))) for stage in range(2)]
    assert idle_s[1] < 10.0
    assert idle_s[0] > 200.0


def test_a_run_without_a_steady_state_has_no_throughput() -> None:
    with pytest.raises(ValueError, match="expected 14 minibatches at least"):
        simulate(UNIT, 4, 13).throughput()
    assert simulate(UNIT, 4, 14).throughput() > 0
