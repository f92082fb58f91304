"""Where the time of one update goes: `python -m benchmarks.gpu --stages --device cuda`.

One process does what a worker and a server do for an update of K batches, one after the other: the production code of
the grant, the guard, the sum, the blobs in shared memory, and the server's step. Kafka, the control channel and other
threads of a worker are not in it, so what a job takes longer than this is theirs.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch
from doll.config import JobConfig
from doll.consumers.compute.gradient import CachedVersion, ForwardPasses, GradientComputer
from doll.consumers.compute.gradient_engine import GrantHandler
from doll.consumers.compute.guard import Guard
from doll.consumers.intake.decoding import DecodedBatch
from doll.consumers.protocol.worker_core import Batch
from doll.model.flat_model import build
from doll.process.memory import keep_freed_memory
from doll.ps.engine.events import AppliedBatch, AppliedSet, ApplyUpdate, FetchGradient
from doll.ps.model.model_host import ModelHost
from doll.ps.model.updater import make_parts
from doll.records.control import Grant, Push, PushedBatch
from doll.storage.contributions import Compressor
from doll.storage.shm_blobs import ShmBlobs, limit_bytes
from doll.task.base import load_task

from doll_lab.simulation.memory_blobs import MemoryBlobs

Pool = Sequence[tuple[npt.NDArray[Any], ...]]

STAGES: Final = (
    "read weights", "load", "gradients", "add", "sum to memory", "encode", "store",
    "server reads", "server steps", "server publishes",
)  # fmt: skip
_WARM_UPDATES: Final = 4


class Stages:
    """A worker and a server in one process. `milliseconds` has the times of each stage, by wall clock and by the CPU
    time of the thread, one for each update after the first few."""

    def __init__(self, config: JobConfig, device: str, pool: Pool) -> None:
        self.milliseconds: dict[str, list[tuple[float, float]]] = {name: [] for name in STAGES}
        self._pool, self._device, self._version, self._grant_id = pool, device, 0, 1
        self._now: dict[str, tuple[float, float]] = {}
        self._size = len(pool[0][0])
        self._group_size = config.group_size
        self._folder = Path(tempfile.mkdtemp(prefix="doll-stages-", dir="/dev/shm"))
        task = load_task(config)
        served = build(config, task)
        self._host = ModelHost(config, 1, make_parts(config.training, served).updater, self._open())
        self._model = build(config, task, with_rows=False, device=device)
        passes = ForwardPasses(self._model.module, device, config.training.precision)
        computer = GradientComputer(task, self._model, passes)
        blobs, total, guard = self._open(), computer.new_sum(), Guard(config, task, computer)
        local = CachedVersion(config.job, blobs, computer)
        for owner, method, name in (
            (local, "_stored", "read weights"), (computer, "load", "load"), (guard, "compute", "gradients"),
            (total, "keep", "add"), (total, "values", "sum to memory"), (blobs, "put", "store"),
            (self._host, "fetch", "server reads"), (self._host, "apply", "server steps"),
            (self._host, "publish", "server publishes"),
        ):  # fmt: skip
            setattr(owner, method, self._timed(name, getattr(owner, method)))
        self.num_passes = 0
        forward = computer._forward

        def counted(*args: Any, **more: Any) -> Any:
            self.num_passes += 1
            return forward(*args, **more)

        computer._forward = counted  # type: ignore[method-assign]
        self._handler = GrantHandler(
            config, local_model=local, guard=guard, compressor=cast(Compressor, _TimedCompressor(config.job, self)),
            blobs=blobs, dead_letters=cast(Any, None), contribution=total,
        )  # fmt: skip
        self._handler._limit_s = float("inf")  # the first pass of a device may take seconds
        self._key = self._host.publish(0)

    def _open(self) -> ShmBlobs:
        return ShmBlobs(self._folder / "blobs", limit_bytes=limit_bytes(self._folder), fallback=MemoryBlobs())

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def timed(*args: Any, **more: Any) -> Any:
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            result = call(*args, **more)
            if self._device.startswith("cuda"):
                torch.cuda.synchronize()
            wall, cpu = self._now.get(name, (0.0, 0.0))
            self._now[name] = wall + time.perf_counter() - wall_s, cpu + time.thread_time() - cpu_s
            return result

        return timed

    def update(self) -> None:
        """Make one version of the model."""
        self._now = {}
        first, version = self._version * self._group_size, self._version
        numbers = tuple(range(first + 1, first + 1 + self._group_size))
        grant = Grant(
            worker=0, session=1, term=1, grant_ids=numbers, first=first, version=version, min_version=version,
            batches=tuple((0, first + at) for at in range(self._group_size)),
            key=self._key,
        )  # fmt: skip
        batches = [
            Batch(number, DecodedBatch(*self._pool[number % len(self._pool)], self._offsets(number)), self._size, 0.0)
            for number in range(first, first + self._group_size)
        ]
        done = self._handler.handle(grant, batches, lambda batch, grant_id: True)
        assert done is not None
        assert len(done.batches) == self._group_size
        pushed = tuple(
            PushedBatch(batch=item.number, grant_id=number, n_samples=self._size, loss_sum=out.loss_sum)
            for item, number, out in zip(batches, numbers, done.batches, strict=True)
        )
        push = Push(worker=0, session=1, term=1, version=version, key=done.key, batches=pushed)
        applied = tuple(
            AppliedBatch(0, item.batch, item.batch * self._size, (item.batch + 1) * self._size, 0.0, item)
            for item in pushed
        )
        self._host.fetch(FetchGradient(numbers[0], done.key, version, in_order=True))
        samples = self._group_size * self._size
        self._host.apply(ApplyUpdate(version + 1, (AppliedSet(push, 0.0, applied),), 1 / samples, 0, 0))
        self._version += 1
        self._key = self._host.publish(self._version)
        self._host.tidy()
        if self._version == _WARM_UPDATES:
            self.num_passes = 0  # those of the guard's first inspection
        if self._version > _WARM_UPDATES:
            for name in STAGES:
                self.milliseconds[name].append(self._now.get(name, (0.0, 0.0)))

    def _offsets(self, number: int) -> npt.NDArray[np.int64]:
        return np.arange(number * self._size, (number + 1) * self._size)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class _TimedCompressor:
    def __init__(self, job: str, stages: Stages) -> None:
        self.compress_slices = stages._timed("encode", Compressor(job).compress_slices)


def profile(config: JobConfig, device: str, pool: Pool, seconds: float) -> dict[str, Any]:
    """Return the medians of each stage in milliseconds of wall-clock and of CPU time, and the number of updates."""
    keep_freed_memory()
    stages = Stages(config, device, pool)
    try:
        first_s = time.monotonic()
        while time.monotonic() - first_s < seconds or len(stages.milliseconds["load"]) < 3:
            stages.update()
        updates = len(stages.milliseconds["load"])
        return {
            "updates": updates,
            "passes per batch": round(stages.num_passes / (updates * config.group_size), 3),
            **{
                name: [round(1e3 * median(column), 2) for column in zip(*times, strict=True)]
                for name, times in stages.milliseconds.items()
            },
        }
    finally:
        stages.close()
