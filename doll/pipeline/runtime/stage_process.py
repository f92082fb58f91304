"""The process of one stage: it processes messages in the order of their arrival, until its links end.

One thread receives, so that no neighbour waits for the computation of this stage. This thread also reports that the
process runs. The other thread computes.
"""

from __future__ import annotations

import math
import queue
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy.typing as npt
import torch

from doll.errors import ConfigError, TaskError
from doll.model.random_numbers import seed_of
from doll.pipeline.links.frames import LinkFrameError
from doll.pipeline.links.link import LinkClosedError, StageLink
from doll.pipeline.runtime.messages import (
    Adopted,
    AnyMessage,
    Backward,
    Failed,
    Forward,
    Leaving,
    Part,
    Payload,
    Ready,
    StageAlive,
    StageOrders,
    StageTask,
    StopStage,
    Stored,
    decode,
    encode,
    rest_of,
)
from doll.pipeline.runtime.stage import Stage
from doll.pipeline.runtime.vectors import VectorFile, pieces
from doll.task import trees
from doll.telemetry import get_logger

log = get_logger(__name__)

Array = npt.NDArray[Any]
ALIVE_EVERY_S: Final = 0.5
_MAX_REASON_CHARS: Final = 300


@dataclass(frozen=True)
class Links:
    """The links of a stage. `following`: None at the last stage."""

    control: StageLink
    before: StageLink
    following: StageLink | None

    @property
    def all(self) -> list[StageLink]:
        return [link for link in (self.control, self.before, self.following) if link is not None]


@dataclass(frozen=True)
class SharedVectors:
    """Vectors of the whole model that all processes of a virtual worker share: the pulled and the pushed vector."""

    pulled: VectorFile
    pushed: VectorFile


class RemoteVectors:
    """`SharedVectors` of a stage on another machine. The worker sends the pulled weights of this stage, and gets what
    this stage stores (`Part`)."""

    def __init__(self, control: StageLink, numel: int) -> None:
        """`numel`: length of the vector of the whole model; only the parts of this stage take memory."""
        self._control, self._numel = control, numel
        self._lock = threading.Condition()
        self._arrived = (-1, -1)
        self._is_ended = False
        self.pulled = VectorFile(numel)
        self.pushed = self

    def write(self, at: int, values: torch.Tensor) -> None:
        """Send values of the vector that begin at position `at` to the worker."""
        for part in pieces(0, len(values)):
            self._control.send(encode(Part(at=at + part.start)), [values[part].cpu().numpy()])

    def receive(self, message: Part, arrays: Sequence[Array]) -> None:
        """Take a part of pulled weights. Raise ValueError if it is not inside the vector."""
        self.pulled.write(message.at, torch.from_numpy(checked_part(message, arrays, self._numel)))
        with self._lock:
            self._arrived = (message.term, message.version)
            self._lock.notify_all()

    def wait_for(self, term: int, version: int) -> bool:
        """Wait until the weights of this version are in `pulled`; return False if the links end before."""
        with self._lock:
            self._lock.wait_for(lambda: self._is_ended or self._arrived == (term, version))
            return not self._is_ended

    def end(self) -> None:
        """End the wait: the links have ended."""
        with self._lock:
            self._is_ended = True
            self._lock.notify_all()


def checked_part(message: Part, arrays: Sequence[Array], numel: int) -> Array:
    """Return the array of a part. Raise ValueError if it is not one float32 array inside a vector of `numel`."""
    array = arrays[0] if len(arrays) == 1 else None
    if array is None or array.dtype != "float32" or array.ndim != 1 or not 0 <= message.at <= numel - len(array):
        got = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
        raise ValueError(f"expected a part of a vector of {numel} numbers, got {got} at {message.at}")
    return array


