"""A virtual worker with real stage processes and no server: its engine, and versions that a server would publish."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import record_builders
import torch
from doll.config import parse
from doll.consumers.compute.gradient import GradientComputer
from doll.consumers.compute.guard import Guard
from doll.consumers.compute.step_model import StepModel
from doll.consumers.intake.dead_letters import DeadLetters
from doll.consumers.intake.decoding import DecodedBatch
from doll.consumers.lifecycle.departure import Departure
from doll.consumers.pipeline.pipeline_engine import PipelineGradientEngine
from doll.consumers.pipeline.remote_stages import form_gang
from doll.consumers.pipeline.stage_main import StageSeat
from doll.consumers.pipeline.stage_processes import cut_model, start_stages
from doll.consumers.protocol.worker_core import Batch, ComputedBatch, GradientDone
from doll.model.flat_model import build
from doll.pipeline.links import tcp
from doll.pipeline.links.tcp import Address, parse_address
from doll.pipeline.planner.cut import check_with_samples, cut
from doll.pipeline.planner.measured import TaskLog
from doll.records.control import NewVersion
from doll.storage.blobs import encode_blob
from doll.storage.contributions import Compressor, decode_contribution
from doll.task.base import load_task
from doll.task.batches import SampleBatch
from memory_stores import MemoryBlobs
from stage_models import samples
from waiting import WAIT_TIMEOUT_S

Array = npt.NDArray[Any]
BATCH = 8


def job(stages: int, in_flight: int, *overrides: str) -> Any:
    return parse(
        "job: unit\ntask: {class: 'stage_models:Net'}\n"
        f"data: {{workers: 1, batch_size: {BATCH}}}\n"
        f"training: {{policy: {{name: wsp, wave_batches: {in_flight}, clock_distance: 4, contributions: sum}}, "
        "optimizer: {name: sgd, lr: 0.05}}\n"
        f"worker: {{pipeline: {{stages: {stages}}}}}\n",
        overrides,
    )


class Refusals(DeadLetters):
    """`DeadLetters.refuse_samples`."""

    def __init__(self) -> None:
        self.bad: dict[int, Mapping[int, str]] = {}

    def refuse_samples(self, batch: Batch, bad: Mapping[int, str]) -> ComputedBatch:
        self.bad[batch.number] = bad
        return ComputedBatch(batch.num_samples - len(bad), dead=tuple(bad))


class Rig:
    """An engine, and the versions that a server would publish; `view` is what an undivided worker would hold."""

    def __init__(self, folder: Path, stages: int = 3, in_flight: int = 4, *overrides: str) -> None:
        torch.set_num_threads(1)
        self.config = job(stages, in_flight, *overrides)
        self.task = load_task(self.config)
        self.model = build(self.config, self.task)
        self.first_weights = self.model.flat.detach().numpy().copy()
        parts = cut(self.config, self.task, self.model.module, 0)
        self.stages = self.start_stages(parts, in_flight)
        self.blobs, self.refusals = MemoryBlobs(), Refusals()
        self.departure = Departure(end_within=lambda seconds, code: None)
        computer = GradientComputer(self.task, self.model)
        self.log = folder / "tasks.jsonl"
        self.engine = PipelineGradientEngine(
            self.config, self.stages, guard=Guard(self.config, self.task, computer), computer=computer,
            compressor=Compressor("unit", self.model.num_parameters), blobs=self.blobs,
            dead_letters=self.refusals, departure=self.departure, task_log=TaskLog(self.log),
            task=self.task, check=partial(check_with_samples, self.task, self.model.module, parts),
        )  # fmt: skip
        self.term = 1
        self.wanted: Callable[[int, int], bool] = lambda batch, grant_id: True

    def start_stages(self, parts: Any, in_flight: int) -> Any:
        return start_stages(self.config, self.task, self.model, parts, 0, in_flight=in_flight)

    def publish(self, version: int, included: int, values: Array | None = None) -> NewVersion:
        key = f"doll:unit:w:{self.term}:{version}"
        weights = self.first_weights if values is None else values
        self.blobs.put(key, encode_blob(weights, job="unit", kind="w", version=version), 600.0)
        return NewVersion(term=self.term, worker=0, version=version, key=key, included=included)

    def submit(
        self, number: int, weights: NewVersion, x: Array | None = None, y: Array | None = None, *, grant: int = -1,
        min_version: int = 0, n: int = BATCH, batch: SampleBatch | None = None,
    ) -> Future[GradientDone | None]:  # fmt: skip
        if batch is None:
            batch = SampleBatch(*samples(self.task, number, n)) if x is None or y is None else SampleBatch(x, y)
        order = record_builders.grant_of(
            term=self.term, worker=0, session=1, first=number, grant_ids=(number if grant < 0 else grant,),
            version=weights.version, min_version=min_version, key=weights.key, included=weights.included,
        )  # fmt: skip
        count = batch.num_samples
        offsets = first_offset(number) + np.arange(count)
        decoded = DecodedBatch(batch.x, batch.y, offsets, weight=batch.weight, group=batch.group)
        held = Batch(number, decoded, count, 0.0)
        return self.engine.submit(order, [held], lambda batch, grant_id: self.wanted(batch, grant_id))

    def pushed(self, done: GradientDone) -> Array:
        """The sum of steps that was stored."""
        blob = self.blobs.get(done.key)
        assert blob is not None
        contribution = decode_contribution(
            blob, numel=self.model.flat.numel(), num_parameters=self.model.num_parameters, job="unit",
            version=done.version, tables={},
        )  # fmt: skip
        values: Array = contribution.values
        return values

    def undivided(self) -> StepModel:
        """A worker without stages."""
        model = build(self.config, self.task)
        computer = GradientComputer(self.task, model)
        return StepModel("unit", self.blobs, self.config.training, model, computer)


class KnownPlaces:
    """`StagePlaces` without Redis: a secret that is known, and offers that a parent process reads from a pipe."""

    def __init__(self, secret: bytes, fd: int) -> None:
        self._secret, self._fd, self._is_said = secret, fd, False

    def secret(self) -> bytes:
        return self._secret

    def offer(self, worker: int, stage: int, address: Address) -> None:
        if not self._is_said:
            os.write(self._fd, f"{address}\n".encode())
            self._is_said = True


class RemoteRig(Rig):
    """A `Rig` whose stages are `StageSeat`s, each in a process that has built the model itself, connected by TCP.

    Attributes:
        pids: processes of the stages. `reap` waits for their ends.
        addresses: where they listen.
    """

    SECRET = b"s" * tcp.SECRET_BYTES

    def start_stages(self, parts: Any, in_flight: int) -> Any:
        self.pids: list[int] = []
        self.addresses: list[Address] = []
        for stage in range(len(parts)):
            self.launch(stage)
        return form_gang(self.config, self.SECRET, 0, self.model, parts, self.addresses)

    def launch(self, stage: int, config: Any = None) -> None:
        """Start a stage that serves one gang."""
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(reads)
                config = self.config if config is None else config
                task, model, parts = cut_model(config, 0)
                seat = StageSeat(config, None, task, model, parts[stage], 0, stage, self.place(stage))  # type: ignore[arg-type]
                signal.signal(signal.SIGTERM, lambda *_: seat.terminate())
                seat.serve_gang(KnownPlaces(self.SECRET, writes), lambda what: None)  # type: ignore[arg-type]
            finally:
                os._exit(0)
        os.close(writes)
        with os.fdopen(reads) as said:
            self.addresses.append(parse_address(said.readline().strip()))
        self.pids.append(pid)

    def place(self, stage: int) -> Address:
        """Where a stage listens; called in its process."""
        return Address("127.0.0.1", 0)

    def reap(self) -> None:
        """Wait until all stages have ended."""
        for pid in self.pids:
            os.waitpid(pid, 0)


def trained(rig: Rig) -> list[str]:
    """What is pushed for four waves of four batches on four versions, each of which contains the own steps before it;
    then for a wave under another server, whose version has a number that was used before. In hexadecimal."""
    pushes: list[Array] = []
    values = rig.first_weights
    for version in range(1, 5):
        weights = rig.publish(version, 4 * (version - 1), values)
        answers = [answer(rig.submit(number, weights)) for number in range(4 * (version - 1), 4 * version)]
        pushes.append(rig.pushed(answers[-1]))
        values = values + pushes[-1]
    rig.term += 1
    weights = rig.publish(4, 16, np.float32(0.5) * values)
    answers = [answer(rig.submit(number, weights)) for number in range(16, 20)]
    return [push.tobytes().hex() for push in (*pushes, rig.pushed(answers[-1]))]


def first_offset(number: int) -> int:
    """The offset of the first sample of batch `number`: batches with the same offsets would draw the same numbers."""
    return 1_000 * number


def answer(future: Future[GradientDone | None]) -> GradientDone:
    done = future.result(WAIT_TIMEOUT_S)
    assert done is not None
    return done
