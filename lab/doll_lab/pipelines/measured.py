"""The timeline of a real virtual worker, from the tasks that its stages have logged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from doll.pipeline.runtime.messages import StageTask

from doll_lab.pipelines.timeline import Span, Timeline


def read_tasks(path: Path) -> list[StageTask]:
    """Return the tasks that `TaskLog` has written, in the order of batches, without an incomplete last line."""
    decoder = msgspec.json.Decoder(list[StageTask])
    tasks: list[StageTask] = []
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            tasks += decoder.decode(line)
    return tasks


def timeline_of(tasks: Sequence[StageTask], stages: int, in_flight: int) -> Timeline:
    """Return the timeline of the first consecutive minibatches with complete tasks; seconds since the first task.

    A minibatch that was computed twice, because its samples were inspected, ends the sequence.

    Args:
        tasks: the tasks, as from `read_tasks`.
        stages: k.
        in_flight: N_m.
    """
    by_batch: defaultdict[int, list[StageTask]] = defaultdict(list)
    for task in tasks:
        by_batch[task.batch].append(task)
    first = min(by_batch, default=0)
    whole: list[StageTask] = []
    batch = first
    while _is_whole(by_batch.get(batch, ()), stages):
        whole += by_batch[batch]
        batch += 1
    begin_s = min((task.start_s for task in whole), default=0.0)
    spans = [
        Span(task.stage, task.kind, task.batch - first + 1, task.start_s - begin_s, task.end_s - begin_s)  # type: ignore[arg-type]
        for task in whole
    ]
    return Timeline(stages, in_flight, tuple(sorted(spans, key=lambda span: span.start_s)))


def _is_whole(tasks: Iterable[StageTask], stages: int) -> bool:
    done = sorted((task.stage, task.kind) for task in tasks)
    expected = [(stage, kind) for stage in range(stages - 1) for kind in ("B", "F")]
    return done == [*expected, (stages - 1, "FB")]
