"""The example `delayed_clicks`: what its joiner sends, what it refuses, and that corrections teach the true rate."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from typing import Any, get_args

import numpy as np
import pytest
from doll.config import load
from doll.consumers.compute.gradient import GradientComputer
from doll.consumers.intake.decoding import RawRecords, decode_records
from doll.errors import ConfigError
from doll.evaluation.heldout import HeldOut, HeldOutError
from doll.model.flat_model import build
from doll.producers.sources import open_streams
from doll.ps.model.updater import make_parts
from doll.task.base import load_task
from doll.testing import check_task
from examples.delayed_clicks.task import (
    DAY_S,
    EARLY_S,
    WINDOW_S,
    Emit,
    Loss,
    Purchases,
    ShopClick,
    endless,
    joined,
)
from paths import EXAMPLES

pytestmark = pytest.mark.slow  # loads torch

JOB = EXAMPLES / "delayed_clicks" / "job.yaml"
CLICK: dict[str, Any] = {"ad": "ad1", "site": "s2", "device": "phone", "price": 12.5, "purchase": True}


def encoded(**changes: Any) -> bytes:
    return json.dumps({**CLICK, **changes}).encode()


def sent(clicks: list[ShopClick], emit: Emit) -> list[tuple[float, dict[str, Any]]]:
    return [(time_s, json.loads(record)) for time_s, record in joined(clicks, emit)]


def test_the_joiner_sends_a_negative_early_and_corrects_or_confirms_it() -> None:
    clicks = [ShopClick(1000.0 * at, CLICK, delay) for at, delay in enumerate([60.0, 5000.0, math.inf])]
    rows = [
        (
            time_s, row["purchase"], row["doll_label_age_s"], row["doll_is_correction"], row["doll_replaced_label"],
            row["doll_features"],
        )
        for time_s, row in sent(clicks, "early")
    ]  # fmt: skip
    assert rows == [
        (60, True, 60, False, None, "clicks/0@0"),
        (1000 + EARLY_S, False, EARLY_S, False, None, "clicks/0@1"),
        (2000 + EARLY_S, False, EARLY_S, False, None, "clicks/0@2"),
        (6000, True, 5000, True, False, "clicks/0@1"),
        (2000 + WINDOW_S, False, WINDOW_S, True, False, "clicks/0@2"),
    ]


@pytest.mark.parametrize("emit", get_args(Emit))
def test_records_are_sent_in_the_order_of_their_times_and_end_with_the_true_label(emit: Emit) -> None:
    clicks = list(itertools.islice(endless(3, 5000, np.random.default_rng(3)), 2000))
    rows = sent(clicks, emit)
    assert [time_s for time_s, _ in rows] == sorted(time_s for time_s, _ in rows)
    pairs = defaultdict(list)
    for _, row in rows:
        pairs[row["doll_features"]].append(row)
    assert len(pairs) == len(clicks)
    for offset, click in enumerate(clicks):
        labels = [row["purchase"] for row in pairs[f"clicks/0@{offset}"]]
        assert labels[-1] == click.is_bought
        assert len(labels) == (2 if emit == "early" and click.delay_s > EARLY_S else 1)


def test_purchases_are_late_and_some_prices_are_missing() -> None:
    clicks = list(itertools.islice(endless(0, 5000, np.random.default_rng(0)), 5000))
    delays = np.array([click.delay_s for click in clicks if click.is_bought])
    assert 0.1 < len(delays) / len(clicks) < 0.4
    assert 0.02 < (delays <= EARLY_S).mean() < 0.3
    assert (delays > DAY_S / 2).mean() > 0.05
    assert 0.1 < np.mean([click.features["price"] is None for click in clicks]) < 0.2


def test_a_stream_that_is_started_again_goes_on_where_it_was() -> None:
    config = load(JOB)
    whole = list(itertools.islice(open_streams(config, [0, 0])[1], 300))
    assert list(itertools.islice(open_streams(config, [0, 200])[1], 100)) == whole[200:]


@pytest.mark.parametrize("loss", get_args(Loss))
def test_the_task_is_one_that_doll_expects_with_every_loss(loss: Loss) -> None:
    records = [record for _, record in itertools.islice(joined(endless(0, 5000, np.random.default_rng(0))), 200)]
    report = check_task(
        Purchases(loss, columns=500, holdout_clicks=0),
        records[:150],
        refused=[
            b"{}", b"purchase", encoded(device=3), encoded(price=-1), encoded(purchase="yes"), encoded(price="12"),
            encoded(doll_replaced_label=7), encoded(doll_is_correction=1),
        ],
        lr=0.02,
    )  # fmt: skip
    assert report.samples == 150


def test_an_unknown_loss_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="loss: expected one of early, retraction, fnw, "):
        load_task(load(JOB, ["task.args.loss=defuse"]))


def learned(loss: Loss, emit: Emit, num_records: int) -> HeldOutError:
    """Return the held-out error after this many records, learned as workers and server do."""
    overrides = [f"task.args.loss={loss}", "task.args.holdout_day=2", "task.args.columns=4096"]
    config = load(JOB, overrides)
    task = load_task(config)
    model = build(config, task)
    updater, _ = make_parts(config.training, model)
    computer, size = GradientComputer(task, model), config.data.batch_size * config.group_size
    records = joined(endless(0, 10_000, np.random.default_rng(1)), emit)
    for _ in range(num_records // size):
        values = [record for _, record in itertools.islice(records, size)]
        batch = decode_records(task, RawRecords(range(size), values), samples_per_record=1, max_record_bytes=9999)
        gradient = computer.compute(*batch.samples)
        updater.apply([gradient.values.copy()], 1 / gradient.weight, gradient.weight)
    return HeldOut(task, 4000).evaluate(model.module)


def test_corrections_teach_the_true_rate_and_early_negatives_do_not() -> None:
    """The records are those of the first virtual days: those of a pair are then early negatives and corrections."""
    early, corrected, oracle = (
        learned("early", "early", 30_000),
        learned("retraction", "early", 30_000),
        learned("early", "oracle", 25_000),
    )
    assert early.metrics["bias"] < -0.1
    assert abs(corrected.metrics["bias"]) < 0.05
    assert corrected.metrics["log_loss"] < early.metrics["log_loss"] - 0.03
    assert corrected.metrics["log_loss"] < oracle.metrics["log_loss"] + 0.02
