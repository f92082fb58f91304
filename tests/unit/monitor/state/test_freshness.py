"""How fresh a job is, over its servers and model servers, and what is said of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from doll.config.freshness import FreshnessConfig
from doll.monitor.state import freshness
from doll.monitor.state.freshness import FreshnessProgress, freshness_text
from doll.records.control import ServedStatus
from doll.records.event_times import NO_LATENCIES, EventTimes, LatencyCounts
from statuses import server_status

NOW_MS = 1_800_000_000_000


def latencies(*seconds: float, limit_s: float | None = None, bad: int = 0) -> LatencyCounts:
    counts = NO_LATENCIES.with_batch(EventTimes(bad=bad), 0.0, None, 1.0)
    for each in seconds:
        counts = counts.with_batch(EventTimes(NOW_MS, (0,), 1), NOW_MS / 1000 + each, limit_s, 1.0)
    return counts


def served(name: str, *seconds: float, **more: Any) -> ServedStatus:
    return ServedStatus(server=name, time_s=1.0, term=1, served=latencies(*seconds, **more))


def test_terms_and_servers_add_up_and_only_the_last_word_of_each_counts() -> None:
    progress = FreshnessProgress(FreshnessConfig())
    progress.feed(server_status(term=1, learned=latencies(0.4), durable=None))
    progress.feed(server_status(term=1, learned=latencies(0.4, 0.4), durable=latencies(4.0)))
    progress.feed(server_status(term=2, learned=latencies(0.4), durable=latencies(4.0)))
    for name in ("a", "a", "b"):
        progress.feed(served(name, 1.2))
    stages = {stage.stage: stage for stage in progress.stages()}
    assert {name: stage.records for name, stage in stages.items()} == {"learned": 3, "durable": 2, "served": 2}
    assert 0.3 < stages["learned"].p50_s <= 0.5
    assert 3.0 < stages["durable"].p99_s <= 5.0


def test_no_more_model_servers_are_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freshness, "_MAX_SERVERS", 3)
    progress = FreshnessProgress(FreshnessConfig())
    for number in (0, 1, 2, 3, 4, 2):
        progress.feed(served(str(number), 1.2))
    assert progress.counts()["served"].records == 3


def test_an_objective_is_met_by_the_share_of_all_records() -> None:
    config = FreshnessConfig(event_to_served_s=5.0, share=0.75)
    progress = FreshnessProgress(config)
    progress.feed(served("a", 1.2, 4.0, 4.9, 6.0, limit_s=5.0))
    assert freshness_text(progress.stages()).endswith("75 % of 4 records within 5 s")
    # A record without a usable time is not within it.
    progress.feed(served("a", 1.2, 4.0, 4.9, 6.0, limit_s=5.0, bad=1))
    (stage,) = progress.stages()
    assert (stage.within, stage.is_met, stage.bad) == (0.6, False, 1)
    assert stage.text().endswith(
        "60 % of 5 records within 5 s (objective missed); 1 records without a usable event time"
    )


def test_nothing_is_said_of_records_without_times_unless_there_is_an_objective() -> None:
    status = server_status(term=1, learned=latencies(bad=7))
    for config, said in ((FreshnessConfig(), False), (FreshnessConfig(event_to_learned_s=5), True)):
        progress = FreshnessProgress(config)
        progress.feed(status)
        (stage,) = progress.stages()
        assert math.isnan(stage.p50_s)
        assert bool(freshness_text(progress.stages())) is said
    assert not FreshnessProgress(FreshnessConfig()).stages()
