"""`doll stage`: one stage of a virtual worker, on any machine. It serves one gang after the other.

The process loads the task and builds the model, and forks one child for each gang. The child offers the stage in Redis,
listens, and serves the gang whose worker claims it; it ends with the gang. So a stage is free again within
milliseconds, and no gang finds the state of another one.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import redis
import torch

from doll.config import JobConfig
from doll.consumers.pipeline.stage_places import OFFER_EVERY_S, StagePlaces
from doll.consumers.pipeline.stage_processes import cut_model, is_limited, make_stage, stage_fingerprint
from doll.errors import ConfigError, DollError
from doll.kafka.reader import has_finished, on_finish
from doll.kafka.topics import cluster_id
from doll.local.processes import die_with_parent
from doll.model.flat_model import FlatModel
from doll.pipeline.links.link import LinkClosedError, StageLink
from doll.pipeline.links.tcp import HANDSHAKE_S, Address, Claim, Door, LinkRefusedError, connect
from doll.pipeline.profiling.layers import Layer
from doll.pipeline.runtime.messages import Begin, Failed, decode, encode
from doll.pipeline.runtime.stage_process import Links, RemoteVectors, StageProcess
from doll.process.data_limit import DataLimit
from doll.process.health import heartbeat_of
from doll.process.memory import keep_freed_memory, return_freed_memory
from doll.process.platform import require_fork
from doll.services import Services
from doll.storage.blobs import scope_of
from doll.storage.redis_client import connect_redis, reason_of
from doll.task.base import Task
from doll.telemetry import get_logger

log = get_logger(__name__)

_NEXT_GANG: Final = 1  # exit code of a child: its gang has ended
_PAUSE_S: Final = 0.5  # before the next child, if the last one ended at once
_FORM_S: Final = 20.0  # from a worker's claim until the gang is complete


def run_stage(config: JobConfig, services: Services, worker: int, stage: int, listen: Address) -> int:
    """Serve stage number `stage` of worker number `worker` until the job ends.

    Returns:
        0: the job has ended, or SIGTERM was received.

    Raises:
        DollError: the task cannot be loaded, or the model cannot be cut as the job file requires.
    """
    pipeline = config.worker.pipeline
    if pipeline is None or not pipeline.remote:
        raise ConfigError("doll stage: expected a job with worker.pipeline.remote: true")
    if not (0 <= worker < config.data.places and 0 <= stage < pipeline.stages):
        raise ConfigError(
            f"expected worker 0 to {config.data.places - 1} (data.max_workers) and stage 0 to {pipeline.stages - 1} "
            f"(worker.pipeline.stages), got worker {worker} and stage {stage}"
        )
    require_fork()
    torch.set_num_threads(config.worker.torch_threads)
    (return_freed_memory if is_limited(config, worker) else keep_freed_memory)()
    task, model, parts = cut_model(config, worker)
    importlib.import_module("torch.fx.experimental.symbolic_shapes")  # as in `start_stages`
    child: list[int] = []

    def leave(*_: object) -> None:
        left.set()
        for pid in child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    left = threading.Event()
    before = signal.signal(signal.SIGTERM, leave)
    try:
        while not left.is_set():
            sys.stdout.flush()
            sys.stderr.flush()
            begun_s, parent = time.monotonic(), os.getpid()
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            if (pid := os.fork()) == 0:
                _become_child(StageSeat(config, services, task, model, parts[stage], worker, stage, listen), parent)
            child[:] = [pid]
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            child.clear()
            if code in (0, ConfigError.exit_code):
                return code
            if time.monotonic() - begun_s < _PAUSE_S:
                left.wait(_PAUSE_S)
        return 0
    finally:
        signal.signal(signal.SIGTERM, before)


class StageSeat:
    """The place of a stage, from the first offer to the end of the gang that takes it."""

    def __init__(
        self, config: JobConfig, services: Services, task: Task, model: FlatModel, layers: Sequence[Layer],
        worker: int, stage: int, listen: Address,
    ) -> None:  # fmt: skip
        self._config, self._services = config, services
        self._task, self._model, self._layers = task, model, layers
        self._worker, self._stage, self._listen = worker, stage, listen
        self._left, self._finished = threading.Event(), threading.Event()
        self._gang, self._has_chain = "", False
        self._admitted_links: dict[bool, StageLink] = {}  # by `Claim.is_control`
        self._process: StageProcess | None = None
        self._secret = b""
        assert config.worker.pipeline is not None
        self._pipeline = config.worker.pipeline

    def terminate(self) -> None:
        """Leave: this machine is taken away. A gang is told so, and ends the stage. A signal handler may call this."""
        self._left.set()
        if self._process is not None:
            self._process.leave_within(self._config.worker.drain_s, "sigterm")

    def serve(self) -> int:
        """Return 0 if the job has ended, and `_NEXT_GANG` if the gang has ended or this process had to leave."""
        config, services = self._config, self._services
        if has_finished(config, services, self._left.is_set):
            log.info("job_finished", action="no place is offered")
            return 0
        with (
            heartbeat_of(f"stage-{self._worker}-{self._stage}", config) as heartbeat,
            on_finish(config, services, self._finished.set),
            connect_redis(services) as client,
        ):
            places = StagePlaces(client, scope_of(config.job, cluster_id(config, services)))
            self.serve_gang(places, heartbeat.set_waiting_for)
            return 0 if self._finished.is_set() else _NEXT_GANG

    @property
    def _is_over(self) -> bool:
        return self._left.is_set() or self._finished.is_set()

    def serve_gang(self, places: StagePlaces, waiting_for: Callable[[str], None]) -> None:
        """Serve the gang whose worker takes the offered place, until it ends. `waiting_for` is told what this process
        waits for."""
        silent_s = self._pipeline.stage_timeout_s
        door = Door(self._listen, self._known_secret, self._admit, silent_s=silent_s)
        control: StageLink | None = None
        try:
            if (control := self._claimed(door, places, waiting_for)) is None:
                return
            links, layers = self._connect(door, control)
        except (LinkRefusedError, LinkClosedError, queue.Empty) as exc:
            log.info("gang_not_formed", stage=self._stage + 1, gang=self._gang, reason=str(exc) or "not in time")
            return
        finally:
            door.close()  # from now on nobody connects
        if layers != (own := tuple(layer.name for layer in self._layers)):
            error = f"expected the layers {', '.join(layers)} of the worker, got {', '.join(own)}: use one job file"
            control.send(encode(Failed(stage=self._stage, error=error, is_task=False)))
            return
        limit = DataLimit(self._config.worker.memory_bytes)
        limit.begin()
        self._process = StageProcess(
            lambda: make_stage(self._config, self._task, self._model, self._layers, self._worker, self._stage),
            links, RemoteVectors(control, self._model.flat.numel()), number=self._stage,
            fingerprint=stage_fingerprint(self._config, self._model),
            slowdown=self._pipeline.devices_of(self._worker)[self._stage].slowdown, silent_s=silent_s,
        )  # fmt: skip
        if self._left.is_set():
            self.terminate()
        waiting_for("")
        log.info("gang_joined", worker=self._worker, stage=self._stage + 1, gang=self._gang)
        code = self._process.run()
        for link in links.all:  # before anything else ends: the worker waits for it
            link.close()
        log.info("gang_ended", worker=self._worker, stage=self._stage + 1, gang=self._gang, code=code)

    def _admit(self, claim: Claim) -> str:
        if claim.job != self._config.job or (claim.worker, claim.stage) != (self._worker, self._stage):
            return (
                f"expected stage {self._stage} of worker {self._worker} of job {self._config.job}, got stage "
                f"{claim.stage} of worker {claim.worker} of job {claim.job}"
            )
        if claim.is_control:
            if self._gang:
                return f"the place is taken by gang {self._gang}"
            self._gang = claim.gang
        elif claim.gang != self._gang or self._has_chain:
            return f"expected gang {self._gang or '(none yet)'} once, got {claim.gang}"
        else:
            self._has_chain = True
        return ""

    def _known_secret(self) -> bytes:
        if not self._secret:  # an empty secret is known to everybody
            raise ConnectionError("the secret of this run is not known yet, because Redis does not answer")
        return self._secret

    def _claimed(self, door: Door, places: StagePlaces, waiting_for: Callable[[str], None]) -> StageLink | None:
        """Offer the place until a worker claims it; return the link to this worker, None if the job is over."""
        said = ""
        while not self._is_over:
            try:
                self._secret = places.secret()
                places.offer(self._worker, self._stage, door.address)
            except redis.RedisError as exc:
                if (reason := reason_of(exc)) != said:
                    log.warning("redis_unavailable", reason=reason, action="waiting")
                    said = reason
            with contextlib.suppress(queue.Empty):
                return self._admitted(door, OFFER_EVERY_S, is_control=True)
            if self._gang:  # whoever has claimed this place is in its handshake, or gone: then this process ends
                return self._admitted(door, HANDSHAKE_S, is_control=True)
            waiting_for(f"worker {self._worker}, to take this stage; {door.refused} connections refused")
        return None

    def _admitted(self, door: Door, within_s: float, *, is_control: bool) -> StageLink:
        """Return one of the two admitted links; they may come in any order. Raise Empty if it does not come in time."""
        until_s = time.monotonic() + within_s
        while is_control not in self._admitted_links:
            claim, link = door.links.get(timeout=max(0.0, until_s - time.monotonic()))
            self._admitted_links[claim.is_control] = link
        return self._admitted_links[is_control]

    def _connect(self, door: Door, control: StageLink) -> tuple[Links, tuple[str, ...]]:
        """Return the links of this stage, and its layers as the worker has cut the model."""
        silent_s, until_s = self._pipeline.stage_timeout_s, time.monotonic() + _FORM_S
        control.limit_receiving(_FORM_S)
        begin = decode(control.receive()[0])
        control.limit_receiving(silent_s)
        if not isinstance(begin, Begin):
            raise LinkRefusedError(f"expected Begin, got {type(begin).__name__}")
        following = None
        if begin.port:
            claim = Claim(self._config.job, self._worker, self._stage + 1, self._gang, is_control=False)
            following = connect(Address(begin.host, begin.port), self._secret, claim, silent_s)
        before = self._admitted(door, until_s - time.monotonic(), is_control=False)
        return Links(control, before, following), begin.layers


def _become_child(seat: StageSeat, parent: int) -> NoReturn:
    """Serve one gang in this process, which was forked for it."""
    code: Any = _NEXT_GANG
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher of this process handles Ctrl-C
        signal.signal(signal.SIGTERM, lambda *_: seat.terminate())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        code = seat.serve()
    except DollError as exc:
        sys.stderr.write(f"doll: {exc}\n")
        code = exc.exit_code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
