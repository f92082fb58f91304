"""What one step is under each policy, and how far it goes beside bsp at the same learning rate."""

from __future__ import annotations

from typing import Any

import pytest
from doll.config import parse
from doll.config.policy import policy_section
from doll.config.step_size import advice, fresher_settings, step_factor, step_text
from doll.errors import ConfigError

ADAMW = "{class: torch.optim.AdamW, args: {lr: 3e-3, weight_decay: 0.1}}"
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
            1,
            "one batch (32 samples) with a learning rate divided by 4, so that 4 batches (128 samples) together",
        ),
        (
            "{name: asp, contributions: sum}",
            4,
            "of one batch (32 samples); at the same training.optimizer.lr the model goes 4 times as far",
        ),
        (
            "{name: asp, contribution: step}",
            1,
            "the server adds the steps of all 4 workers, each divided by 4, so that",
        ),
        (
            "{name: bsp, contribution: step}",
            1,
            "the server adds the steps of all 4 workers, each divided by 4, so that",
        ),
        ("{name: bsp, contribution: step, contributions: sum}", 4, "the server adds the steps of all 4 workers;"),
        (
            "{name: ssp}",
            1,
            "each worker steps on the mean gradient of each of its batches (32 samples), and the server",
        ),
        ("{name: essp, contributions: sum}", 4, "divide it by 4 for steps of that size"),
        ("{name: vap}", 1, "each divided by 4, so that 4 batches (128 samples) together make one step"),
        ("{name: isp, contributions: sum}", 4, "the server adds the steps of all 4 workers;"),
        (
            "{name: wsp, wave_batches: 2}",
            1,
            "in waves of 2 batches, each divided by 4, so that 4 batches (128 samples)",
        ),
        ("{name: wsp, wave_batches: 2, contributions: sum}", 4, "of all 4 workers, in waves of 2 batches; at the same"),
        ("{name: diloco, density: 0.02}", 1, "of which a push sends 0.02, and later pushes the rest"),
        ("{name: diloco, outer_lr: 0.5, outer_momentum: 0.75}", 2, "0.5 of what 16 batches have changed on average"),
        ("{name: diloco}", 1.4, "on average, with momentum 0.5;"),
        ("{name: diloco, local_batches: 4}", 0.7, "on average, with momentum 0;"),
        ("{name: diloco, local_batches: 64}", 2.8, "on average, with momentum 0.75;"),
    ],
)
def test_each_policy_says_what_one_step_is(policy: str, factor: float, said: str) -> None:
    config = parse(JOB, [f"training.policy={policy}"])
    assert step_factor(config) == pytest.approx(factor)
    assert said in step_text(config)
    assert ("bsp, which makes" in step_text(config)) == (factor != 1)


@pytest.mark.parametrize(
    ("policy", "factor"),
    [
        ("{name: bsp}", 1),
        ("{name: doll, group_size: 8}", 2),
        ("{name: asp, contributions: sum}", 1),
        ("{name: ssp}", 0.25),
    ],
)
def test_a_sum_of_gradients_is_beside_a_sum(policy: str, factor: float) -> None:
    config = parse(JOB, [f"training.policy={policy}", "training.reduction=sum"])
    assert step_factor(config) == pytest.approx(factor)
    assert "sum of the gradients" in step_text(config)


def test_a_policy_of_gradients_has_no_steps_to_add() -> None:
    with pytest.raises(ConfigError, match="contributions: expected mean with contribution: gradient"):
        parse(JOB, ["training.policy={name: bsp, contributions: sum}"])


def test_a_share_is_of_all_that_is_computed_at_the_same_time() -> None:
    wave: dict[str, Any] = {"name": "wsp", "wave_batches": 2}
    section: Any = policy_section("wsp")
    assert section(**wave).share(4) == 1 / 4, "one batch of a wave after the other"
    assert section(**wave, pipelined=True).share(4) == 1 / 8
    assert section(**wave, contributions="sum").share(4) == 1


