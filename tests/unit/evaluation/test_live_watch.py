"""The alias goes back to the version before, if the new one is worse on live records, and only then."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from doll.config import parse
from doll.errors import CheckpointError, ServiceUnavailableError
from doll.evaluation.live_watch import LiveWatch, MovedBack
from doll.model.flat_model import build
from doll.monitor.views.versions import version_text
from doll.run.versions import freeze, set_alias, show_version
from doll.storage.version_marks import before
from doll.task.base import Task, load_task
from doll.task.batches import SampleBatch
from gate_rig import JOB, Rig

pytestmark = pytest.mark.slow  # loads torch

LIVE = JOB.replace(
    "versions: {gates: {metrics: {loss: 0.01, rmse: 0.01}}}", "versions: {gates: {min_interval_s: 0}, live: {}}"
)


class Samples:
    """Records that come: y = a (x0 - x1) and noise. The held-out samples have a = 1."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(1)
        self.slope, self.count, self.begun, self.taken, self.is_away = 1.0, 100, 0, 0, False

    def begin(self) -> None:
        self.begun += 1

    def take(self, task: Task, most: int) -> SampleBatch:
        if self.is_away:
            raise ServiceUnavailableError("Kafka is away")
        self.taken += 1
        x = self._rng.normal(size=(min(self.count, most), 2)).astype(np.float32)
        y = self.slope * (x[:, 0] - x[:, 1]) + self._rng.normal(0, 0.3, len(x)).astype(np.float32)
        return SampleBatch(x, y.astype(np.float32))


class LiveRig(Rig):
    """Versions 1 and 2 got the alias, one after the other."""

    job = LIVE

    def __init__(self, folder: Path, first: float, second: float) -> None:
        super().__init__(folder)
        assert self.judged(1, first, -first).passed
        assert self.judged(2, second, -second).passed
        assert (self.stable, self.before) == (2, 1)
        self.samples, self.now_s = Samples(), 1_000.0
        self.watch = self.new_watch()

    def new_watch(self) -> LiveWatch:
        task = load_task(self.config)
        model = build(self.config, task)
        return LiveWatch(self.config, self.folder, task, model, self.samples, clock=lambda: self.now_s)

    @property
    def before(self) -> int | None:
        return self.store.read_marks().aliases.get(before("stable"))

    def looks(self, count: int) -> MovedBack | None:
        for _ in range(count):
            self.now_s += 1.0
            if (moved := self.watch.look()) is not None:
                return moved
        return None


def test_a_version_that_is_worse_on_live_records_is_moved_back(tmp_path: Path) -> None:
    rig = LiveRig(tmp_path, 0.8, 0.95)
    rig.samples.slope = 0.6  # the world has changed: version 1 fits it better
    moved = rig.looks(60)
    assert moved is not None
    assert (moved.version, moved.to, rig.stable) == (2, 1, 1)
    assert "loss is worse by" in rig.store.read_marks().frozen["stable"]
    text = version_text(show_version(rig.target, "2"))
    assert "- live: loss is worse by" in text
    assert rig.judged(3, 1.0, -1.0).passed
    assert rig.stable == 1, "frozen"
    assert rig.looks(30) is None
    freeze(rig.target, "stable", None)
    assert rig.judged(4, 1.0, -1.0).passed
    assert (rig.stable, rig.before) == (4, 1)


def test_a_better_or_equal_version_stays(tmp_path: Path) -> None:
    rig = LiveRig(tmp_path, 0.8, 0.95)
    assert rig.looks(200) is None
    assert rig.stable == 2
    assert rig.samples.begun == 1


def test_versions_that_are_equal_are_seldom_moved_back(tmp_path: Path) -> None:
    """`error` is 5 %; here are five streams of 100 looks."""
    rig, moves = LiveRig(tmp_path, 0.9, 0.901), 0
    rig.samples.slope = 0.9005
    for _ in range(5):
        rig.watch = rig.new_watch()
        moves += rig.looks(100) is not None
        if rig.stable != 2:
            freeze(rig.target, "stable", None)
            rig.store.change_marks(lambda marks: marks.with_alias("stable", 2))
    assert moves <= 2


def test_values_that_are_not_finite_move_the_alias_at_once(tmp_path: Path) -> None:
    rig = LiveRig(tmp_path, 0.8, 0.95)
    rig.watch.look()
    weights = rig.watch._weights
    assert weights is not None
    spoiled = weights[0]._replace(weights=np.full(3, 3e38, np.float32))
    rig.watch._weights = (spoiled, weights[1])
    moved = rig.looks(3)
    assert moved is not None
    assert moved.reason == "loss is not a finite number on live records"


def test_what_people_have_chosen_is_not_watched(tmp_path: Path) -> None:
    rig = LiveRig(tmp_path, 0.8, 0.95)
    rig.samples.slope = 0.5
    set_alias(rig.target, "stable", "2", "a test")
    assert rig.looks(100) is None
    assert rig.samples.begun == 0
    rig = LiveRig(tmp_path / "two", 0.8, 0.95)
    rig.samples.slope = 0.5
    rig.looks(2)
    freeze(rig.target, "stable", "a sale")
    assert rig.looks(100) is None
    assert rig.stable == 2


def test_nothing_moves_while_kafka_or_the_aliases_are_away(tmp_path: Path) -> None:
    rig = LiveRig(tmp_path, 0.8, 0.95)
    rig.samples.slope, rig.samples.is_away = 0.5, True
    rig.looks(1)
    with pytest.raises(ServiceUnavailableError):
        rig.looks(2)
    rig.samples.is_away, rig.samples.count = False, 0
    assert rig.looks(60) is None, "no record comes"
    rig.samples.count = 100
    marks = next(rig.folder.rglob("marks.json"))
    kept = marks.read_bytes()
    marks.write_bytes(b"{")
    with pytest.raises(CheckpointError):
        rig.looks(2)
    marks.write_bytes(kept)
    assert rig.looks(100) is not None


def test_a_version_that_is_watched_keeps_the_alias_for_a_while_by_default() -> None:
    for section, seconds in (
        ("{gates: {}}", 0.0),
        ("{gates: {}, live: {}}", 30.0),
        ("{gates: {min_interval_s: 5}, live: {}}", 5.0),
        ("{gates: {min_interval_s: 0}, live: {}}", 0.0),
    ):
        job = "job: j\ntask: {class: 'm:T'}\ndata: {workers: 1, batch_size: 1}"
        assert parse(job, [f"versions={section}"]).versions.min_interval_s == seconds


def test_it_looks_in_each_second_also_at_whole_seconds(tmp_path: Path) -> None:
    rig = LiveRig(tmp_path, 0.8, 0.95)
    rig.looks(1)  # begins with the pair
    taken = rig.samples.taken
    rig.looks(5)
    assert rig.samples.taken == taken + 5
    rig.now_s += 0.5
    assert rig.watch.look() is None
    assert rig.samples.taken == taken + 5, "less than a second has passed"
