"""The stage processes of a virtual worker. The worker forks them at its start, before it has threads and connections.

The stages end when the worker ends for any reason. The worker ends when a stage ends
(`doll.consumers.pipeline.pipeline_engine`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

import torch

import doll
from doll.config import JobConfig
from doll.errors import ConfigError, DollError, StageLostError, TaskError
from doll.local.processes import die_with_parent
from doll.model.file_memory import forget_pages
from doll.model.flat_model import FlatModel, build, fingerprint
from doll.pipeline.links.device import open_device
from doll.pipeline.links.link import LinkClosedError, StageLink, shared_pair, socket_pair
from doll.pipeline.planner.cut import cut
from doll.pipeline.profiling.layers import Layer
from doll.pipeline.runtime.messages import AnyMessage, Failed, Ready, StopStage, decode, encode
from doll.pipeline.runtime.stage import Stage
from doll.pipeline.runtime.stage_process import Links, SharedVectors, StageProcess
from doll.pipeline.runtime.vectors import VectorFile
from doll.process.memory import return_freed_memory
from doll.process.platform import require_fork
from doll.task.base import Task, load_task
from doll.telemetry import get_logger

log = get_logger(__name__)

READY_S: Final = 120.0
_END_S: Final = 1.0
_SEGMENT_BYTES: Final = 64 * 1024 * 1024  # address space; unused pages take no memory


def failure(message: Failed) -> DollError:
    return (TaskError if message.is_task else StageLostError)(f"stage {message.stage + 1}: {message.error}")


def reported(controls: Sequence[StageLink]) -> DollError | None:
    """Return the failure that a stage has reported, perhaps behind other messages; None if none has."""
    for link in controls:
        with contextlib.suppress(LinkClosedError, ValueError), selectors.DefaultSelector() as selector:
            selector.register(link, selectors.EVENT_READ)
            while selector.select(0):
                message = decode(link.receive()[0])
                if isinstance(message, Failed):
                    return failure(message)
    return None


def greet(message: AnyMessage, number: int, expected: str) -> Ready:
    """Return the first message of stage `number`, which must be `Ready` with the fingerprint `expected`. Raise
    ConfigError if the stage runs other versions or cannot be created."""
    if isinstance(message, Failed):
        raise ConfigError(f"stage {number + 1}: {message.error}")
    if not isinstance(message, Ready) or message.fingerprint != expected:
        got = message.fingerprint if isinstance(message, Ready) else type(message).__name__
        raise ConfigError(
            f"stage {number + 1} runs another version: expected {expected!r}, got {got!r}; install the same DOLL "
            "and torch, and the same task, on all machines of a worker"
        )
    return message


@dataclass(frozen=True)
class StageProcesses:
    """The running stages of one virtual worker."""

    pids: tuple[int, ...]  # their processes, in the order of the stages
    controls: tuple[StageLink, ...]  # one link to each stage
    chain: StageLink  # the link to the first stage
    shared: SharedVectors

    def wait_until_ready(self, expected: str) -> None:
        """Wait until all stages run the same versions as this process. Raise ConfigError if a stage runs other versions
        or cannot be created, and StageLostError if a stage has ended or is not ready in time."""
        waiting = set(range(len(self.pids)))
        until_s = time.monotonic() + READY_S
        with selectors.DefaultSelector() as selector:
            for number, link in enumerate(self.controls):
                selector.register(link, selectors.EVENT_READ, number)
            while waiting:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise StageLostError(f"stage {min(waiting) + 1} is not ready after {READY_S:g} s")
                for key, _ in selector.select(left_s):
                    if key.data in waiting:
                        self._greet(key.data, expected)
                        waiting.discard(key.data)

    def _greet(self, number: int, expected: str) -> None:
        try:
            message = decode(self.controls[number].receive()[0])
        except LinkClosedError as exc:
            at, how = self.first_end(number)
            raise StageLostError(f"stage {at + 1} {how} while it started") from exc
        greet(message, number, expected)

    def first_end(self, number: int) -> tuple[int, str]:
        """Return the stage that ended first, and how it ended, in words. Wait up to 1 s for its end. `number` is a
        stage whose link is closed.

        If a signal ends a stage, its neighbours then exit with a code, because their links are closed. So a stage that
        was ended by a signal was the first one.
        """
        ends: dict[int, str] = {}
        until_s = time.monotonic() + _END_S
        while time.monotonic() < until_s and len(ends) < len(self.pids):
            for at in set(range(len(self.pids))) - set(ends):
                code = _exit_code(self.pids[at])
                if code is not None and code < 0:
                    return at, f"was ended by {signal.Signals(-code).name}"
                if code is not None:
                    ends[at] = f"has exited with code {code}"
            time.sleep(0.01)
        return number, ends.get(number, "has closed its link")

    def name_of(self, number: int) -> str:
        return f"stage {number + 1} (pid {self.pids[number]})"

    def deliver(self, term: int, version: int) -> None:
        """Do nothing: forked stages read the shared file."""

    def why_closed(self, number: int) -> DollError:
        """Return the error that explains why the link to this stage, or to the first stage, is closed. The result is a
        TaskError if a stage has reported that the task is at fault, otherwise a StageLostError."""
        at, how = self.first_end(number)
        return reported(self.controls) or StageLostError(f"{self.name_of(at)} {how}: its worker ends with it")

    def close(self) -> None:
        """End the stages, and kill stages that do not end by themselves. This method may be called again."""
        for link in self.controls:
            with contextlib.suppress(LinkClosedError):
                link.send(encode(StopStage()))
        until_s = time.monotonic() + _END_S
        left = set(self.pids)
        while left and time.monotonic() < until_s:
            left = {pid for pid in left if _exit_code(pid) is None}
            if left:
                time.sleep(0.01)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _exit_code(pid, wait=True)
        for link in (*self.controls, self.chain):
            link.close()


def start_stages(
    config: JobConfig, task: Task, model: FlatModel, parts: Sequence[Sequence[Layer]], worker: int, *, in_flight: int,
) -> StageProcesses:  # fmt: skip
    """Fork one process for each of `parts`, which are the layers of the model's module by stage. Call it while this
    process has only one thread.

    Raises:
        ConfigError: a stage cannot be created here, for instance on a missing device or on macOS.
        StageLostError: a stage has ended, or is not ready in time.
    """
    pipeline = config.worker.pipeline
    assert pipeline is not None
    require_fork()
    shared = SharedVectors(*(VectorFile(model.flat.numel()) for _ in range(2)))
    controls = [socket_pair() for _ in parts]
    chain = [
        shared_pair(in_flight + 2, _SEGMENT_BYTES) for _ in parts
    ]  # the first pair connects the worker and the first stage
    ends = [end for pair in (*controls, *chain) for end in pair]
    for end in ends:
        end.limit_sending(pipeline.stage_timeout_s)
    expected = stage_fingerprint(config, model)
    parent, pids = os.getpid(), []
    # The first backward pass from a given gradient imports this module: 0.4 s and 30 MB per stage if it is not shared.
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    sys.stdout.flush()
    sys.stderr.flush()
    for number, layers in enumerate(parts):
        links = Links(controls[number][1], chain[number][1], chain[number + 1][0] if number + 1 < len(parts) else None)
        pid = os.fork()
        if pid == 0:
            _become_stage(
                config, task, model, layers, worker, number, parent, links, ends, shared, expected
            )  # fmt: skip
        pids.append(pid)
    for pair in controls:
        pair[1].forget()
    for number, (before, after) in enumerate(chain):
        after.forget()
        if number:
            before.forget()
    stages = StageProcesses(tuple(pids), tuple(pair[0] for pair in controls), chain[0][0], shared)
    try:
        stages.wait_until_ready(expected)
    except BaseException:
        stages.close()
        raise
    log.info("stages_started", pids=pids, layers=[f"{part[0].name}..{part[-1].name}" for part in parts])
    return stages


def cut_model(config: JobConfig, worker: int) -> tuple[Task, FlatModel, list[list[Layer]]]:
    """Return the job's task, its model, and the layers of each stage of one worker. Raise ConfigError if the model
    cannot be cut as the job file requires."""
    task = load_task(config)
    model = build(config, task, with_rows=False, in_files=is_limited(config, worker))
    return task, model, cut(config, task, model.module, worker)


def is_limited(config: JobConfig, worker: int) -> bool:
    """Return whether the memory of this worker's processes, or of a device of its stages, is limited.

    If it is limited, the worker's process keeps the undivided model in files. It also returns freed memory to the
    system, because its stages would inherit the free part of its heap.
    """
    pipeline = config.worker.pipeline
    if config.worker.memory_bytes is not None or pipeline is None:
        return config.worker.memory_bytes is not None
    return any(device.memory_bytes is not None for device in pipeline.devices_of(worker))


def stage_fingerprint(config: JobConfig, model: FlatModel) -> str:
    """Return the properties that must be equal in all stages: the job, the model, the versions of DOLL and torch."""
    return f"doll {doll.__version__}, torch {torch.__version__}, {fingerprint(config, model)}"


def make_stage(
    config: JobConfig, task: Task, model: FlatModel, layers: Sequence[Layer], worker: int, number: int
) -> Stage:
    """Return stage `number` of a worker, with these layers of `model`, on its device. Call it in the stage's process.
    Raise ConfigError if the stage cannot be created."""
    pipeline = config.worker.pipeline
    assert pipeline is not None
    settings = pipeline.devices_of(worker)[number]
    limits_memory = settings.memory_bytes is not None or config.worker.memory_bytes is not None
    stage = Stage(
        task, model, [layer.module for layer in layers], training=config.training,
        slots=config.training.policy.batches_per_push, is_first=number == 0, is_last=number == pipeline.stages - 1,
        device=open_device(settings.device), is_limited=limits_memory,
    )  # fmt: skip
    if is_limited(config, worker):
        forget_pages(model.flat)  # this process has read its own part of the vector
    return stage


def _become_stage(
    config: JobConfig, task: Task, model: FlatModel, layers: Sequence[Layer], worker: int, number: int,
    parent: int, links: Links, ends: Sequence[StageLink], shared: SharedVectors, expected: str,
) -> NoReturn:  # fmt: skip
    """Run stage `number` in this process, which was forked for it, until the end of the stage."""
    code = 1
    try:
        die_with_parent(parent)
        own = {id(link) for link in (links.control, links.before, links.following)}
        for end in ends:
            if id(end) not in own:
                end.forget()
        pipeline = config.worker.pipeline
        assert pipeline is not None
        settings = pipeline.devices_of(worker)[number]
        if settings.memory_bytes is not None or config.worker.memory_bytes is not None:
            return_freed_memory()
        gc.freeze()  # memory of the worker's objects stays shared with the worker
        process = StageProcess(
            lambda: make_stage(config, task, model, layers, worker, number), links, shared, number=number,
            fingerprint=expected, slowdown=settings.slowdown,
        )  # fmt: skip
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker's launcher handles Ctrl-C
        signal.signal(signal.SIGTERM, lambda *_: process.leave_within(config.worker.drain_s, "sigterm"))
        code = process.run()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _exit_code(pid: int, *, wait: bool = False) -> int | None:
    """Return the exit code of a child, or the negative number of the signal that ended it. Return None if the child
    runs, and 0 if its code was read before."""
    try:
        done, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
    except ChildProcessError:
        return 0
    return os.waitstatus_to_exitcode(status) if done else None
