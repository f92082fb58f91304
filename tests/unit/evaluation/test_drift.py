"""Metrics that become worse are found, with the records between which that came; a model that learns is none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from doll.config.drift import DriftConfig
from doll.errors import ConfigError
from doll.evaluation.drift import Drift, DriftWatch
from doll.records.control import AnyRecord, Member, Update
from fuzzing import ALL_EXAMPLES, seeds
from pydantic import ValidationError
from record_builders import term_started

BATCH = 16


def update(version: int, term: int = 1, *, loss: float = 1.0, **values: float) -> Update:
    """The update of a batch of partition `version % 3`."""
    partition, batch = version % 3, version // 3
    member = Member(
        worker=0, partition=partition, batch=batch, lo=batch * BATCH, hi=(batch + 1) * BATCH, base_version=version - 1,
        n_samples=BATCH,
    )  # fmt: skip
    return Update(
        term=term, version=version, members=(member,), n_samples=BATCH, loss=loss, metrics=values, time_s=float(version)
    )


def record_of(version: int, name: str, value: float) -> Update:
    return update(version, loss=value) if name == "loss" else update(version, **{name: value})  # type: ignore[arg-type]


def losses(rng: np.random.Generator, count: int, mean: float = 0.5) -> Iterator[float]:
    """Means of the losses of batches."""
    for _ in range(count):
        yield float(rng.exponential(mean, BATCH).mean())


def watched(values: Iterable[float], config: Any = None, name: str = "loss") -> list[Drift]:
    watch = DriftWatch(DriftConfig.model_validate(config or {}))
    return [drift for at, value in enumerate(values, 1) for drift in watch.feed(record_of(at, name, value))]


@pytest.mark.parametrize("detector", ["adwin", "page_hinkley", "kswin"])
def test_a_planted_change_is_found_with_its_place(detector: str) -> None:
    for seed in seeds(10):
        rng = np.random.default_rng(seed)
        drifts = watched(
            [*losses(rng, 2_000), *losses(rng, 300, 0.8)], {"metrics": {"loss": detector}}
        )  # fmt: skip
        assert [drift.metric for drift in drifts[:1]] == ["loss"], seed
        drift = drifts[0]
        assert 2_000 < drift.version <= 2_200
        assert drift.version - 250 <= drift.since <= drift.version
        assert drift.after > 1.2 * drift.before
        assert [lo // BATCH for _, lo, _ in drift.offsets] == pytest.approx([drift.since // 3] * 3, abs=1)
        assert max(hi for _, _, hi in drift.offsets) == (drift.version // 3 + 1) * BATCH


def test_adwin_says_when_the_change_came() -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        (drift, *_) = watched([*losses(rng, 2_000), *losses(rng, 300, 1.0)])
        assert abs(drift.since - 2_000) <= 10
        assert drift.before == pytest.approx(0.5, rel=0.05)
        assert drift.after == pytest.approx(1.0, rel=0.15)


def test_a_stationary_stream_raises_no_alarm() -> None:
    """10^5 values, each of a batch; in `make test-all` 10^6."""
    for seed in range(100 if ALL_EXAMPLES else 10):
        assert watched(losses(np.random.default_rng(seed), 10_000)) == []


def test_a_model_that_learns_is_no_drift() -> None:
    rng = np.random.default_rng(3)
    falling = [float(rng.exponential(0.3 + 2 / (1 + at / 50), BATCH).mean()) for at in range(3_000)]
    assert watched(falling) == []
    rising = [float((rng.random(BATCH) < 0.9 - 0.8 / (1 + at / 50)).mean()) for at in range(3_000)]
    assert watched(rising, {"metrics": {"accuracy": "adwin"}}, "accuracy") == []
    sinking = [float((rng.random(BATCH) < (0.9 if at < 1_500 else 0.7)).mean()) for at in range(2_000)]
    (drift,) = watched(sinking, {"metrics": {"accuracy": "adwin"}}, "accuracy")
    assert drift.before == pytest.approx(0.89, abs=0.01)
    calibration = [float(1 + rng.normal(0, 0.02) - 0.3 * (at > 1_500)) for at in range(2_000)]
    (drift,) = watched(calibration, {"metrics": {"calibration": {}}}, "calibration")
    assert drift.before == pytest.approx(1.0, abs=0.02)


def test_versions_that_a_server_repeats_are_seen_once_and_another_generation_begins_anew() -> None:
    rng = np.random.default_rng(5)
    values = [*losses(rng, 1_500), *losses(rng, 200, 1.2)]
    plain: list[AnyRecord] = [update(at, loss=value) for at, value in enumerate(values, 1)]
    again = [update(at, 2, loss=5.0) for at in range(1_001, 1_101)]
    after = [msgspec.structs.replace(record, term=2) for record in plain[1_100:]]
    records = [term_started(1), *plain[:1_100], term_started(2, 1_000), *again, *plain[1_050:1_100], *after]
    config = DriftConfig()

    def drifts_of(records: Iterable[AnyRecord]) -> list[Drift]:
        watch = DriftWatch(config)
        return [drift for record in records for drift in watch.feed(record)]

    expected = drifts_of(plain)
    assert len(expected) == 1
    assert drifts_of(records) == [replace(drift, term=2) for drift in expected] == drifts_of(records)
    fresh: list[AnyRecord] = [
        term_started(3, generation=3),
        *(update(at, 3, loss=2.0 + 0.01 * (at % 7)) for at in range(1, 500)),
    ]
    assert drifts_of([*plain[:1_400], *fresh]) == []
    assert DriftWatch(config, after_term=1).feed(plain[0]) == []


def test_values_that_are_no_numbers_are_left_out() -> None:
    rng = np.random.default_rng(6)
    values = [value if at % 3 else float("nan") for at, value in enumerate(losses(rng, 3_000))]
    assert watched(values) == []
    assert watched([0.0] * 2_000) == []
    (drift,) = watched([*([0.0] * 500), *([1e308] * 100)])
    assert json.loads(msgspec.json.encode(drift))["after"] >= 1e307


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"metrics": {"gini": "adwin"}}, r"metrics\.gini\.better: expected lower, higher or one"),
        ({"metrics": {"loss": "ddm"}}, "'adwin', 'page_hinkley' or 'kswin'"),
    ],
)
def test_a_wrong_section_is_refused(config: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        DriftConfig.model_validate(config)


def test_an_argument_that_river_does_not_know_is_refused_by_its_key() -> None:
    config = DriftConfig.model_validate({"metrics": {"loss": {"args": {"dleta": 0.1}}}})
    with pytest.raises(ConfigError, match=r"drift\.metrics\.loss\.args: ADWIN.*dleta"):
        DriftWatch(config)


_LOADED = """
import sys
from doll.config.drift import DriftConfig
from doll.evaluation.drift import DriftWatch
metrics = {"loss": "adwin", "accuracy": "page_hinkley", "auc": "kswin"}
DriftWatch(DriftConfig.model_validate({"metrics": metrics}))
print(sorted(sys.modules.keys() & {"pandas", "sklearn", "sqlalchemy", "river.drift", "river.datasets"}))
from river import drift
print(drift.ADWIN.__name__, drift.binary.DDM.__name__, drift.ADWIN is sys.modules["river.drift.adwin"].ADWIN)
"""


@pytest.mark.slow
def test_detectors_load_without_the_data_sets_of_river_and_a_task_may_load_all_of_it() -> None:
    done = subprocess.run([sys.executable, "-c", _LOADED], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "ADWIN DDM True"]
