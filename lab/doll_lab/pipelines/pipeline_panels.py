"""Charts of a run's virtual workers: the tasks of their stages over time, simulated and measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from doll.config import JobConfig
from doll.monitor.views.panels import Panel, line, panel
from doll.pipeline.planner.profiled import live_rule, load_profile, stops_by_profile

from doll_lab.pipelines.measured import read_tasks, timeline_of
from doll_lab.pipelines.schedule import simulate_as_measured
from doll_lab.pipelines.timeline import Steps, Timeline

MAX_WORKERS: Final = 4
_WAVES: Final = 8  # number of simulated waves
_SHOWN_WAVES: Final = 4


def pipeline_panels(config: JobConfig, run: Path) -> list[Panel]:
    """Return the charts of the first workers of a run, from its folder.

    They show a few waves from the middle of the log: simulated from the durations of their tasks alone, and measured,
    which includes waiting for other workers and for weights. Below them is the content that each stage keeps. Workers
    that have computed too little are left out.
    """
    pipeline = config.worker.pipeline
    if pipeline is None:
        return []
    in_flight = config.training.policy.batches_per_push
    shown = []
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
        timelines = {"simulated": simulate_as_measured(measured), "measured": measured}
        shown += [_tasks(f"Worker {worker}, {name}", item, end_s) for name, item in timelines.items()]
        shown += [_kept(config, worker, name, item, end_s) for name, item in timelines.items()]
    return shown


def _tasks(title: str, item: Timeline, end_s: float) -> Panel:
    """Return a chart of the tasks of each stage; the last stage is above, as in the paper's Figure 1."""
    rows = [
        [
            f"stage {stage}",
            [[at.start_s, at.end_s, at.kind, str(at.minibatch)] for at in item.of_stage(stage) if at.start_s < end_s],
        ]
        for stage in reversed(range(item.num_stages))
    ]
    return {"title": title, "rows": rows, "end": end_s}


def _kept(config: JobConfig, worker: int, name: str, item: Timeline, end_s: float) -> Panel:
    """Return a chart of what each stage keeps over time: memory if the job has a profile, else minibatches."""
    pipeline = config.worker.pipeline
    if pipeline is not None and pipeline.profile is not None:
        what, steps = (
            "MiB",
            [
                [(at_s, value / 2**20) for at_s, value in stage]
                for stage in _memory(item, _sizes(config, worker), config)
            ],
        )
    else:
        what, steps = "minibatches", [[(0.0, 0.0), *item.in_flight_steps(stage)] for stage in range(item.num_stages)]
    lines = []
    for stage, values in enumerate(steps):
        at_s, kept = zip(*[step for step in values if step[0] <= end_s], strict=True)
        lines.append(line(f"stage {stage}", [*at_s, end_s], [*kept, kept[-1]], "step"))
    return panel(f"Worker {worker}, {name}: kept by each stage", "seconds", what, *lines)


def _sizes(config: JobConfig, worker: int) -> list[tuple[float, float]]:
    """Return the bytes of each stage's weights, and of one minibatch's activations and input, by the job's profile."""
    profile = load_profile(config)
    stops = stops_by_profile(config, profile, worker)
    sizes = [profile.size_of(first, stop) for first, stop in pairwise([0, *stops])]
    return [(float(size.parameter_bytes), float(size.activation_bytes + size.input_bytes)) for size in sizes]


def _memory(timeline: Timeline, sizes: Sequence[tuple[float, float]], config: JobConfig) -> list[Steps]:
    """Return the memory of each stage over time."""
    rule = live_rule(config.training.optimizer)
    return [
        timeline.memory_steps(
            stage, parameter_bytes=weights, activation_bytes=activations,
            optimizer_multiplier=rule.optimizer_multiplier,
        )
        for stage, (weights, activations) in enumerate(sizes)
    ]  # fmt: skip
