"""The comparison of `benchmarks.live.hetpipe`, from runs; and the pace of its GPUs."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.live import hetpipe
from benchmarks.live.experiment import Options
from benchmarks.live.hetpipe import (
    ED,
    ED_0,
    ED_4,
    ED_OWN_STEP,
    NP,
    NP_0,
    NP_4,
    ON_12,
    ON_16,
    OWN_STEP,
    SETTINGS,
    SYSTEMS,
    Run,
    System,
    changes_of,
    claims,
    pipeline_of,
    profile_of,
    rate_of,
    read_run,
    s_global,
    shares_of,
    slowdown,
    table,
)  # fmt: skip
from benchmarks.live.paced import Drift, PacedBlocks
from benchmarks.live.paced_allreduce import Round, measure
from doll.config import parse
from doll.pipeline.planner.measured import TaskLog
from doll.pipeline.planner.profiled import load_profile, stops_by_profile
from doll.pipeline.runtime.messages import StageTask
from doll.task.base import load_task

pytestmark = pytest.mark.slow  # loads torch

OPTIONS = Options(settings=SETTINGS)
IN_FLIGHT = 5


def run(label: str, rate: float, seconds: float, *, drifts: bool = False, waits: float = 0.1) -> Run:
    """Reaches the loss after `seconds`."""
    distance = int(label.partition("D = ")[2][:1]) if "D = " in label else None
    curve = [(0.5, 100, 2.0), (seconds - 1e-6, 900, 2.0), (seconds, 1000, 0.1)]
    oldest = None if distance is None else s_global(IN_FLIGHT, distance)
    return Run(label, distance, drifts, 0, rate, 0.7, waits, 0.18 * waits, curve, oldest)


def good_runs() -> list[Run]:
    return [
        run(ON_16, 100, 100), run(OWN_STEP, 100, 80), run(ON_12, 129, 116), run(ED_0, 180, 71),
        run(ED_OWN_STEP, 180, 71), run(ED_4, 180, 71),
        run(NP_0, 90, 90), run(NP_4, 120, 90), run(ON_16, 100, 100, drifts=True), run(ED_0, 150, 71, drifts=True),
        run(ED_4, 170, 51, drifts=True, waits=0.062),
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def _single_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hetpipe, "_SMOOTHED", 1)


def verdicts(runs: list[Run]) -> list[bool]:
    return [claim.verdict == "reproduced" for claim in claims(runs, 1.0, IN_FLIGHT)]


def test_claims_hold_for_the_papers_figures() -> None:
    assert all(verdicts(good_runs()))


@pytest.mark.parametrize(
    ("label", "drifts", "changed", "false"),
    [
        (ON_16, False, {"samples_per_s": 200.0}, {1}),
        (NP_0, False, {"samples_per_s": 190.0}, {2, 10}),
        (OWN_STEP, False, {"curve": [(0.5, 1, 0.1)]}, {5}),
        (ED_4, True, {"curve": [(9.0, 9, 2.0)]}, {6, 7}),
        (ED_0, True, {"waiting_share": 0.05}, {8}),
        (ED_4, True, {"idle_share": 0.06}, {9}),
        (ED_0, False, {"oldest": 9}, {11}),
        (NP_4, False, {"missing": 1}, {12}),
    ],
)
def test_claims_can_fail(label: str, drifts: bool, changed: dict[str, Any], false: set[int]) -> None:
    runs = [
        each._replace(**changed) if (each.label, each.is_drifting) == (label, drifts) else each for each in good_runs()
    ]
    assert {at for at, is_met in enumerate(verdicts(runs)) if not is_met} == false


def test_a_loss_that_is_not_reached_is_said() -> None:
    runs = [each._replace(curve=[(9.0, 9, 2.0)]) if each.label.startswith(ED_0) else each for each in good_runs()]
    said = [claim.ours for claim in claims(runs, 1.0, IN_FLIGHT)]
    assert said[3:7] == ["not reached"] * 4
    assert table(runs, 1.0, IN_FLIGHT).rows[3][6] == "not reached"


def test_a_line_for_each_system() -> None:
    rows = table(good_runs(), 1.0, IN_FLIGHT).rows
    assert len(rows) == len(SYSTEMS) == len(good_runs())
    expected = [ED_4, "constant", "180", "70.0 %", "10.0 %", "1.8 %", "71.0", "953", "0.100", "28 of 28", "0", "0"]
    assert rows[5] == expected
    assert rows[0][-3:] == ["", "", ""]


def test_shares_of_a_pipeline() -> None:
    # Two stages, one minibatch at a time. From 1.0 to 2.0 there is room and the first stage has nothing to do; in the
    # first half of this the other stage computes.
    tasks = [
        StageTask(0, "F", 0, 0.0, 0.2), StageTask(1, "FB", 0, 0.2, 0.8), StageTask(0, "B", 0, 0.8, 1.0),
        StageTask(1, "FB", 7, 1.0, 1.5), StageTask(0, "F", 1, 2.0, 2.2), StageTask(1, "FB", 1, 2.2, 2.8),
        StageTask(0, "B", 1, 2.8, 3.0),
    ]  # fmt: skip
    busy, waiting, idle = shares_of(tasks, 2, 1, warm_s=0.0)
    assert (busy, waiting, idle) == pytest.approx(((0.8 + 1.7) / 6, 1 / 3, 0.5 / 3), abs=0.01)
    assert shares_of(tasks, 2, 1, warm_s=2.0).waiting == 0.0
    assert shares_of(tasks, 2, 2, warm_s=0.0).waiting == pytest.approx(2.2 / 3, abs=0.01), "there is room for two"


def test_a_rate_leaves_out_the_beginning() -> None:
    assert rate_of([(1.0, 0), (5.0, 100), (7.0, 300)], warm_s=5.0) == 100.0
    assert rate_of([(1.0, 50)], warm_s=5.0) == 0.0


def test_stages_are_cut_for_the_speeds_of_their_gpus(tmp_path: Path) -> None:
    assert [round(slowdown(kind), 2) for kind in "VRGQ"] == [1.0, 1.32, 1.54, 1.68]
    changes = changes_of(next(system for system in SYSTEMS if system.label == NP_4), OPTIONS, 3)
    path = tmp_path / "profile.json"
    path.write_bytes(profile_of(parse(hetpipe._JOB, changes)).to_json())
    for gpus, slowest in ((ED, 5 * slowdown("Q")), (NP, 6.0)):
        config = parse(hetpipe._JOB, [*changes, pipeline_of(System("", gpus), path)])
        assert config.worker.pipeline is not None
        profile = load_profile(config)
        stages = pairwise([0, *stops_by_profile(config, profile, 0)])
        bottleneck_s = max(
            sum(layer.compute_s for layer in profile.layers[first:stop]) * device.slowdown / device.speed
            for (first, stop), device in zip(stages, config.worker.pipeline.devices_of(0), strict=True)
        )
        assert bottleneck_s == pytest.approx(slowest * float(SETTINGS["block_s"]))
        assert (config.seed, config.training.policy.batches_per_push) == (3, IN_FLIGHT)


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: f"{system.label}-{system.is_drifting}")
def test_the_jobs_of_all_systems_are_good(system: System) -> None:
    task = load_task(parse(hetpipe._JOB, changes_of(system, OPTIONS, 0)))
    assert isinstance(task, PacedBlocks)
    assert task.drift.sigma == (float(SETTINGS["drift"]) if system.is_drifting else 0.0)


def test_a_run_is_read_from_its_files(tmp_path: Path) -> None:
    tasks = [StageTask(stage, kind, 0, 10.0 + stage, 11.0 + stage) for stage, kind in enumerate(("F", "F", "F", "FB"))]
    for worker in range(4):
        log = TaskLog(tmp_path / "pipeline" / f"worker-{worker}.jsonl")
        log.add(tasks)
        log.close()
    (tmp_path / "updates.csv").write_text("time_s,version,samples_total\n111,1,160\n117,2,320\n119,3,480\n")
    (tmp_path / "evaluations.csv").write_text("time_s,version,loss\n109,0,9\n112,1,2\n118,2,\n119,3,1\n")
    report = {
        "files": {name: str(tmp_path / f"{name}.csv") for name in ("updates", "evaluations")},
        "audit": {"missing": 1, "duplicate": 2}, "measures": {"staleness": {"histogram": {"-9": 4, "-3": 1}}},
    }  # fmt: skip
    read = read_run(System(ED_0, ED, 0), 3, IN_FLIGHT, report, 100.0)
    assert (read.curve, read.samples_per_s) == ([(2.0, 160, 2.0), (9.0, 480, 1.0)], 80.0)
    assert (read.oldest, read.missing, read.twice, read.seed) == (8, 1, 2, 3)


def test_the_speed_of_a_process_drifts() -> None:
    drift = Drift(0.3, 2.0)
    assert drift.factor(4.1, 7) == drift.factor(5.9, 7) != drift.factor(6.0, 7)
    assert drift.factor(4.1, 7) != drift.factor(4.1, 8)
    logs = torch.tensor([math.log(drift.factor(2.0 * at, 7)) for at in range(500)])
    assert float(logs.mean()) == pytest.approx(0.0, abs=0.05)
    assert float(logs.std()) == pytest.approx(0.3, abs=0.03)
    assert Drift(0.0, 2.0).factor(1.0, 1) == 1.0


def test_whole_batches_take_their_time_where_they_are_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    task = PacedBlocks(blocks=2, width=4, block_s=0.3, batch_size=32)
    model = task.build_model()
    inputs = torch.zeros(32, 8, 8)
    task.forward(model.eval(), inputs)
    task.forward(model.train(), inputs[:2])
    assert slept == [], "neither the evaluator waits, nor the comparison of the cut"
    torch.autograd.backward(task.forward(model.train(), inputs).sum())
    assert slept == pytest.approx([0.1, 0.1, 0.2, 0.2])


def test_the_first_block_of_a_stage_takes_the_time_of_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    model = PacedBlocks(blocks=2, width=4, block_s=0.3, batch_size=32, link_s=0.05).build_model().train()
    assert isinstance(model, torch.nn.Sequential)
    received = torch.zeros(32, 4, requires_grad=True)
    stage = model[3:]  # both blocks
    torch.autograd.backward(stage(received).sum())
    assert slept == pytest.approx([0.15, 0.1, 0.2, 0.25])


def test_the_all_reduce_takes_the_time_of_its_links_behind_the_gradients() -> None:
    changes = ["task.args.blocks=2", "task.args.block_s=0.02"]
    got = measure(Round(hetpipe._JOB, changes, [1.0, 1.0], 0.05, 1.0, ring_s=0.2))
    assert got["seconds"] >= 0.2 * len(got["curve"])
    assert got["busy_share"] < 0.5


def test_the_slowest_device_sets_the_pace_of_the_all_reduce() -> None:
    changes = ["task.args.blocks=2", "task.args.block_s=0.02"]
    got = measure(Round(hetpipe._JOB, changes, [1.0, 4.0], 0.05, 1.0))
    assert got["samples"] == 64 * len(got["curve"])
    assert got["seconds"] >= 0.16 * len(got["curve"])
    assert 0.3 < got["busy_share"] < 0.75, "the other one waits for three quarters of its time"
