"""The benchmark of losses for late labels: its score, its order of time, and that early negatives do harm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from benchmarks import delayed_feedback
from benchmarks.delayed_feedback import METHODS, Score, Stream, Tips, learn, score, table
from sklearn.metrics import log_loss, roc_auc_score

pytestmark = pytest.mark.slow  # loads torch


def test_the_score_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    labels = (rng.random(3000) < 0.2).astype(np.float32)
    predicted = np.round(rng.beta(2, 5, 3000) + 0.1 * labels, 2).clip(0, 1)  # rounded: many are equal
    result = score(labels, predicted)
    assert result.auc == pytest.approx(roc_auc_score(labels, predicted), abs=1e-12)
    assert result.log_loss == pytest.approx(log_loss(labels, predicted.clip(1e-6, 1 - 1e-6)), abs=1e-9)
    assert result.bias == pytest.approx(predicted.mean() / labels.mean() - 1)


def test_corrections_are_worth_more_than_early_negatives() -> None:
    stream = Stream("shop", 0, share=0.5)
    early, corrected, oracle = (
        learn(stream, method, 0.1) for method in ("early negatives as truth", "retraction", "oracle")
    )
    assert early.bias < -0.3
    assert abs(corrected.bias) < 0.2
    assert early.auc < corrected.auc
    assert max(oracle.log_loss, corrected.log_loss) < early.log_loss - 0.03


def test_held_out_samples_are_not_learned() -> None:
    stream = Stream("shop", 0, share=0.05)
    learned = stream.learned["oracle"].samples.num_samples
    assert learned + stream.held_out.samples.num_samples == len(stream.data.clicks)
    assert stream.learned["once"].samples.num_samples == learned
    assert (np.diff(stream.learned["early"].times_s) >= 0).all()


def test_a_trip_is_a_click_with_its_drop_off_as_delay() -> None:
    row = {
        "lpep_pickup_datetime": "2024-01-02T10:00:00", "lpep_dropoff_datetime": "2024-01-02T10:20:30",
        "PULocationID": "25", "DOLocationID": "65", "VendorID": "2", "passenger_count": "1", "RatecodeID": "1",
        "trip_type": "1", "tip_amount": "2.5",
    }  # fmt: skip
    _, features, delay_s, has_tip = delayed_feedback._trip(row)
    assert (features["hour"], features["weekday"], features["places"][2]) == (10, 1, "25>65")
    assert (delay_s, has_tip) == (1230, True)
    sample: Any = Tips().decode(
        b'{"places": ["25", "65", "25>65", "2", "1", "1", "1"], "hour": 10, "weekday": 1, "purchase": false}'
    )
    assert (sample.x["ids"].shape, sample.y["label"]) == ((8,), 0)


def test_the_table_compares_each_seed_with_its_oracle() -> None:
    rows = {
        "oracle": [Score(0.8, 0.4, 0.0), Score(0.7, 0.5, 0.0)],
        "FNW": [Score(0.79, 0.41, 0.1), Score(0.68, 0.5, 0)],
    }
    text = table({"shop": rows}, {"shop": {"oracle": 0.1, "FNW": 0.3}})
    assert text.splitlines()[-1] == "| shop | FNW | 73.50 | -1.50 ± 0.71 | 0.4550 | +5.0% | 0.3 |"
    assert set(rows) < set(METHODS)
