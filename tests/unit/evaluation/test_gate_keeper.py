"""Checkpoints are measured and judged, and the alias moves by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from doll.errors import CheckpointError
from doll.evaluation.heldout import HeldOut
from doll.monitor.views.versions import version_text, versions_table
from doll.run.versions import freeze, list_versions, set_alias, show_version
from gate_rig import Rig

pytestmark = pytest.mark.slow  # loads torch


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_the_alias_follows_the_versions_that_pass(rig: Rig) -> None:
    assert rig.evaluator.judge_newest() is None, "no version yet"
    assert rig.judged(1, 0.5, -0.5).passed
    assert rig.judged(2, 0.7, -0.7).passed
    assert rig.stable == 2
    worse = rig.judged(3, 0.2, -0.2)
    assert "loss: 1." in worse.text()
    assert "rmse" in worse.text()
    assert rig.judged(4, float("nan"), 0.0).text() == "held back (finite: weight has values that are not finite)"
    assert rig.judged(5, 0.7, -90.0).text().endswith("task: an output below -50)")
    refused = rig.judged(6, 1e9, 0.0).text()
    assert "task: Line cannot be evaluated on its own held-out samples: ValueError: no such outputs" in refused
    assert rig.stable == 2, "and it is kept, since it has a name"
    assert rig.judged(7, 0.9, -0.9).passed
    assert rig.stable == 7


def test_a_gate_that_ended_goes_on_and_repeats_no_verdict(rig: Rig) -> None:
    rig.judged(1, 0.5, -0.5)
    rig.judged(2, 0.4, -0.4)
    rig.new_gate()
    assert rig.evaluator.judge_newest() is None
    assert rig.judged(3, 0.6, -0.6).against == 1
    assert rig.stable == 3
    rig.save(4, 0.7, -0.7)
    rig.new_gate()
    rig.save(5, 0.8, -0.8)
    verdict = rig.evaluator.judge_newest()
    assert verdict is not None
    assert (verdict.version, verdict.against, rig.stable) == (5, 3, 5), "a version between them is not judged"


def test_people_freeze_and_move_the_alias(rig: Rig) -> None:
    rig.judged(1, 0.5, -0.5)
    freeze(rig.target, "stable", "a sale")
    assert rig.judged(2, 0.6, -0.6).passed
    assert rig.stable == 1
    freeze(rig.target, "stable", None)
    set_alias(rig.target, "stable", "2", "it sells more")
    assert rig.judged(3, 0.3, -0.3).against == 2
    text = version_text(show_version(rig.target, "2"))
    assert "a person moved stable here: it sells more" in text
    assert "passed all checks against version 1" in text
    text = version_text(show_version(rig.target, "3"))
    assert "held back against version 2" in text
    assert "- loss: " in text
    assert "+ finite: all values" in text
    assert "(held back)" in versions_table(list_versions(rig.target), "here")


@pytest.mark.parametrize(("again", "passes"), [({1: 0.2, 2: 0.3}, True), ({1: 0.1, 2: 0.4}, False)])
def test_a_slow_version_is_measured_again_in_turn_with_stable(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, again: dict[int, float], passes: bool
) -> None:
    """Version 2 took four times as long as version 1 did, on a machine that others use by now."""
    times = {1: [0.1], 2: [0.4]}
    measure = HeldOut.blocks

    def measured(held_out: HeldOut, module: torch.nn.Module) -> Any:
        version = 1 if next(module.parameters())[0, 0] == 0.5 else 2
        blocks, outputs, _ = measure(held_out, module)
        return blocks, outputs, times[version].pop() if times[version] else again[version]

    monkeypatch.setattr(HeldOut, "blocks", measured)
    assert rig.judged(1, 0.5, -0.5).passed
    verdict = rig.judged(2, 0.6, -0.6)
    assert verdict.passed is passes, verdict.text()
    assert passes or "latency: 4 times as long" in verdict.text()


def test_while_aliases_cannot_be_read_the_alias_stays(rig: Rig) -> None:
    rig.judged(1, 0.5, -0.5)
    marks = next(rig.folder.rglob("marks.json"))
    before = marks.read_bytes()
    marks.write_bytes(b"{")
    rig.save(2, 0.9, -0.9)
    assert rig.evaluator.judge_newest() is None
    with pytest.raises(CheckpointError):
        _ = rig.stable
    marks.write_bytes(before)
    assert rig.evaluator.judge_newest() is not None
    assert rig.stable == 2