class StageProcess:
    """The process of one stage. `run` returns when the virtual worker has ended."""

    def __init__(
        self, make_stage: Callable[[], Stage], links: Links, shared: SharedVectors | RemoteVectors, *, number: int,
        fingerprint: str, slowdown: float = 1.0, silent_s: float = math.inf,
    ) -> None:  # fmt: skip
        """
        Args:
            make_stage: function that creates the stage, called in this process.
            shared: vectors that are shared with the other processes.
            fingerprint: fingerprint of the model and settings that this process runs.
            slowdown: factor by which each task is slowed down.
            silent_s: time after which a worker on another machine that sends nothing is considered dead.
        """
        self._make_stage, self._links, self._shared = make_stage, links, shared
        self._number, self._fingerprint = number, fingerprint
        self._slowdown, self._silent_s = slowdown, silent_s
        self._inbox: queue.SimpleQueue[tuple[AnyMessage, list[Array]] | None] = queue.SimpleQueue()
        self._version = -1
        self._tasks: dict[int, list[StageTask]] = {}  # tasks of this stage for the minibatches in flight
        self._leaving: Leaving | None = None
        self._stage: Stage

    def run(self) -> int:
        """Run the stage. Return 0 if the coordinator has ended the stage, and 1 after a failure."""
        try:
            self._stage = self._make_stage()
            ready = Ready(stage=self._number, fingerprint=self._fingerprint)
            if isinstance(self._shared, RemoteVectors):
                ranges = tuple((part.there, part.length) for part in self._stage.ranges)
                ready = msgspec.structs.replace(ready, ranges=ranges)
            self._links.control.send(encode(ready))
            threading.Thread(target=self._receive, name="links", daemon=True).start()
            while (item := self._inbox.get()) is not None:
                if isinstance(item[0], StopStage):
                    return 0
                self._take(*item)
            return 1
        except LinkClosedError:
            return 1  # another process of this virtual worker has ended
        except TaskError as exc:
            self._fail(str(exc), is_task=True)
        except LinkFrameError as exc:
            self._fail(
                f"what it computes cannot be sent: {exc}; set a smaller data.batch_size, or cut the model elsewhere "
                "(worker.pipeline.layers)",
                is_task=True,
            )
        except ConfigError as exc:
            self._fail(str(exc), is_task=False)
        except Exception as exc:
            self._fail(self._log(exc), is_task=False)
        return 1

    def leave_within(self, within_s: float, cause: str) -> None:
        """Ask the virtual worker to leave, because this machine is taken away. A signal handler may call this."""
        # The receiving thread sends the message, because the handler may have interrupted another message.
        self._leaving = Leaving(stage=self._number, within_s=within_s, cause=cause)

    def _log(self, exc: Exception) -> str:
        error = f"{type(exc).__name__}: {exc}"
        log.error("stage_failed", stage=self._number + 1, error=error, exc_info=True)
        return error

    def _fail(self, error: str, *, is_task: bool) -> None:
        try:
            self._links.control.send(encode(Failed(stage=self._number, error=error, is_task=is_task)))
        except LinkClosedError:
            log.warning("stage_failed", stage=self._number + 1, error=error)

    # --- the thread that receives -----------------------------------------------------------------------------------

    def _receive(self) -> None:
        alive_at_s = heard_s = time.monotonic()
        try:
            with selectors.DefaultSelector() as selector:
                for link in self._links.all:
                    selector.register(link, selectors.EVENT_READ)
                while True:
                    for key, _ in selector.select(ALIVE_EVERY_S):
                        header, arrays = key.fileobj.receive()  # type: ignore[union-attr]
                        message = decode(header)
                        if key.fileobj is self._links.control:
                            heard_s = time.monotonic()
                        if isinstance(self._shared, RemoteVectors) and isinstance(message, Part):
                            self._shared.receive(message, arrays)
                        elif not isinstance(message, StageAlive):
                            self._inbox.put((message, arrays))
                    if time.monotonic() - alive_at_s >= ALIVE_EVERY_S:
                        alive_at_s = time.monotonic()
                        # A coordinator that waits for its server does not read, so sends to it must not block.
                        self._links.control.try_send(encode(StageAlive(stage=self._number)))
                        if alive_at_s - heard_s > self._silent_s:
                            log.warning("worker_silent", stage=self._number + 1, seconds=self._silent_s)
                            return
                    if self._leaving is not None:
                        leaving, self._leaving = self._leaving, None
                        self._links.control.send(encode(leaving))
        except LinkClosedError:
            pass
        except Exception as exc:
            self._log(exc)
        finally:
            self._inbox.put(None)
            if isinstance(self._shared, RemoteVectors):
                self._shared.end()

    # --- the thread that computes -----------------------------------------------------------------------------------

    def _take(self, message: AnyMessage, arrays: list[Array]) -> None:
        match message:
            case Forward():
                self._forward(message, arrays)
            case Backward():
                self._backward(message, arrays)
            case StageOrders():
                self._settle(message)
            case _:
                raise ValueError(f"expected Forward, Backward, StageOrders or StopStage, got {type(message).__name__}")

    def _forward(self, message: Forward, arrays: list[Array]) -> None:
        for commit in message.commits:
            self._stage.commit(commit)
        self._use(message)
        payload = Payload.from_message(message, arrays)
        following = self._links.following
        start_s = time.monotonic()
        try:
            output = self._stage.forward(
                message.slot, payload.received, message.num_samples, message.weight, payload.group,
                seed=seed_of(message.seed, self._number),
            )  # fmt: skip
            loss = self._stage.loss(message.slot, *payload[1:]) if following is None else None
            sent = None if following is None else trees.mapped(self._stage.device.get, output)
        except Exception as exc:
            self._report(message, (), _problem(exc))
            if following is not None:
                # The commits and orders in the message are processed even if the minibatch is not computed.
                following.send(encode(rest_of(message)))
            return
        if following is not None and sent is not None:
            self._tasks[message.batch] = [self._task("F", message.batch, start_s)]
            header, arrays = payload._replace(received=sent).to_message(message)
            following.send(encode(header), arrays)
        elif loss is not None:
            first = Backward(
                batch=message.batch, slot=message.slot, num_samples=message.num_samples, loss_sum=loss.loss_sum,
                metric_sums=loss.metric_sums, weight=message.weight,
            )  # fmt: skip
            self._send_back(first, (), [], "FB", start_s)

    def _use(self, message: Forward | StageOrders) -> None:
        if message.version != self._version:
            if isinstance(self._shared, RemoteVectors) and not self._shared.wait_for(message.term, message.version):
                raise LinkClosedError("the links have ended before the weights have come")
            self._stage.adopt(self._shared.pulled, message.included)
            self._version = message.version
            self._links.control.send(encode(Adopted(stage=self._number, version=message.version)))

    def _backward(self, message: Backward, arrays: list[Array]) -> None:
        own = self._tasks.pop(message.batch)
        if message.problem:
            self._report(message, (*own, *message.tasks), message.problem)
        else:
            of_outputs: list[Array | None] = [None] * (max(message.of, default=-1) + 1)
            for place, array in zip(message.of, arrays, strict=True):
                of_outputs[place] = array
            self._send_back(message, of_outputs, own, "B", time.monotonic())

    def _send_back(
        self, message: Backward, of_outputs: Sequence[Array | None], own: list[StageTask], kind: str, start_s: float
    ) -> None:
        """Compute the gradient of this stage, and send it back with the results of the later stages in `message`."""
        try:
            gradient = self._stage.backward(message.slot, of_outputs)
            sent = {at: self._stage.device.get(part) for at, part in enumerate(gradient.of_input) if part is not None}
        except Exception as exc:
            self._report(message, (*own, *message.tasks), _problem(exc))
            return
        whole = msgspec.structs.replace(
            message, squares=message.squares + gradient.squares,
            buffer_squares=message.buffer_squares + gradient.buffer_squares,
            tasks=(*own, self._task(kind, message.batch, start_s), *message.tasks), of=tuple(sent),
        )  # fmt: skip
        self._links.before.send(encode(whole), list(sent.values()))

    def _report(self, message: Forward | Backward, tasks: tuple[StageTask, ...], problem: str) -> None:
        """Report that there is no gradient of this minibatch."""
        self._stage.drop(message.slot)
        self._links.before.send(encode(Backward(
            batch=message.batch, slot=message.slot, num_samples=message.num_samples, problem=problem, tasks=tasks,
        )))  # fmt: skip

    def _settle(self, message: StageOrders) -> None:
        for commit in message.commits:
            self._stage.commit(commit)
        if message.forget_from is not None:
            self._stage.forget(message.forget_from)
            self._version = -1
        if message.version >= 0:
            self._use(message)
        if message.store is not None:
            self._stage.store(message.store, self._shared.pushed)
        if message.show:
            self._stage.show(self._shared.pushed)
        if message.store is not None or message.show:
            self._stage.device.finish()
            self._links.control.send(encode(Stored(stage=self._number, until=message.store)))
        if self._links.following is not None:
            self._links.following.send(encode(message))

    def _task(self, kind: str, batch: int, start_s: float) -> StageTask:
        """Return the task for the work since `start_s`; wait first if the device is slowed down."""
        self._stage.device.finish()
        if self._slowdown > 1:
            time.sleep((self._slowdown - 1) * (time.monotonic() - start_s))
        return StageTask(self._number, kind, batch, start_s, time.monotonic())


def _problem(exc: Exception) -> str:
    """Return the problem of a minibatch, if its samples may be its cause. Raise `exc` if the cause is this machine, or
    an error of the task that does not depend on the samples."""
    if isinstance(exc, MemoryError | OSError | LinkClosedError | TaskError):
        raise exc
    if "allocate memory" in str(exc) or "out of memory" in str(exc):
        raise MemoryError(str(exc)) from exc
    return f"{type(exc).__name__}: {exc}"[:_MAX_REASON_CHARS]
