"""One virtual worker without Kafka: its stage processes, its engine, and weights that come back after each wave."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from doll.config import JobConfig, parse
from doll.consumers.compute.gradient import GradientComputer
from doll.consumers.compute.guard import Guard
from doll.consumers.intake.dead_letters import DeadLetters
from doll.consumers.intake.decoding import DecodedBatch
from doll.consumers.lifecycle.departure import Departure
from doll.consumers.pipeline.pipeline_engine import PipelineGradientEngine
from doll.consumers.pipeline.stage_processes import StageProcesses, is_limited, start_stages
from doll.consumers.protocol.worker_core import Batch, ComputedBatch, GradientDone
from doll.model.flat_model import build
from doll.pipeline.planner.cut import check_with_samples, cut
from doll.pipeline.planner.measured import TaskLog
from doll.pipeline.runtime.messages import StageTask
from doll.process.memory import keep_freed_memory, return_freed_memory
from doll.records.control import Grant, NewVersion
from doll.storage.blobs import encode_blob
from doll.storage.contributions import Compressor
from doll.task.base import load_task

from doll_lab.pipelines.measured import read_tasks
from doll_lab.simulation.memory_blobs import MemoryBlobs


class _NoDeadLetters(DeadLetters):
    def __init__(self) -> None:
        pass

    def refuse_samples(self, batch: Batch, bad: Mapping[int, str]) -> ComputedBatch:
        raise AssertionError(f"a sample of a benchmark is refused: {bad}")


def job(task: str, stages: int, in_flight: int, *overrides: str) -> JobConfig:
    text = (
        f"job: stages\ntask: {task}\ndata: {{workers: 1, batch_size: 8}}\n"
        f"training: {{policy: {{name: wsp, wave_batches: {in_flight}, clock_distance: 4}}}}\n"
        f"worker: {{pipeline: {{stages: {stages}}}}}\n"
    )
    return parse(text, overrides)


@contextmanager
def running(config: JobConfig, in_flight: int) -> Iterator[tuple[PipelineGradientEngine, StageProcesses, Any, Path]]:
    """The engine of a virtual worker whose stages run."""
    (return_freed_memory if is_limited(config, 0) else keep_freed_memory)()
    torch.set_num_threads(1)
    task = load_task(config)
    model = build(config, task, in_files=is_limited(config, 0))
    parts = cut(config, task, model.module, 0)
    stages = start_stages(config, task, model, parts, 0, in_flight=in_flight)
    blobs = MemoryBlobs()
    computer = GradientComputer(task, model)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "tasks.jsonl"
        engine = PipelineGradientEngine(
            config, stages, guard=Guard(config, task, computer), computer=computer,
            compressor=Compressor(config.job, model.num_parameters), blobs=blobs,
            dead_letters=_NoDeadLetters(), departure=Departure(), task_log=TaskLog(log),
            task=task, check=partial(check_with_samples, task, model.module, parts),
        )  # fmt: skip
        try:
            yield engine, stages, (model, blobs), log
        finally:
            engine.close()


def run_batches(
    config: JobConfig, in_flight: int, samples: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]],
    watch: Callable[[Sequence[int]], None] = lambda pids: None,
) -> list[StageTask]:  # fmt: skip
    """Compute these batches, one after the other in the stream; what the stages did when.

    Args:
        watch: is called with the stages' pids before the first batch, and after each.
    """
    with running(config, in_flight) as (engine, stages, (model, blobs), log):
        weights = model.flat.detach().numpy().copy()
        version = 1

        def publish(included: int) -> NewVersion:
            key = f"w{version}"
            blobs.put(key, [*encode_blob(weights, job=config.job, kind="w", version=version)], 600.0)
            return NewVersion(term=1, worker=0, version=version, key=key, included=included)

        first = publish(0)
        watch(stages.pids)
        newest = first
        futures: deque[Future[GradientDone | None]] = deque()
        answered = 0
        for number, (x, y) in enumerate(samples):
            batch = Batch(number, DecodedBatch(x, y, np.arange(len(x))), len(x), 0.0)
            grant = Grant(
                term=1, worker=0, session=1, first=number, grant_ids=(number,), batches=((0, number),),
                version=newest.version, min_version=0, key=newest.key, included=newest.included,
            )  # fmt: skip
            futures.append(engine.submit(grant, [batch], lambda batch, grant_id: True))
            # As the policy: two waves are granted and not applied.
            while len(futures) >= 2 * in_flight or (futures and number + 1 == len(samples)):
                done = futures.popleft().result(120.0)
                assert done is not None
                answered += 1
                watch(stages.pids)
                if done.key:
                    blobs.delete(done.key)
                    version += 1
                    newest = publish(answered)
                    engine.offer(newest)
                    blobs.delete(f"w{version - 3}")
        engine.close()
        return read_tasks(log)
