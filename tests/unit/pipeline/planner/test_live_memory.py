"""What the partitioner counts with for a stage that runs."""

from __future__ import annotations

import pytest
from doll.config import AdagradConfig, AdamConfig, OptimizerConfig, SgdConfig
from doll.pipeline.planner.profiled import live_rule
from doll.pipeline.profiling.profile import StageSize


@pytest.mark.parametrize(
    ("optimizer", "arrays"),
    [
        (SgdConfig(), 0),
        (SgdConfig(momentum=0.9), 1),
        (AdagradConfig(), 1),
        (AdagradConfig(momentum=0.9), 2),
        (AdamConfig(), 2),
    ],
)
def test_the_optimizers_state_is_counted(optimizer: OptimizerConfig, arrays: int) -> None:
    plain = live_rule(SgdConfig(), 4)
    assert live_rule(optimizer, 4).optimizer_multiplier == plain.optimizer_multiplier + arrays


def test_the_last_stage_keeps_a_copy_for_each_minibatch_in_flight_too() -> None:
    size, rule = StageSize(1_000_000, 0, input_bytes=1_000, largest_bytes=5_000), live_rule(SgdConfig(), 4)
    first = rule.stage_bytes(size, in_flight=4, is_last=False)
    assert rule.stage_bytes(size, in_flight=4, is_last=True) == first
    more = live_rule(SgdConfig(), 5).stage_bytes(size, in_flight=5, is_last=True)
    assert more == first + 1_000_000 + 1_000  # a copy, and an input that waits
