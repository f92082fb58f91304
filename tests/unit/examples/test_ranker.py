"""The example `ranker`: what it refuses, its loss and metrics by list, and that it ranks better than popularity."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from doll.config import load
from doll.consumers.compute.gradient import GradientComputer
from doll.consumers.intake.decoding import RawRecords, decode_records
from doll.errors import ConfigError
from doll.evaluation.heldout import HeldOut, HeldOutError
from doll.model.flat_model import build
from doll.ps.model.updater import make_parts
from doll.task.base import Task, load_task
from doll.task.batches import SampleBatch, batch_of
from examples.ranker.task import Ranker, made_up
from paths import EXAMPLES

pytestmark = pytest.mark.slow  # loads torch

JOB = EXAMPLES / "ranker" / "job.yaml"
LIST: dict[str, Any] = {
    "number": 5, "query": 3, "thrift": 0.5, "items": [2**62, 7, 9], "categories": [1, 2, 0],
    "prices": [0.5, -1, 2.25], "on_sale": [True, False, False], "clicked": 2,
}  # fmt: skip


def encoded(**changes: Any) -> bytes:
    return json.dumps({**LIST, **changes}).encode()


def decoded(*records: bytes, task: Task | None = None) -> Any:
    raw = RawRecords(range(len(records)), records)
    return decode_records(task or Ranker(), raw, samples_per_record=1, max_record_bytes=10_000)


def test_a_list_is_a_sample_for_each_of_its_items() -> None:
    batch = decoded(encoded()).samples
    assert {name: (array.dtype.name, array.tolist()) for name, array in batch.x.items()} == {
        "query": ("int64", [3, 3, 3]), "thrift": ("float32", [0.5] * 3), "item": ("int64", [2**62, 7, 9]),
        "category": ("int32", [1, 2, 0]), "price": ("float32", [0.5, -1, 2.25]),
        "on_sale": ("bool", [True, False, False]),
    }  # fmt: skip
    assert (batch.y.dtype.name, batch.y.tolist(), batch.weight.tolist()) == ("float32", [0, 0, 1], [1, 1, 3])
    assert batch.group.tolist() == [5, 5, 5]
    assert decoded(encoded(), task=Ranker(unbiased=False)).weight is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query": None}, "got `null` - at `$.query`"),
        ({"query": 100}, "- at `$.query`"),
        ({"items": ["a", "b", "c"]}, "Expected `int`, got `str` - at `$.items[0]`"),
        ({"items": [1, 2, 2**63 - 1]}, "- at `$.items[2]`"),
        ({"prices": [1, 2]}, "prices: expected a value for each of 3 items, got 2"),
        ({"on_sale": [1, 0, 0]}, "Expected `bool`, got `int` - at `$.on_sale[0]`"),
        ({"categories": [0.5, 1, 2]}, "Expected `int`, got `float` - at `$.categories[0]`"),
        ({"number": "five"}, "Expected `int`, got `str` - at `$.number`"),
        ({"clicked": 3}, "clicked: expected a place from 0 to 2, got 3"),
        ({"items": [1], "categories": [1], "prices": [1], "on_sale": [True]}, "length >= 2 - at `$.items`"),
    ],
)
def test_a_list_that_cannot_be_learned_is_refused_by_its_field(changes: dict[str, Any], words: str) -> None:
    done = decoded(encoded(), encoded(**changes), encoded())
    assert [(refusal.offset, refusal.whole) for refusal in done.refused] == [(1, True)]
    assert words in done.refused[0].reason
    assert done.num_samples == 6


def test_a_list_without_a_field_is_refused() -> None:
    for name in LIST:
        record = json.dumps({key: value for key, value in LIST.items() if key != name}).encode()
        assert f"missing required field `{name}`" in decoded(record).refused[0].reason


def test_lists_in_bulk_are_decoded_as_one_by_one() -> None:
    records = [json.dumps(shown.record).encode() for shown in itertools.islice(made_up(3), 60)]
    bulk, task = decoded(*records).samples, Ranker()
    single = batch_of(task, map(task.decode, records))
    assert bulk.num_samples > 60 * 6
    assert (bulk.weight == single.weight).all()
    assert (bulk.group == single.group).all()
    for array, other in zip([*bulk.x.values(), bulk.y], [*single.x.values(), single.y], strict=True):
        assert array.dtype == other.dtype
        assert (array == other).all()


def test_loss_and_metrics_are_of_lists_whatever_their_order() -> None:
    task = Ranker()
    group, target = torch.tensor([7, 7, 7, 2, 2]), torch.tensor([0.0, 1, 0, 0.75, 0.25])
    output = torch.tensor([2.0, 1, 0, 3, 4])
    losses = task.losses(output, target, group)
    assert losses.sum() == pytest.approx(
        3 * -float(output[:3].log_softmax(0)[1]) - 2 * float((output[3:].log_softmax(0) * target[3:]).sum())
    )
    metrics = task.metrics(output, target, group)
    second = (0.25 + 0.75 / np.log2(3)) / (0.75 + 0.25 / np.log2(3))
    assert metrics["ndcg"].tolist() == pytest.approx([1 / np.log2(3)] * 3 + [second] * 2)
    assert metrics["mrr"].tolist() == [0.5] * 5
    order = torch.tensor([3, 0, 4, 2, 1])
    torch.testing.assert_close(task.losses(output[order], target[order], group[order]), losses[order])
    torch.testing.assert_close(task.metrics(output[order], target[order], group[order])["ndcg"], metrics["ndcg"][order])


def test_clicks_that_are_weighed_by_their_place_have_the_shares_of_their_items() -> None:
    """Of one list that is shown again and again; without weights the first places have too many."""
    shown = next(iter(made_up(5)))
    rng, count = np.random.default_rng(0), len(shown.shares)
    seen = shown.shares / np.arange(1, count + 1)
    records = [encoded(**{**shown.record, "number": at, "clicked": int(place)})
               for at, place in enumerate(rng.choice(count, 4000, p=seen / seen.sum()))]  # fmt: skip
    batch = decoded(*records).samples
    weighed = (batch.y * batch.weight).reshape(-1, count).sum(0)
    plain = batch.y.reshape(-1, count).sum(0)
    errors = [np.abs(clicks / clicks.sum() - shown.shares).max() for clicks in (weighed, plain)]
    assert errors[0] < 0.05 < errors[1]


def chance_ndcg(batch: SampleBatch) -> float:
    """The mean over all orders of a list is exact: each item is at each rank equally often."""
    values = []
    for number in np.unique(batch.group):  # type: ignore[arg-type]
        gains = np.sort(batch.y[batch.group == number])[::-1]
        discount = 1 / np.log2(np.arange(len(gains)) + 2)
        values += [gains.mean() * discount.sum() / (gains * discount).sum()] * len(gains)
    return float(np.mean(values))


def popularity_ndcg(lists: int) -> float:
    """Of the order of clicks for each show in the first lists of the stream; 5 shows of an average item are added."""
    shows, clicks = Counter[int](), Counter[int]()
    for shown in itertools.islice(made_up(0), lists):
        shows.update(shown.record["items"])
        clicks[shown.record["items"][shown.record["clicked"]]] += 1
    task, average = Ranker(), lists / shows.total()
    held_out = batch_of(task, task.holdout())
    assert isinstance(held_out.x, dict)
    scores = [(clicks[item] + 5 * average) / (shows[item] + 5) for item in held_out.x["item"].tolist()]
    parts = (torch.tensor(scores), torch.from_numpy(held_out.y), torch.from_numpy(held_out.group))
    return float(task.metrics(*parts)["ndcg"].mean())


class Trained:
    """Its job in one thread: the real model, tables and optimizers, and the gradient of a whole update at once."""

    def __init__(self, *overrides: str) -> None:
        self.config = load(JOB, overrides)
        self.task = load_task(self.config)
        self.model = build(self.config, self.task)
        assert self.model.tables is not None
        self.updater, store = make_parts(self.config.training, self.model)
        assert store is not None
        self.store = store
        tables: dict[str, Any] = {**store.tables, **store.bounded}
        self.model.tables.connect(lambda name, ids: tables[name].read(ids).values)
        self.held_out = HeldOut(self.task, self.config.evaluation.max_samples)

    def evaluate(self) -> HeldOutError:
        return self.held_out.evaluate(self.model.module)

    def learn(self, updates: int) -> None:
        records = (json.dumps(shown.record).encode() for shown in made_up(0))
        computer, size = GradientComputer(self.task, self.model), self.config.data.batch_size * self.config.group_size
        for version in range(1, updates + 1):
            batch = decoded(*itertools.islice(records, size), task=self.task).samples
            gradient = computer.compute(*batch)
            assert not gradient.problem()
            self.store.add(gradient.rows)
            self.store.apply(1 / gradient.weight, version)
            self.updater.apply([gradient.values.copy()], 1 / gradient.weight, gradient.weight)


def test_it_ranks_better_than_chance_and_than_popularity() -> None:
    trained = Trained()
    before = trained.evaluate()
    chance = chance_ndcg(batch_of(trained.task, trained.task.holdout()))
    assert before.metrics["ndcg"] == pytest.approx(chance, abs=0.05)
    trained.learn(updates := 120)
    after = trained.evaluate()
    lists = updates * trained.config.data.batch_size * trained.config.group_size
    assert after.metrics["ndcg"] > popularity_ndcg(lists) + 0.03 > chance + 0.1
    assert after.metrics["mrr"] > before.metrics["mrr"] + 0.1
    assert after.loss < before.loss - 0.1
    assert 0 < trained.store.totals["items.weight"].rows <= 4000
    shown = next(iter(made_up(9)))
    ranked = Ranker().ranked(trained.model.module, {name: shown.record[name] for name in LIST if name != "clicked"})
    assert sorted(item for item, _ in ranked) == sorted(shown.record["items"])
    assert [score for _, score in ranked] == sorted((score for _, score in ranked), reverse=True)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("task.args.width=0", "expected width above 0"),
        ("task.args.widht=3", "unexpected keyword argument 'widht'"),
        ("training.policy={name: ssp, staleness: 2}", "expected workers that send gradients"),
        ("training.tables.items={}", "expected max_rows for table 'items.weight'"),
    ],
)
def test_a_job_that_does_not_fit_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(config := load(JOB, [override]), load_task(config))
