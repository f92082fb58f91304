"""Whole jobs, server and workers: a weight of 2 learns what the same sample twice learns; sequences are all learned."""

from __future__ import annotations

import numpy as np
import pytest
from doll.ps.engine.events import Event
from doll.records.control import Push
from threadless_jobs import BATCHES, WORKERS, Job

pytestmark = pytest.mark.slow  # loads torch

TASK = '{class: "tree_tasks:%s", args: {mode: %s}}'
SGD = "optimizer: {name: sgd, lr: 0.05, momentum: 0.5}"


class Recording(Job):
    def feed(self, event: Event) -> None:
        if isinstance(event, Push):
            self.__dict__.setdefault("pushes", []).append(event)
        super().feed(event)


POLICIES = {
    "doll": "{name: doll, group_size: 2}",
    "doll-recent": "{name: doll, group_size: 2, staleness: 2}",
    "bsp-steps": "{name: bsp, contribution: step}",
    "ssp": "{name: ssp, staleness: 2}",
    "wsp": "{name: wsp}",
    "diloco": "{name: diloco, local_batches: 3}",
}
TRAINING = {
    "sgd": SGD,
    "adam": "optimizer: {name: adam, lr: 0.01}",
    "clipped": f"{SGD}, clip_norm: 0.5",
    "sum": "optimizer: {name: sgd, lr: 0.001}, reduction: sum",
}


@pytest.mark.parametrize("training", TRAINING)
@pytest.mark.parametrize("name", POLICIES)
def test_a_weight_is_so_many_samples_in_the_model(name: str, training: str) -> None:
    policy = POLICIES[name]
    weighted, twice = (
        Recording(policy, 3, task=TASK % ("Visits", mode), training=TRAINING[training]) for mode in ("weight", "twice")
    )
    assert weighted.order == twice.order
    assert len(weighted.order) == WORKERS * BATCHES
    np.testing.assert_allclose(weighted.weights, twice.weights, rtol=2e-4, atol=2e-5)
    counted = [item for push in weighted.__dict__["pushes"] for item in push.batches]
    others = [item for push in twice.__dict__["pushes"] for item in push.batches]
    assert {item.n_samples for item in counted} == {8}, "the ledger counts samples"
    assert [item.total_weight for item in counted] == [item.n_samples for item in others]
    assert [item.loss_sum for item in counted] == pytest.approx([item.loss_sum for item in others], rel=1e-3)
    assert {item.weight for item in others} == {None}


def test_sequences_of_1_to_512_tokens_are_all_learned() -> None:
    job = Recording("{name: doll, group_size: 2}", 3, task=TASK % ("Texts", "weight"))
    counted = [item for push in job.__dict__["pushes"] for item in push.batches]
    assert sum(item.n_samples for item in counted) == 8 * WORKERS * BATCHES
    assert not any(item.dead or item.dead_samples for item in counted)
    assert not any(worker.channel.letters for worker in job.workers)
