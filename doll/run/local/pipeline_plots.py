"""Pictures of a run's virtual workers: what their stages did when, simulated and measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from doll.config import JobConfig
from doll.pipeline.planner import plots
from doll.pipeline.planner.measured import read_tasks, timeline_of
from doll.pipeline.planner.profiled import live_rule, partition_by_profile
from doll.pipeline.planner.schedule import simulate_as_measured
from doll.pipeline.planner.timeline import Steps, Timeline

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
        timelines = {"simulated": simulate_as_measured(measured), "measured": measured}
        memory = None
        if pipeline.profile is not None:
            sizes = _sizes(config, worker)
            memory = {title: _memory(timeline, sizes, config) for title, timeline in timelines.items()}
        plots.save_timelines(path, timelines, end_s=end_s, memory=memory)
        pictures.append(path)
    return pictures


def _sizes(config: JobConfig, worker: int) -> list[tuple[float, float]]:
    """Bytes of the weights of each stage, and of one minibatch's activations with its input, by the job's profile."""
    profile, partition = partition_by_profile(config, worker)
    sizes = [profile.size_of(stage.first, stage.stop) for stage in partition.stages]
    return [(float(size.parameter_bytes), float(size.activation_bytes + size.input_bytes)) for size in sizes]


def _memory(timeline: Timeline, sizes: Sequence[tuple[float, float]], config: JobConfig) -> list[Steps]:
    """Memory of each stage over time."""
    rule = live_rule(config.training.optimizer)
    return [
        timeline.memory_steps(
            stage, parameter_bytes=weights, activation_bytes=activations,
            optimizer_multiplier=rule.optimizer_multiplier,
        )
        for stage, (weights, activations) in enumerate(sizes)
    ]  # fmt: skip
