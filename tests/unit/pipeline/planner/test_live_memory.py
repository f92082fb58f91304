"""What the partitioner counts with for a stage that runs."""

from __future__ import annotations

import pytest
from doll.config import AdagradConfig, AdamConfig, OptimizerConfig, SgdConfig
from doll.pipeline.planner.partition import MemoryRule
from doll.pipeline.planner.profiled import live_rule, num_states
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
    plain = live_rule(SgdConfig())
    assert live_rule(optimizer).optimizer_multiplier == plain.optimizer_multiplier + arrays


def test_the_last_stage_has_one_copy_as_in_the_paper_and_the_inputs_that_wait() -> None:
    size = StageSize(1_000_000, 0, input_bytes=1_000, largest_bytes=5_000)
    momentum = SgdConfig(momentum=0.9)
    rule, paper = live_rule(momentum), MemoryRule(1 + num_states(momentum))
    one, four = (rule.stage_bytes(size, in_flight=number, is_last=True) for number in (1, 4))
    assert four == one + 3 * 1_000
    others = [rule.stage_bytes(size, in_flight=number, is_last=False) for number in (1, 4)]
    assert others[1] == others[0] + 3 * (1_000_000 + 1_000)
    assert paper.stage_bytes(size, in_flight=4, is_last=False) == 7_000_000
    assert paper.stage_bytes(size, in_flight=4, is_last=True) == 4_000_000
