"""What one step is under each policy, and how far it goes beside bsp at the same learning rate."""

from __future__ import annotations

import pytest
from doll.config import parse
from doll.config.step_size import step_factor, step_text

JOB = "{job: j, task: {class: 'm:C'}, data: {workers: 4, batch_size: 32}, worker: {max_pending_batches: 64}}"


@pytest.mark.parametrize(
    ("policy", "factor", "said"),
    [
        ("{name: bsp}", 1, "an update is one step on the mean gradient of 4 batches (128 samples)"),
        ("{name: doll, group_size: 8}", 1, "an update is one step on the mean gradient of 8 batches (256 samples)"),
        (
            "{name: doll, group_size: 2, staleness: 3}",
            1,
            "an update is one step on the mean gradient of 2 batches (64 samples)",
        ),
        (
            "{name: asp}",
            4,
            "of one batch (32 samples); at the same training.optimizer.lr the model goes 4 times as far",
        ),
        ("{name: asp, contribution: step}", 4, "the server adds the steps of all 4 workers;"),
        ("{name: bsp, contribution: step}", 4, "the server adds the steps of all 4 workers;"),
        (
            "{name: ssp}",
            4,
            "each worker steps on the mean gradient of each of its batches (32 samples), and the server",
        ),
        ("{name: essp}", 4, "divide it by 4 for steps of that size"),
        ("{name: vap}", 4, "the server adds the steps of all 4 workers;"),
        ("{name: isp}", 4, "the server adds the steps of all 4 workers;"),
        ("{name: wsp, wave_batches: 2}", 8, "of all 4 workers, in waves of 2 batches; at the same"),
        ("{name: diloco, outer_lr: 0.5, outer_momentum: 0.75}", 2, "0.5 of what 16 batches have changed on average"),
    ],
)
def test_each_policy_says_what_one_step_is(policy: str, factor: float, said: str) -> None:
    config = parse(JOB, [f"training.policy={policy}"])
    assert step_factor(config) == pytest.approx(factor)
    assert said in step_text(config)
    assert ("bsp, which makes" in step_text(config)) == (factor != 1)


@pytest.mark.parametrize(
    ("policy", "factor"),
    [("{name: bsp}", 1), ("{name: doll, group_size: 8}", 2), ("{name: asp}", 1), ("{name: ssp}", 1)],
)
def test_a_sum_of_gradients_is_beside_a_sum(policy: str, factor: float) -> None:
    config = parse(JOB, [f"training.policy={policy}", "training.reduction=sum"])
    assert step_factor(config) == pytest.approx(factor)
    assert "sum of the gradients" in step_text(config)
