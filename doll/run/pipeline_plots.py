"""Pictures of a run's virtual workers: what their stages did when, simulated and measured."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from doll.config import JobConfig
from doll.consumers.task_log import read_tasks
from doll.pipeline import gantt
from doll.pipeline.measured import timeline_of
from doll.pipeline.schedule import simulate_as_measured

MAX_WORKERS: Final = 4
_WAVES: Final = 8  # that are simulated
_SHOWN_WAVES: Final = 4


def draw_pipelines(config: JobConfig, run: Path) -> list[Path]:
    """Draw `pipeline/worker-N.png` in a run's folder, for its first workers.

    A picture has a few waves from the middle of the log: as they would follow from the durations of their tasks alone,
    and as they were, with waiting for other workers and for weights. Workers that have computed too little are left
    out.

    Raises:
        OSError: a picture cannot be written.
    """
    pipeline = config.worker.pipeline
    if pipeline is None:
        return []
    in_flight = config.training.policy.batches_per_push
    pictures = []
    for worker in range(min(MAX_WORKERS, config.data.workers)):
        log = run / "pipeline" / f"worker-{worker}.jsonl"
        tasks = read_tasks(log) if log.exists() else []
        batches = sorted({task.batch for task in tasks})
        first = batches[len(batches) // 2] if batches else 0
        few = [task for task in tasks if first <= task.batch < first + _WAVES * in_flight]
        measured = timeline_of(few, pipeline.stages, in_flight)
        if len(measured.completions_s) <= in_flight:
            continue
        end_s = measured.completions_s[min(_SHOWN_WAVES * in_flight, len(measured.completions_s)) - 1]
        path = log.with_suffix(".png")
        gantt.save(path, {"simulated": simulate_as_measured(measured), "measured": measured}, end_s=end_s)
        pictures.append(path)
    return pictures