@pytest.mark.parametrize(("local_batches", "momentum"), [(1, 0), (4, 0), (16, 0.5), (64, 0.75), (500, 0.9)])
def test_the_outer_momentum_is_for_rounds_of_this_length(local_batches: int, momentum: float) -> None:
    section: Any = policy_section("diloco")
    outer = section(name="diloco", local_batches=local_batches).outer_step
    assert outer is not None
    assert outer.momentum == pytest.approx(momentum)
    given = section(name="diloco", local_batches=local_batches, outer_momentum=0.25).outer_step
    assert given is not None
    assert given.momentum == 0.25


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["training.policy={name: asp}"], None),
        (
            ["training.policy={name: asp}", "training.optimizer={name: adagrad, momentum: 0.9}"],
            "set training.policy.contribution=step: the gradients",
        ),
        (
            ["training.policy={name: asp}", "training.optimizer={name: adam}"],
            "set training.policy.contribution=step: the gradients",
        ),
        (
            ["training.policy={name: vap}", f"training.optimizer={ADAMW}"],
            "set training.optimizer.class=torch.optim.NAdam training.optimizer.args.decoupled_weight_decay=true:",
        ),
        (["training.policy={name: vap}", "training.optimizer.momentum=0.9"], "set training.optimizer.nesterov=true:"),
        (
            ["training.policy={name: asp, contribution: step}", "training.optimizer={class: torch.optim.NAdam}"],
            "if training.optimizer's lr was chosen for bsp, multiply it by 2:",
        ),
        (["training.policy={name: isp}", "training.optimizer={class: torch.optim.AdamW}"], "multiply it by 2:"),
        (["training.policy={name: wsp}", "training.optimizer={name: adagrad}"], "whose mean has 2 times less noise"),
        (
            ["training.policy={name: asp, contribution: step}", "training.optimizer.momentum=0.9"],
            "set training.optimizer.nesterov=true:",
        ),
        (
            ["training.policy={name: asp, contribution: step}", "training.optimizer={momentum: 0.9, nesterov: true}"],
            None,
        ),
        (["training.policy={name: bsp}", "training.optimizer.momentum=0.9", "training.ema={decay: 0.9}"], None),
        (
            ["training.policy={name: ssp}", "stop.updates=9"],
            "if stop.updates were chosen for bsp, multiply the numbers",
        ),
        (["training.policy={name: diloco}", "training.ema={decay: 0.9}"], "by 0.0625, and take the root 0.0625"),
        (["training.policy={name: wsp, wave_batches: 4}", "stop.updates=9"], None),
        (["training.policy={name: isp, contributions: sum}", "training.optimizer={name: adam}"], None),
        (["training.policy={name: bsp}", "training.optimizer={name: adam}"], None),
        (["training.policy={name: isp}"], None),
    ],
)
def test_a_policy_says_what_it_needs_and_bsp_does_not(overrides: list[str], said: str | None) -> None:
    advised = advice(parse(JOB, overrides))
    assert advised is None if said is None else said in (advised or "")


@pytest.mark.parametrize(
    ("policy", "optimizer", "settings"),
    [
        ("{name: wsp, wave_batches: 4}", "{name: adam}", ("training.policy.wave_batches=1",)),
        ("{name: wsp, wave_batches: 1}", "{name: adam}", ()),
        ("{name: isp}", "{name: adam}", ("training.policy.significance=0.1",)),
        ("{name: isp, significance: 0.1}", "{name: adam}", ()),
        ("{name: isp}", "{name: sgd}", ()),
        ("{name: bsp}", "{name: adam}", ()),
    ],
)
def test_fresher_weights_are_advised_until_they_are_set(policy: str, optimizer: str, settings: tuple[str, ...]) -> None:
    overrides = [f"training.policy={policy}", f"training.optimizer={optimizer}"]
    assert fresher_settings(parse(JOB, overrides)) == settings
    assert fresher_settings(parse(JOB, [*overrides, *settings])) == ()
