"""A basket is one record and a sample for each item: a whole job with a kill, refused items, an audit by offsets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from job_rig import MakePipeline

pytestmark = pytest.mark.integration

TASK = """
import msgspec
import numpy as np
import torch
from doll import FieldsTask, Samples


class Basket(msgspec.Struct):
    shop: float
    items: list[int]
    bought: bool


class Baskets(FieldsTask):
    record = Basket
    input_shape = (2,)
    num_classes = 2
    max_samples_per_record = 10

    def build_model(self):
        return torch.nn.ModuleDict({"rows": torch.nn.Embedding(20, 4), "plane": torch.nn.Linear(5, 2)})

    def samples(self, columns):
        counts = np.array([len(items) for items in columns["items"]])
        x = np.stack([np.repeat(columns["shop"], counts), np.concatenate([*columns["items"], []])], axis=1)
        return Samples(x, np.repeat(columns["bought"], counts), {"empty": counts == 0}, counts)

    def forward(self, model, x):
        return model["plane"](torch.cat([model["rows"](x[:, 1].long()), x[:, :1]], dim=1))
"""


def basket(i: int) -> tuple[bytes, int]:
    """A record and how many samples it gives. Some have 11 items, which are too many, and some an item of no row."""
    items = [(7 * i + k) % 20 for k in range(i % 6 if i % 50 else 11)]
    if i % 40 == 7:
        items = [1, 99, 2]
    record = {"shop": (i % 9 - 4) / 4, "items": items, "bought": sum(items) % 2 == 0}
    return json.dumps(record).encode(), len(items)


def test_each_item_is_learned_once_and_each_record_audited_once(make_pipeline: MakePipeline, tmp_path: Path) -> None:
    (tmp_path / "baskets.py").write_text(TASK)
    job = make_pipeline(
        "task.class=baskets.py:Baskets", "task.args={}", "stop.samples=3000", "checkpoint.every_updates=5",
        "training.guard.spike_factor=1000",
    )  # fmt: skip
    baskets = [basket(i) for i in range(1600)]
    job.start()
    job.send([value for value, _ in baskets[:800]])
    job.until_version(10)
    job.kill("worker-0")
    job.send([value for value, _ in baskets[800:]])
    job.until_finished()
    report = job.assert_audit_ok()
    counts = {partition: [count for _, count in baskets[partition::2]] for partition in (0, 1)}
    letters = job.read("dead")
    learned = partly = 0
    for update in job.updates:
        for member in update.members:
            offsets = set(range(member.lo, member.hi)) - set(member.dead)
            given = sum(counts[member.partition][offset] for offset in offsets)
            assert member.n_samples == given - member.dead_samples, member
            assert all(counts[member.partition][offset] > 10 for offset in member.dead)
            learned += member.n_samples
            partly += member.dead_samples
    assert learned >= 3000
    assert partly > 0, "items of no row are refused, and the others of their baskets learned"
    assert job.updates[-1].samples_total == learned
    assert report.dead == sum(len(member.dead) for update in job.updates for member in update.members) > 0
    assert {letter.whole for letter in letters} == {True, False}
    assert any("gives 11 samples: expected at most 10" in letter.reason for letter in letters)
    assert dict(job.last_status.skipped)["empty"] > 0
