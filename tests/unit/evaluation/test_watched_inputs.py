"""`drift.inputs`: the evaluator reads the stream and reports what has changed, also after a restart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from doll.config import parse
from doll.errors import ServiceUnavailableError
from doll.evaluation.drift import Drift
from doll.evaluation.evaluator import Evaluator
from doll.evaluation.watched_inputs import WatchedInputs
from doll.model.flat_model import build
from doll.task.base import Task, load_task
from doll.task.batches import SampleBatch
from gate_rig import Rig
from memory_stores import MemoryBlobs
from structlog.testing import capture_logs

pytestmark = pytest.mark.slow  # loads torch


class Samples:
    """Records that come: two features and a label, the sum of both."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(1)
        self.mean, self.next, self.is_away = 0.0, 0, False

    @property
    def positions(self) -> Mapping[int, int]:
        return {0: self.next, 1: self.next}

    def begin(self) -> None:
        self.next = 1_000

    def take(self, task: Task, most: int) -> SampleBatch:
        if self.is_away:
            raise ServiceUnavailableError("Kafka is away")
        self.next += most // 2
        x = self._rng.normal(size=(most, 2)).astype(np.float32)
        x[:, 0] += self.mean
        return SampleBatch(x, x.sum(axis=1))


class InputRig(Rig):
    job = (
        "job: j\ntask: {class: line.py:Line}\ndata: {workers: 1, batch_size: 1}\n"
        "drift: {inputs: {window: 1000, leave_out: ['y']}}\n"
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.samples, self.now_s, self.version = Samples(), 1_000.0, 0
        self.restart()

    def restart(self) -> None:
        task = load_task(self.config)
        self.watch = WatchedInputs(
            self.config, self.folder, task, build(self.config, task), self.samples, clock=lambda: self.now_s
        )

    def windows(self, count: int) -> list[Drift]:
        drifts = []
        for _ in range(10 * count):
            self.now_s += 1.0
            self.version += 5
            drifts += self.watch.look(3, self.version)
        return drifts


def test_a_feature_and_the_answers_change_and_the_window_is_named(tmp_path: Path) -> None:
    rig = InputRig(tmp_path)
    rig.save(1, 1.0, -1.0)
    assert rig.windows(3) == []
    rig.samples.mean = 2.0
    drifts = {drift.metric: drift for drift in rig.windows(1)}
    assert drifts.keys() == {"x[0]", "answer"}
    drift = drifts["x[0]"]
    assert (drift.detector, drift.term, drift.since, drift.version) == ("stability", 3, 150, 200)
    assert drift.index > 1
    assert (drift.before, drift.after) == (pytest.approx(0, abs=0.1), pytest.approx(2, abs=0.1))
    assert drift.offsets == ((0, 2_500, 3_000), (1, 2_500, 3_000))
    assert drifts["answer"].after == pytest.approx(2, abs=0.3)
    assert rig.windows(5) == []


def test_without_a_checkpoint_only_features_are_watched(tmp_path: Path) -> None:
    rig = InputRig(tmp_path)
    rig.windows(2)
    rig.samples.mean = 2.0
    assert [drift.metric for drift in rig.windows(1)] == ["x[0]"]


def test_a_restarted_evaluator_compares_with_the_window_before(tmp_path: Path) -> None:
    rig = InputRig(tmp_path)
    rig.windows(2)
    rig.samples.mean = 2.0
    rig.restart()
    assert [drift.metric for drift in rig.windows(1)] == ["x[0]"]
    (tmp_path / "drift_reference.json").write_text('{"histograms": [')
    with capture_logs() as logs:
        rig.restart()
    assert [line["event"] for line in logs] == ["drift_reference_not_read"]
    assert rig.windows(3) == []


def test_while_kafka_is_away_nothing_is_compared_and_then_it_goes_on(tmp_path: Path) -> None:
    rig = InputRig(tmp_path)
    rig.windows(2)
    rig.samples.is_away = True
    rig.now_s += 10
    with pytest.raises(ServiceUnavailableError):
        rig.watch.look(3, rig.version)
    assert rig.watch.look(3, rig.version) == [], "not again at once"
    rig.samples.is_away, rig.samples.mean = False, 2.0
    rig.now_s += 60
    assert [drift.metric for drift in rig.windows(2)] == ["x[0]"]


def test_the_evaluator_keeps_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = InputRig(tmp_path)
    evaluator = Evaluator(rig.config, MemoryBlobs(), tmp_path, input_records=rig.samples)
    assert evaluator._inputs is not None
    monkeypatch.setattr(evaluator._inputs, "_clock", lambda: rig.now_s)
    drifts = []
    for second in range(40):
        rig.now_s += 1.0
        rig.samples.mean = 2.0 * (second >= 20)
        drifts += evaluator.watch_inputs()
    assert [drift.metric for drift in drifts] == ["x[0]"]
    (line,) = (tmp_path / "input_drifts.jsonl").read_text().splitlines()
    assert json.loads(line)["metric"] == "x[0]"
    rig.samples.is_away = True
    rig.now_s += 60
    assert evaluator.watch_inputs() == []


def test_other_jobs_watch_no_inputs() -> None:
    config = parse("job: j\ntask: {class: 'a:B'}\ndata: {workers: 1}\ndrift: {}")
    assert config.drift is not None
    assert config.drift.inputs is None
