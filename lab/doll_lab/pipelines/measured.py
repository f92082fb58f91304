"""The timeline of a virtual worker that has run, from the tasks that its stages have written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from doll.pipeline.runtime.messages import StageTask

from doll_lab.pipelines.timeline import Span, Timeline


def read_tasks(path: Path) -> list[StageTask]:
    """The tasks that `TaskLog` has written, in order of batches; a last line that is cut is left out."""
    decoder = msgspec.json.Decoder(list[StageTask])
    tasks: list[StageTask] = []
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            tasks += decoder.decode(line)
    return tasks


def timeline_of(tasks: Sequence[StageTask], stages: int, in_flight: int) -> Timeline:
    """The first minibatches whose tasks are all there, in a row; seconds from the first task on.

    A minibatch that was computed twice, since its samples were inspected, ends the row.

    Args:
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
