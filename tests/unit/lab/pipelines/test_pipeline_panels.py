"""The charts of a run's virtual workers."""

from __future__ import annotations

from pathlib import Path

import msgspec
from doll.config import load
from doll.pipeline.runtime.messages import StageTask
from paths import EXAMPLES

from doll_lab.pipelines.pipeline_panels import pipeline_panels
from doll_lab.pipelines.schedule import StageTimes, simulate

CONFIG = load(EXAMPLES / "digits" / "pipeline.yaml")


def test_a_worker_has_its_tasks_as_simulated_and_as_measured_and_what_stages_keep(tmp_path: Path) -> None:
    timeline = simulate([StageTimes(1.0, 2.0)] * 3, 4, 40)
    tasks = [StageTask(at.stage, at.kind, at.minibatch, 9 + at.start_s, 9 + at.end_s) for at in timeline.spans]
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "worker-0.jsonl").write_bytes(msgspec.json.encode(tasks) + b"\n")
    panels = pipeline_panels(CONFIG, tmp_path)
    assert [panel["title"] for panel in panels] == [
        "Worker 0, simulated", "Worker 0, measured", "Worker 0, simulated: kept by each stage",
        "Worker 0, measured: kept by each stage",
    ]  # fmt: skip
    rows = dict(panels[1]["rows"])
    assert list(rows) == ["stage 2", "stage 1", "stage 0"]
    assert {kind for _, _, kind, _ in rows["stage 0"]} == {"F", "B"}
    assert all(begin_s < panels[1]["end"] for begin_s, *_ in rows["stage 0"])
    kept = {line["label"]: max(line["y"]) for line in panels[3]["lines"]}
    assert kept["stage 0"] == 4, "minibatches in flight"


def test_without_a_log_there_is_nothing_to_show(tmp_path: Path) -> None:
    assert pipeline_panels(CONFIG, tmp_path) == []
