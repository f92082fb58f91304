"""Schedules: what goes when and where, and the pace at which it is sent."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from doll.config import JobConfig
from doll.errors import ConfigError
from doll.producers.arrivals import BURST_S, Pacer
from doll.producers.schedule import arrival_times, scheduled_samples
from job_files import job


def _config(arrivals: str, source: str = "{kind: jsonl, path: d.jsonl}", folder: Path = Path(".")) -> JobConfig:
    return job(name="t", workers=2, text=f"source: {source}\narrivals: {arrivals}", folder=folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "d.jsonl").write_text("".join(f"{n}\n" for n in range(7)))
    (tmp_path / "gaps.txt").write_text("1\n2\n")
    return tmp_path


def test_asap_sends_everything_in_the_files_order(folder: Path) -> None:
    sent = list(scheduled_samples(_config("{process: asap}", folder=folder), [0, 0]))
    assert sent == [(0.0, n % 2, b"%d" % n) for n in range(7)]


def test_streams_of_different_rates_keep_their_own_lines_and_all_are_sent(folder: Path) -> None:
    config = _config("{process: deterministic, rate_per_s: [1, 10]}", folder=folder)
    sent = list(scheduled_samples(config, [0, 0]))
    assert [time_s for time_s, _, _ in sent] == sorted(time_s for time_s, _, _ in sent)
    assert [value for _, stream, value in sent if stream == 0] == [b"0", b"2", b"4", b"6"]
    assert [value for _, stream, value in sent if stream == 1] == [b"1", b"3", b"5"]
    assert sent[-1][0] == pytest.approx(3.0)


def test_a_trace_starts_each_stream_elsewhere(folder: Path) -> None:
    times = arrival_times(_config("{process: trace, trace: gaps.txt}", folder=folder), [0, 0])
    assert [list(itertools.islice(stream, 3)) for stream in times] == [[1.0, 3.0, 4.0], [2.0, 3.0, 5.0]]


def test_a_missing_trace_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"arrivals.trace: expected a text file of gaps at .*none.txt: No such file"):
        arrival_times(_config("{process: trace, trace: none.txt}", folder=folder), [0, 0])


def test_poisson_streams_reproduce_and_go_on_elsewhere_after_a_restart() -> None:
    config = _config("{process: poisson, rate_per_s: 5}")
    first, again, later = (
        [list(itertools.islice(stream, 50)) for stream in arrival_times(config, starts)]
        for starts in ([0, 0], [0, 0], [50, 0])
    )
    assert first == again
    assert first[0] != later[0]
    assert first[1] == later[1]
    assert first[0] != first[1]


def test_lines_of_a_pipe_go_round_the_streams_and_silence_takes_no_turn() -> None:
    read_end, write_end = os.pipe()
    try:
        feed = scheduled_samples(_config("{process: asap}", "{kind: stdin}"), [0, 0], pipe=read_end)
        os.write(write_end, b"a\n")
        assert next(feed) == (0.0, 0, b"a")
        assert next(feed) == (0.0, 1, None)
        assert next(feed) == (0.0, 1, None)
        os.write(write_end, b"b\nc\n")
        os.close(write_end)
        write_end = -1
        assert list(feed) == [(0.0, 1, b"b"), (0.0, 0, b"c")]
    finally:
        os.close(read_end)
        if write_end >= 0:
            os.close(write_end)


def test_a_pipe_has_one_rate() -> None:
    with pytest.raises(ConfigError, match="stdin go to the streams in turn: expected one rate"):
        scheduled_samples(_config("{rate_per_s: [1, 2]}", "{kind: stdin}"), [0, 0])


def test_a_paused_stream_loses_no_line_and_its_time_goes_by(folder: Path) -> None:
    down: set[int] = {1}
    config = _config("{process: deterministic, rate_per_s: 1}", folder=folder)
    feed = scheduled_samples(config, [0, 0], paused=down.__contains__)
    assert [next(feed) for _ in range(4)] == [(0.0, 0, b"0"), (0.5, 1, None), (1.0, 0, b"2"), (1.5, 1, None)]
    down.clear()
    assert [(stream, value) for _, stream, value in feed if value is not None] == [
        (0, b"4"), (1, b"1"), (0, b"6"), (1, b"3"), (1, b"5")
    ]  # fmt: skip


# --- pacing, on a virtual clock ----------------------------------------------------------------------------------


def _send_all(times: list[float], cost_s: float, stalls: dict[int, float] | None = None) -> list[float]:
    """When each sample is sent by a sender that takes `cost_s` a sample and stalls now and then."""
    clock_s, sent = 1000.0, []
    pacer = Pacer(clock_s)
    for index, time_s in enumerate(times):
        while (wait_s := pacer.wait_s(time_s, clock_s)) > 0:
            clock_s += wait_s
        sent.append(clock_s - 1000.0)
        clock_s += cost_s + (stalls or {}).get(index, 0.0)
    return sent


def test_nothing_is_sent_early_nor_later_than_a_burst() -> None:
    times = np.cumsum(np.random.default_rng(0).exponential(1 / 500, 5000)).tolist()
    late = np.array(_send_all(times, 20e-6)) - times
    assert late.min() >= -1e-9
    assert late.max() <= BURST_S + 0.002


def test_a_stalled_sender_catches_up_and_does_not_drift() -> None:
    times = [n / 100 for n in range(1000)]
    late = np.array(_send_all(times, 1e-4, {100: 2.0})) - times
    assert late[101] == pytest.approx(2.0, abs=0.02)
    assert late[150:].max() < 2.0
    assert late[400:].max() <= BURST_S + 0.001


def test_samples_due_close_together_leave_in_one_burst() -> None:
    sent = _send_all([n / 2000 for n in range(2000)], 0.0)
    assert len(set(sent)) <= 1.0 / BURST_S + 2


def test_an_idle_source_builds_up_no_debt() -> None:
    pacer = Pacer(0.0)
    pacer.idle(5.0, now_s=65.0)
    assert pacer.wait_s(5.0, 65.0) == 0.0
    assert pacer.wait_s(6.0, 65.0) == pytest.approx(1.0)
    pacer.idle(70.0, now_s=66.0)  # before its time: nothing moves
    assert pacer.wait_s(6.0, 65.0) == pytest.approx(1.0)


def test_behind_counts_only_lateness_against_a_schedule() -> None:
    pacer = Pacer(10.0)
    assert pacer.behind_s(2.0, 15.0) == pytest.approx(3.0)
    assert pacer.behind_s(9.0, 15.0) == 0.0
    assert pacer.behind_s(0.0, 15.0) == 0.0  # as fast as possible is never late
