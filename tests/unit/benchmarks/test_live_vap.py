"""The walk over an event log that looks for views beyond the bound of VAP: it sees a policy that allows too much."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch
from benchmarks.live.paced import OneSlowWorker, PacedDigits
from benchmarks.live.vap import Row, claims, digests, is_asp, missed_views, table
from doll.ps.policies.vap import Vap
from logged_runs import LoggedRun
from memory_stores import MemoryCheckpointStore

pytestmark = pytest.mark.slow  # loads torch

BOUND = 4.0


def played(folder: Path, bound: str, seed: int = 1) -> LoggedRun:
    store = MemoryCheckpointStore("replayed", keep=100)
    run = LoggedRun(folder, store, f"training.policy={{name: vap, value_bound: {bound}}}", seed=seed)
    run.play(40)
    run.close()
    return run


def shares(run: LoggedRun) -> list[float]:
    return [view.largest * math.sqrt(view.update) / BOUND for view in missed_views(run.config, run.path)]


def test_what_each_view_missed_is_within_the_bound(tmp_path: Path) -> None:
    of_bound = shares(played(tmp_path, str(BOUND)))
    assert len(of_bound) >= 40
    assert 0.3 < max(of_bound) <= 1 + 1e-9
    assert min(of_bound) == 0.0


def test_steps_of_views_that_miss_too_much_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Vap, "void", lambda self, view: ())
    monkeypatch.setattr(Vap, "_misses", lambda self, number, behind=None: 0.0)
    worst = [max(shares(played(tmp_path / str(seed), str(BOUND), seed))) for seed in range(3)]
    assert max(worst) > 1.2


def test_without_a_bound_the_replay_as_asp_is_equal(tmp_path: Path) -> None:
    run = played(tmp_path, ".inf")
    assert len(digests(run.config, run.path)) > 40
    assert is_asp(run.config, run.path)


def test_with_a_bound_it_is_not(tmp_path: Path) -> None:
    run = played(tmp_path, str(BOUND))
    assert not is_asp(run.config, run.path)


def row(bound: float, blocked: float, worst: float = 0.5, *, is_asp: bool | None = None) -> Row:
    return Row("equal speeds", bound, 0, [0.0, worst], 1, blocked, 3, 0.9, is_asp)


def test_claims_can_fail() -> None:
    good = [row(1.0, 0.6), row(2.0, 0.3), row(math.inf, 0.1, is_asp=True)]
    assert [claim.verdict for claim in claims(good)] == ["reproduced"] * 3
    bad = [row(1.0, 0.3, 1.01), row(2.0, 0.6), row(math.inf, 0.1, is_asp=False)]
    assert [claim.verdict for claim in claims(bad)] == ["not reproduced"] * 3
    assert [cells[4] for cells in table(bad).rows] == ["1", "0", "–"]


def test_one_worker_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = OneSlowWorker(10.0)
    assert [hook.environment(role) for role in ("worker-1", "ps")] == [{}, {}]
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for environment in ({}, hook.environment("worker-0")):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        task = PacedDigits(batch_s=0.25, hidden=[3])
        model = task.build_model()
        inputs = torch.zeros(32, 8, 8)
        task.forward(model.train(), inputs)
        task.forward(model.train(), inputs[:1])
        task.forward(model.eval(), inputs)
    assert slept == [0.25, 2.5], "neither the evaluator waits, nor the guard at each sample of the first batch"
