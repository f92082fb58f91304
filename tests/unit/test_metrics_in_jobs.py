"""Metrics as states in whole jobs: workers send them, the server merges them, and all readers compute the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import metric_task
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from doll import metrics
from doll.errors import TaskError
from doll.evaluation.heldout import HeldOut
from doll.metrics.states import STDERR, MetricState, combined, from_bytes, merged, to_bytes
from doll.monitor.state.csv_file import CsvFile, read_rows
from doll.monitor.state.history import History
from doll.monitor.views.prometheus import JobMetrics
from doll.ps.engine.events import Event
from doll.records.control import Push, Update, decode, encode
from doll.task import passes
from doll.task.batches import SampleBatch
from paths import ROOT
from record_builders import term_started
from sklearn.metrics import log_loss, roc_auc_score
from threadless_jobs import BATCHES, Job

pytestmark = pytest.mark.slow  # loads torch

TASK = '{class: "metric_task:Scored", args: {features: 6}}'
WINDOW = 50


class Recording(Job):
    def feed(self, event: Event) -> None:
        if isinstance(event, Push):
            self.__dict__.setdefault("pushes", []).append(decode(encode(event)))
        super().feed(event)


@pytest.mark.parametrize("workers", [1, 7])
@pytest.mark.parametrize("policy", ["{name: doll, group_size: 1}", "{name: ssp, staleness: 2}"])
def test_the_metrics_of_a_job_are_those_of_its_samples(policy: str, workers: int) -> None:
    metric_task.SCORED.clear()
    job = Recording(policy, 3, task=TASK, workers=workers)
    history, version = History(), 0
    history.feed(term_started(1))
    for push in job.__dict__["pushes"]:
        if push.batches:
            version += 1
            history.feed(update(1, version, [(item.metric_sums, item.total_weight) for item in push.batches]))
    # The guard computes parts of a first batch, too, and this batch again.
    learned = {(tuple(p), tuple(y)) for p, y in metric_task.SCORED if len(p) == 8}
    scores, labels = (np.concatenate(column) for column in zip(*learned, strict=True))
    assert len(scores) == 8 * workers * BATCHES
    running = history.prequential.running().metrics
    assert running["auc"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-6)
    base = np.full(len(labels), labels.mean())
    assert running["ne"] == pytest.approx(log_loss(labels, scores) / log_loss(labels, base), abs=1e-6)
    assert running["accuracy"] == pytest.approx(running["hits"])
    assert running["auc" + STDERR] > 0


def update(term: int, version: int, parts: list[tuple[dict[str, float | bytes], float]]) -> Update:
    """Return the record that the server makes of these batches, as its readers get it."""
    values, refused = combined(parts)
    assert not refused
    samples = int(sum(weight for _, weight in parts))
    record = Update(
        term=term, version=version, members=(), n_samples=samples, loss=1.0, metrics=values, time_s=float(version),
        samples_total=samples * version,
    )  # fmt: skip
    return decode(encode(record))  # type: ignore[return-value]


class Stream:
    """Batches of one stream, divided among workers."""

    def __init__(self) -> None:
        rng = np.random.default_rng(2)
        self.score = np.round(rng.normal(size=(300, 16)), 2)
        self.label = (rng.random((300, 16)) < 1 / (1 + np.exp(-self.score))).astype(float)

    def update(self, term: int, version: int, batches: npt.NDArray[np.intp]) -> Update:
        parts: list[tuple[dict[str, float | bytes], float]] = [
            ({"auc": to_bytes(metrics.auc(self.score[at], self.label[at]))}, 16.0) for at in batches
        ]
        return update(term, version, parts)

    def auc(self, batches: npt.NDArray[np.intp]) -> float:
        return float(roc_auc_score(self.label[batches].ravel(), self.score[batches].ravel()))


def test_a_resume_and_a_regrid_count_each_sample_once() -> None:
    """A server fails after version 60 and resumes at 40; then the job goes on with other partitions and 7 workers."""
    stream, history = Stream(), History()
    order = np.random.default_rng(7).permutation(300)
    history.feed(term_started(1))
    for version in range(1, 61):
        history.feed(stream.update(1, version, order[[version]]))
    history.feed(term_started(2, 40))
    for version in range(41, 61):
        history.feed(stream.update(2, version, order[[version + 100]]))
    history.feed(msgspec.structs.replace(term_started(3, 60), grid=1))
    for version in range(61, 76):
        history.feed(stream.update(3, version, order[200 + 7 * (version - 61) : 207 + 7 * (version - 61)]))
    history.feed(stream.update(2, 76, order[[299]]))  # from the server that was replaced
    learned = np.concatenate([order[1:41], order[141:161], order[200:300][: 7 * 15]])
    assert history.prequential.running().metrics["auc"] == pytest.approx(stream.auc(learned), abs=1e-9)
    newest = learned[-(len(order[200:300][: 7 * 15]) + WINDOW - 15) :]
    assert history.prequential.windowed().metrics["auc"] == pytest.approx(stream.auc(newest), abs=1e-9)


def test_the_files_have_the_metric_of_each_update(tmp_path: Path) -> None:
    stream, history, prometheus = Stream(), History(), JobMetrics("job", 1)
    for record in (term_started(1), stream.update(1, 1, np.arange(4)), stream.update(1, 2, np.arange(4, 9))):
        history.feed(record)
        prometheus.feed(record)
    CsvFile(tmp_path / "updates.csv", history.updates).sync(changed=True)
    rows = list(read_rows(tmp_path / "updates.csv"))
    assert [row["update_auc"] for row in rows] == [
        pytest.approx(stream.auc(np.arange(4))), pytest.approx(stream.auc(np.arange(4, 9))),
    ]  # fmt: skip
    assert prometheus.samples()[("doll_update_prequential_auc", ())] == pytest.approx(stream.auc(np.arange(4, 9)))
    ended = History.of_rows(rows, ())
    assert "auc" not in ended.prequential.running().metrics, "a mean of the updates' values is not the metric"


def test_the_code_of_the_guide_runs() -> None:
    names: dict[str, Any] = {"__name__": "guide"}
    for block in re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/guide/metrics.md").read_text(), re.M | re.S):
        exec(block, names)
    task = names["Clicks"]()
    lines = [
        b'{"price": %d, "device": %d, "clicked": %s}' % (at, at % 3, (b"true", b"false")[at % 2]) for at in range(9)
    ]
    x, y = zip(*((sample.x, sample.y) for sample in map(task.decode, lines)), strict=True)
    target = {name: torch.tensor(np.array([part[name] for part in y])) for name in y[0]}
    values = task.metrics(task.build_model()(torch.tensor(np.array(x))), target)
    assert {"auc", "auc[0]", "auc[1]", "auc[other]", "calibration"} <= values.keys()
    parts = [from_bytes(to_bytes(values[name])) for name in ("auc[0]", "auc[1]", "auc[other]")]
    assert merged(parts).compute() == values["auc"].compute()
    largest = names["Largest"]
    assert merged([largest(1), from_bytes(to_bytes(largest(3))), largest(2)]).compute() == 3


def test_held_out_metrics_are_those_of_all_samples() -> None:
    task = metric_task.Scored(features=6)
    torch.manual_seed(1)
    module = task.build_model()
    metric_task.SCORED.clear()
    error = HeldOut(task, 10_000).evaluate(module)
    scores = np.concatenate([p for p, _ in metric_task.SCORED])
    labels = np.concatenate([y for _, y in metric_task.SCORED])
    assert len(metric_task.SCORED) == 5
    assert error.metrics["auc"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-9)
    assert 0 < error.metrics["auc" + STDERR] < 0.05
    assert error.accuracy == pytest.approx(error.metrics["hits"])


def test_states_of_weighted_samples_need_the_weights() -> None:
    class Plain(metric_task.Scored):
        def metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, MetricState]:
            return {"auc": metrics.auc(output[:, 1], target)}

    class Weighted(metric_task.Scored):
        def metrics(
            self, output: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None
        ) -> dict[str, MetricState]:
            return {"auc": metrics.auc(output[:, 1], target, weight)}

    x, y = np.zeros((3, 6), np.float32), np.array([0, 1, 0])
    for count in (1, 3):
        batch = SampleBatch(x[:count], y[:count], np.array([2.0, 1.0, 0.0], np.float32)[:count], None)
        task: metric_task.Scored = Plain(features=6)
        with pytest.raises(TaskError, match="give metrics a parameter weight"):
            passes.metric_sums(task, torch.zeros(count, 2), passes.inputs_of(task, batch))
        task = Weighted(features=6)
        assert passes.metric_sums(task, torch.zeros(count, 2), passes.inputs_of(task, batch))
        nothing = batch._replace(weight=np.zeros(count, np.float32))
        assert not passes.metric_sums(task, torch.zeros(count, 2), passes.inputs_of(task, nothing))


def test_a_state_that_is_too_long_is_the_tasks_fault() -> None:
    class Long(metric_task.Scored):
        def metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, MetricState]:
            score = np.random.default_rng(1).random(9_000)
            return {"auc": metrics.auc(score, score < 0.5, max_scores=60_000)}

    task = Long(features=6)
    inputs = passes.inputs_of(task, SampleBatch(np.zeros((2, 6), np.float32), np.array([0, 1]), None, None))
    with pytest.raises(TaskError, match=r"Long\.metrics\(\): expected a state of at most 65,536 bytes"):
        passes.metric_sums(task, torch.zeros(2, 2), inputs)
