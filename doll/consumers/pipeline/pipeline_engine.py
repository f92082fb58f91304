"""The `GradientEngine` of a virtual worker: several batches at once go through a pipeline of stages.

One thread carries out the decisions of `doll.pipeline.runtime.virtual_worker`. It reads weights into the file that the
stages share, sends samples to the first stage, judges the returned gradients, and stores the sum of the steps of each
wave.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from doll.config import JobConfig
from doll.consumers.compute.gradient import Gradient, GradientComputer, stored_weights
from doll.consumers.compute.gradient_engine import GoesOn, batch_seed
from doll.consumers.compute.guard import Guard
from doll.consumers.intake.dead_letters import DeadLetters, usable_samples
from doll.consumers.lifecycle.departure import Departure
from doll.consumers.pipeline.remote_stages import RemoteStages
from doll.consumers.pipeline.stage_processes import StageProcesses, failure
from doll.consumers.protocol.worker_core import Batch, ComputedBatch, GradientDone
from doll.errors import StageLostError, TaskError
from doll.model.random_numbers import draw_from
from doll.pipeline.links.frames import DTYPES, LinkFrameError
from doll.pipeline.links.link import LinkClosedError
from doll.pipeline.planner.measured import TaskLog
from doll.pipeline.runtime import messages
from doll.pipeline.runtime import virtual_worker as vw
from doll.process.fault_points import fault_point
from doll.process.platform import WakeUp
from doll.records.control import Grant, NewVersion
from doll.records.refusals import MAX_REASON_CHARS
from doll.storage.blobs import Blobs, gradient_key
from doll.storage.contributions import Compressor
from doll.storage.slice_blobs import put_slices
from doll.task import passes, trees
from doll.task.base import Task
from doll.task.batches import SampleBatch
from doll.telemetry import get_logger

log = get_logger(__name__)

NO_VALUES: Final = np.zeros(0, np.float32)
_FEW_SAMPLES: Final = 16
TICK_S: Final = 0.5
# If this thread itself was paused for so long, the silence of the stages is not their fault.
_PAUSED_S: Final = 2.0
_CLOSED: Final = "the engine is closed"


@dataclass(slots=True, eq=False)
class Flight:
    """One batch, from its submission to its answer."""

    grant: Grant
    batch: Batch
    goes_on: GoesOn
    future: Future[GradientDone | None]
    samples: SampleBatch
    computed: ComputedBatch | None = None
    bad: dict[int, str] | None = None  # None: not inspected
    started_s: float = 0.0


def gradient_of(message: messages.Backward) -> Gradient:
    """Return a gradient without values, because the stages store the values."""
    return Gradient(
        torch.from_numpy(NO_VALUES), message.loss_sum, dict(message.metric_sums), message.weight,
        math.sqrt(message.squares), math.sqrt(message.buffer_squares),
    )  # fmt: skip


def for_link(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return `array` with a type that links can send; if possible, with the type that a worker without stages uses."""
    if (native := array.dtype.newbyteorder("=")) in DTYPES:
        return array.astype(native, copy=False)
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64)


def names_of(members: Sequence[vw.Submission]) -> tuple[tuple[int, int], ...]:
    """Return the (batch, grant id) of each submission, whose token is a `Flight`."""
    return tuple((item.batch, item.token.grant.grant_ids[0]) for item in members)


