"""What the stages of a running virtual worker did: written to a file of the run folder, and read as a timeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from doll.pipeline.planner.timeline import Span, Timeline
from doll.pipeline.runtime.messages import StageTask

MAX_BATCHES: Final = 1_000


class TaskLog:
    """Writes the tasks of the first batches of a process, a line of JSON for each batch; a new process begins again."""

    def __init__(self, path: Path, max_batches: int = MAX_BATCHES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._left = max_batches
        self._encoder = msgspec.json.Encoder()

    def add(self, tasks: Sequence[StageTask]) -> None:
        """The tasks of one batch, at all stages."""
        if self._left and not self._file.closed:
            self._left -= 1
            self._file.write(self._encoder.encode(tasks) + b"\n")
            if not self._left:
                self._file.close()

    def close(self) -> None:
        self._file.close()


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