class PipelineGradientEngine:
    """The `GradientEngine` that uses stages."""

    def __init__(
        self, config: JobConfig, stages: StageProcesses | RemoteStages, *, guard: Guard, computer: GradientComputer,
        compressor: Compressor, blobs: Blobs, dead_letters: DeadLetters, departure: Departure, task_log: TaskLog,
        check: Callable[..., None], task: Task, scope: str = "",
    ) -> None:  # fmt: skip
        """Start the engine. `guard` is the guard of `computer`, which has the undivided model and inspects unusual
        batches. `check` is `check_with_samples` of the task, its model and the stages' layers, called before the first
        batch is learned."""
        pipeline, self._policy = config.worker.pipeline, config.training.policy
        self._wave = self._policy.batches_per_push
        assert pipeline is not None
        self.depth = 2 * self._wave
        self.ended: Future[None] = Future()
        """The future that fails when the stages cannot continue, even if nothing is submitted."""
        self._scope = scope or config.job
        self._seed = config.seed
        self._ttl_s = config.blobs.ttl_s
        self._takes_sum = config.training.reduction == "sum"
        self._clip_norm = math.inf if config.training.clip_norm is None else config.training.clip_norm
        self._stage_timeout_s = pipeline.stage_timeout_s
        self._stages = stages
        self._pulled, self._pushed = stages.shared.pulled.mapped(), stages.shared.pushed.mapped()
        self._task = task
        self._guard = guard
        self._computer = computer
        self._compressor = compressor
        self._blobs = blobs
        self._dead_letters = dead_letters
        self._departure = departure
        self._task_log = task_log
        self._check: Callable[..., None] | None = check  # None: done
        self._core = vw.VirtualWorkerCore(self._wave, self._wave)
        self._flights: dict[int, deque[Flight]] = {}  # by batch; several if it is computed again
        self._in_stages: deque[Flight] = deque()  # sent and not returned
        self._returned: deque[messages.Backward] = deque()  # wait for an inspection
        self._suspect: Flight | None = None
        self._is_inspecting = False
        self._answers: dict[tuple[str, int | None], set[int]] = {}  # stages that have answered, until all have
        self._keys: dict[int, str] = {}  # keys of waves, by the batch after their end
        self._storing: vw.Wave | None = None
        self._rest: tuple[int, Future[GradientDone]] | None = None  # the batch below which it is, and the answer
        self._completed_s = time.monotonic()
        self._heard_s = [time.monotonic()] * len(stages.controls)
        self._calls: deque[tuple[Callable[[], None], Future[Any] | None]] = deque()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._is_closing = False
        self._wake = WakeUp()
        self._thread = threading.Thread(target=self._run, name="pipeline", daemon=True)
        self._thread.start()

    # --- GradientEngine, called from the worker's event loop ----------------------------------------------------------

    def submit(self, grant: Grant, batches: Sequence[Batch], goes_on: GoesOn) -> Future[GradientDone | None]:
        (batch,) = batches
        future: Future[GradientDone | None] = Future()
        samples = SampleBatch(NO_VALUES, NO_VALUES)
        if batch.num_samples:
            samples = batch.data.samples
        # A batch of total weight 0 adds nothing, like a batch without usable samples.
        num_samples = batch.num_samples if samples.total_weight else 0
        flight = Flight(grant, batch, goes_on, future, samples)

        def submit() -> None:
            submitted = vw.Submission(batch.number, grant.term, grant.min_version, num_samples, flight)
            self._flights.setdefault(batch.number, deque()).append(flight)
            weights = vw.Weights(grant.term, grant.version, grant.key, grant.included)
            self._do(self._core.submit(submitted, weights))

        self._call(submit, future)
        return future

    def offer(self, weights: NewVersion) -> None:
        offered = vw.Weights(weights.term, weights.version, weights.key, weights.included)
        self._call(lambda: self._do(self._core.offer(offered)))

    def store_rest(self, until: int) -> Future[GradientDone]:
        future: Future[GradientDone] = Future()

        def close_wave() -> None:
            wave, actions = self._core.close_wave()
            if wave is None:
                future.set_result(GradientDone("", 0, ()))
                return
            self._rest = (wave, future)
            self._do(actions)

        self._call(close_wave, future)
        return future

    def stop(self) -> None:
        self._call(lambda: self._do(self._core.stop()))

    def close(self) -> None:
        with self._lock:
            self._is_closing = True
        self._wake_up()
        self._thread.join(2.0)
        self._stages.close()
        self._task_log.close()

    def _call(self, call: Callable[[], None], future: Future[Any] | None = None) -> None:
        with self._lock:
            error = self._error
            if error is None:
                self._calls.append((call, future))
        if error is None:
            self._wake_up()
        elif future is not None:
            future.set_exception(error)

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.set()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
            self._fail(StageLostError(_CLOSED))
        except BaseException as exc:
            self._fail(exc)
            if not self._is_closing:
                self.ended.set_exception(exc)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = error
            futures = [future for _, future in self._calls]
            self._calls.clear()
        futures += [flight.future for flights in self._flights.values() for flight in flights]
        futures += [None if self._rest is None else self._rest[1]]
        for future in futures:
            if future is not None and not future.done():
                future.set_exception(error)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ, None)
            for number, link in enumerate((*self._stages.controls, self._stages.chain)):
                selector.register(link, selectors.EVENT_READ, number)
            now = time.monotonic()
            while not self._is_closing:
                ready = selector.select(TICK_S)
                before, now = now, time.monotonic()
                if now - before > _PAUSED_S:
                    self._heard_s = [now] * len(self._heard_s)
                for key, _ in ready:
                    if key.data is None:
                        self._wake.clear()
                    else:
                        self._receive(key.data)
                while self._calls:
                    with self._lock:
                        call, _ = self._calls.popleft()
                    call()
                self._inspect_if_due()
                self._check_stages(now)

    def _receive(self, number: int) -> None:
        is_chain = number == len(self._stages.controls)
        link = self._stages.chain if is_chain else self._stages.controls[number]
        try:
            header, _ = link.receive()
        except LinkClosedError as exc:
            raise self._stages.why_closed(0 if is_chain else number) from exc
        message = messages.decode(header)
        if is_chain:
            if not isinstance(message, messages.Backward):
                raise ValueError(f"expected Backward from the first stage, got {type(message).__name__}")
            self._returned.append(message)
            self._judge_returned()
        else:
            self._heard_s[number] = time.monotonic()
            self._hear(message)

    def _check_stages(self, now: float) -> None:
        for number, heard_s in enumerate(self._heard_s):
            if now - heard_s > self._stage_timeout_s:
                raise StageLostError(
                    f"{self._stages.name_of(number)} has been silent for {now - heard_s:.0f} s "
                    "(worker.pipeline.stage_timeout_s): its worker ends with it"
                )

    def _hear(self, message: messages.AnyMessage) -> None:
        match message:
            case messages.Adopted(stage=stage, version=version):
                if self._all_have(stage, "adopted", version):
                    self._do(self._core.adopted(version))
            case messages.Stored(stage=stage, until=until):
                if self._all_have(stage, "stored", until):
                    self._stored(until)
            case messages.Leaving(stage=stage, within_s=within_s, cause=cause):
                log.info("stage_leaves", stage=stage + 1, cause=cause, within_s=within_s)
                self._departure.leave_within(within_s, cause)
            case messages.Failed():
                raise failure(message)
            case _:
                pass

    def _all_have(self, stage: int, what: str, which: int | None) -> bool:
        """Record the answer of this stage, and return whether all stages have answered."""
        have = self._answers.setdefault((what, which), set())
        have.add(stage)
        if len(have) < len(self._stages.controls):
            return False
        del self._answers[what, which]
        return True

    # --- actions ------------------------------------------------------------------------------------------------------

    def _do(self, actions: Sequence[vw.Action]) -> None:
        for action in actions:
            match action:
                case vw.PullWeights(weights):
                    self._pull(weights)
                case vw.StartBatch(message, submitted):
                    flight = submitted.token
                    flight.started_s = time.monotonic()
                    self._in_stages.append(flight)
                    self._send_samples(message, flight)
                case vw.SendDown(message, wave):
                    self._storing = wave or self._storing
                    self._send_down(message, [])
                case vw.Done(submitted, version, wave, members):
                    self._answer(submitted.token, version, wave, names_of(members))
                case vw.Void(submitted):
                    self._resolve(submitted.token, GradientDone("", 0, ()))
                case vw.Missing(submitted):
                    self._resolve(submitted.token, None)

    def _send_samples(self, message: messages.Forward, flight: Flight) -> None:
        """Send a minibatch to the first stage. If the task cannot collate the samples, treat the minibatch as returned
        with this problem."""
        seed = batch_seed(self._seed, flight.batch)
        draw_from(seed)
        try:
            x, y = passes.collated(self._task, flight.samples)
        except Exception as exc:  # the user's collate may raise anything
            problem = f"{type(exc).__name__}: {exc}"[:MAX_REASON_CHARS]
            # The orders in the message are sent without the minibatch.
            rest = messages.rest_of(message)
            self._send_down(rest, [])
            self._returned.append(
                messages.Backward(
                    batch=message.batch, slot=message.slot, num_samples=message.num_samples, problem=problem
                )
            )
            self._call(self._judge_returned)
            return
        payload = messages.Payload(trees.mapped(for_link, x), trees.mapped(for_link, y), *flight.samples[2:])
        header, arrays = payload.to_message(
            msgspec.structs.replace(message, weight=flight.samples.total_weight, seed=seed)
        )
        self._send_down(header, arrays)

    def _send_down(self, message: messages.Forward | messages.StageOrders, arrays: Sequence[npt.NDArray[Any]]) -> None:
        try:
            self._stages.chain.send(messages.encode(message), arrays)
        except LinkClosedError as exc:
            raise self._stages.why_closed(0) from exc
        except LinkFrameError as exc:
            raise TaskError(f"a batch cannot be sent to the first stage: {exc}; set a smaller data.batch_size") from exc

    def _pull(self, weights: vw.Weights) -> None:
        slices = self._computer.slices
        values = stored_weights(self._blobs, weights.key, slices, job=self._scope, version=weights.version)
        if values is not None:
            self._pulled[:] = values  # all stages have read the earlier weights that they needed
            self._stages.deliver(weights.term, weights.version)
        self._do(self._core.pulled(weights, is_there=values is not None))

    def _stored(self, until: int | None) -> None:
        if until is None:
            self._computer.load(self._pushed)
            self._do(self._core.stored(None))
            self._inspect()
            return
        wave = self._storing
        assert wave is not None
        grant = wave.last.token.grant
        is_rest = self._rest is not None and self._rest[0] == until
        key = gradient_key(self._scope, grant.term, grant.grant_ids[0]) + (":rest" if is_rest else "")
        begun_s = time.monotonic()
        slices = self._computer.slices
        blobs = self._compressor.compress_slices(self._pushed, slices, version=wave.version)
        put_slices(self._blobs, slices.keys(key), blobs, self._ttl_s)
        fault_point("worker.after_blob")
        store_s = time.monotonic() - begun_s
        if is_rest and self._rest is not None:
            done = GradientDone(key, wave.version, (), store_s=store_s, holds=names_of(wave.members))
            self._rest[1].set_result(done)
            self._rest = None
        else:
            self._keys[until] = key
        self._do(self._core.pushed(until))

    def _answer(self, flight: Flight, version: int, wave: int | None, holds: tuple[tuple[int, int], ...]) -> None:
        computed = flight.computed or replace(usable_samples(flight.batch), weight=0.0)  # no sample to compute
        is_kept = (flight.batch.number + 1) % self._wave != 0
        key = "" if wave is None else self._keys.pop(wave, "")
        self._resolve(flight, GradientDone(key, version, (computed,), is_kept=is_kept, holds=holds))

    def _resolve(self, flight: Flight, done: GradientDone | None) -> None:
        flights = self._flights[flight.batch.number]
        flights.remove(flight)
        if not flights:
            del self._flights[flight.batch.number]
        flight.future.set_result(done)

    # --- gradients that come back -------------------------------------------------------------------------------------

    def _judge_returned(self) -> None:
        while self._in_stages and self._suspect is None:
            # In order, except a batch that was computed again: it returns after other batches.
            number = self._in_stages[0].batch.number
            at = next((at for at, message in enumerate(self._returned) if message.batch == number), None)
            if at is None:
                return
            message = self._returned[at]
            del self._returned[at]
            flight = self._in_stages.popleft()
            self._task_log.add(message.tasks)
            self._judge(flight, message)

    def _judge(self, flight: Flight, message: messages.Backward) -> None:
        batch = flight.batch
        if not flight.goes_on(batch.number, flight.grant.grant_ids[0]) and not self._departure():
            self._complete(flight, 0.0, 0.0, is_void=True)
            return
        gradient = gradient_of(message)
        problem = message.problem or gradient.problem()
        if flight.bad is None and (problem or self._guard.is_unusual(gradient)):
            self._suspect = flight
            self._core.hold()
            return
        if problem:
            raise TaskError(f"batch {batch.number}: {problem}, and on the undivided model there is no such problem")
        if flight.bad is None:
            self._guard.learned(gradient, flight.samples)
        self._accept(flight, gradient)

    def _accept(self, flight: Flight, gradient: Gradient) -> None:
        if self._check is not None:
            self._computer.load(self._pulled)
            self._check(flight.samples.few(_FEW_SAMPLES), batch=flight.batch.number)
            self._check = None
        scale = 1.0 if self._takes_sum else 1.0 / gradient.weight
        if (norm := scale * gradient.norm) > self._clip_norm:
            scale *= self._clip_norm / norm
        flight.computed = self._computed(flight, gradient)
        self._complete(flight, scale, gradient.weight)

    def _computed(self, flight: Flight, gradient: Gradient | None) -> ComputedBatch:
        batch = flight.batch
        usable = usable_samples(batch)
        if flight.bad:
            usable = self._dead_letters.refuse_samples(batch, flight.bad)
        now = time.monotonic()
        compute_s = now - max(flight.started_s, self._completed_s)  # batches overlap: the time that this batch added
        self._completed_s = now
        version = self._core.version_of(batch.number)
        usable = replace(usable, compute_s=compute_s, version=version, usual=self._guard.usual)
        if gradient is None:
            return replace(usable, weight=0.0)
        return replace(
            usable, loss_sum=gradient.loss_sum, metric_sums=gradient.metric_sums, weight=gradient.weight
        )  # fmt: skip

    def _complete(self, flight: Flight, scale: float, weight: float, *, is_void: bool = False) -> None:
        number = flight.batch.number
        lr_factor = self._policy.share(flight.grant.num_live)
        self._do(self._core.completed(number, scale=scale, weight=weight, lr_factor=lr_factor, is_void=is_void))

    # --- inspection ---------------------------------------------------------------------------------------------------

    def _inspect_if_due(self) -> None:
        """If a batch is suspect and the stages process no other batch, have the stages store their weights, so that the
        undivided model can inspect the batch."""
        all_back = self._suspect is not None and len(self._in_stages) == len(self._returned)
        if all_back and not self._is_inspecting and not self._core.is_storing:
            self._is_inspecting = True
            self._do(self._core.show())

    def _inspect(self) -> None:
        assert self._suspect is not None
        flight = self._suspect
        number = flight.batch.number
        self._suspect, self._is_inspecting = None, False
        if self._core.is_void(number):
            self._complete(flight, 0.0, 0.0, is_void=True)
            self._go_on()
            return
        gradient, bad = self._guard.compute(*flight.samples, seed=batch_seed(self._seed, flight.batch))
        flight.bad = bad
        if gradient is None or not gradient.weight:
            flight.computed = self._computed(flight, gradient)
            self._complete(flight, 0.0, 0.0)
        else:
            # Compute again even if no sample is refused: the returned gradient is of older weights, at which a sample
            # may do harm that the model predicts correctly now, without any gradient.
            left = [at for at in range(flight.samples.num_samples) if at not in bad]
            flight.samples = flight.samples.take(left)
            self._in_stages.appendleft(flight)
            self._send_samples(self._core.again(number, len(left)), flight)
        self._go_on()

    def _go_on(self) -> None:
        self._do(self._core.go_on())
        self._judge_returned()
