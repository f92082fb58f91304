"""Algorithm 2: the gradient of one batch at exactly the given weights, and the cache of the weights in the replica."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from doll.consumers.compute.weights_ahead import Deltas, WeightsAhead
from doll.consumers.protocol.grants import grant_id_of
from doll.errors import BlobError, IllegalEventError, ServiceUnavailableError, TaskError
from doll.model.flat_model import FlatModel
from doll.model.random_numbers import draw_from
from doll.model.slices import Slices
from doll.optim.optimizer import length
from doll.records.control import Grant, HeldOutScore, NewVersion
from doll.storage.blobs import Blobs
from doll.storage.slice_blobs import read_weights
from doll.tables.embedding_tables import norm as norm_of_rows
from doll.tables.rows import Rows, add_in_order
from doll.task import passes, trees
from doll.task.base import Task
from doll.task.batches import SampleBatch
from doll.task.trees import Array, Tree
from doll.telemetry import get_logger

log = get_logger(__name__)

T = TypeVar("T")


class ForwardPasses:
    """The runner of forward pass and loss. Not thread-safe: one thread computes.

    `bf16` uses `torch.autocast`: parameters, gradients and the sum of a set remain float32. A compiled module has the
    same parameters as the module. If the compiled code fails but the module itself succeeds, the process uses no
    compiled code any more.
    """

    def __init__(
        self, module: torch.nn.Module, device: str = "cpu", precision: Literal["float32", "bf16"] = "float32", *,
        compiles: bool = False,
    ) -> None:  # fmt: skip
        self._module = module
        self._device_type = device.partition(":")[0]
        self._precision = precision
        self._compiled: Any = torch.compile(module) if compiles else None

    def run(self, forward: Callable[[torch.nn.Module], T], undo: Callable[[], None]) -> T:
        """Return the result of `forward` for the module; `forward` may be called more than once. `undo` restores the
        state of the module before the pass. This is necessary because compiled code that fails may have changed
        buffers, such as the statistics of batch norm."""
        if self._compiled is not None:
            try:
                with self._context():
                    return forward(self._compiled)
            except Exception as exc:  # from the compiler, its code, or the user's code
                undo()
                with self._context():
                    result = forward(self._module)
                self._compiled = None
                log.warning("not_compiled", error=f"{type(exc).__name__}: {exc}"[:500], hint="worker.compile: false")
                return result
        with self._context():
            return forward(self._module)

    def _context(self) -> AbstractContextManager[Any]:
        if self._precision == "float32":
            return nullcontext()
        return torch.autocast(self._device_type, dtype=torch.bfloat16)


_MAX_SUM: Final = 1e38  # well below the largest float32
_PIECE: Final = 1 << 18  # values; as float64 they fit into a CPU cache
_NONE: Final = (-1, -1)  # (term, version)


class Gradient(NamedTuple):
    """Sums over the samples of one batch, each sample times its weight."""

    # float32, shape (numel,), in the layout of `doll.model.flat_model`, on the model's device. It is the model's own
    # memory: store it before the next `compute`.
    vector: torch.Tensor
    loss_sum: float  # sum of the sample losses at the given weights, before learning from them
    metric_sums: dict[str, float | bytes]  # sums of the task's metrics over the samples, or states
    weight: float  # sum of the samples' weights
    norm: float = 0.0  # norm of the parameters' part and of `rows`; infinite if a value is not finite
    buffer_change: float = 0.0  # norm of the change of the float buffers; infinite as above
    rows: Mapping[str, Rows] = {}  # rows of the tables that were used, by name; their memory is not overwritten
    absent: int = 0  # parameters that no sample has used, see `FlatModel.absent`
    to_host: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu  # see `FlatModel.to_host`

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """The gradient `vector` in the memory of the CPU: a view if `vector` is there already, otherwise a copy, valid
        until the next copy of a gradient."""
        array: npt.NDArray[np.float32] = self.to_host(self.vector).numpy()
        return array

    @property
    def num_values(self) -> int:
        return self.vector.numel() + sum(rows.values.size for rows in self.rows.values())

    def problem(self) -> str:
        """Return the reason why loss, gradient or statistics are not finite; "" if all are finite."""
        if not math.isfinite(self.loss_sum):
            return f"the loss is {self.loss_sum}"
        if not math.isfinite(self.norm):
            return "the gradient is not finite"
        return "" if math.isfinite(self.buffer_change) else "the statistics of normalisation are not finite"


class GradientComputer:
    """The replica of the model at one worker. Not thread-safe: one thread computes.

    Attributes:
        seed: seed of the random numbers of each pass, see `doll.model.random_numbers`. None: no seed.
    """

    seed: int | None = None

    def __init__(self, task: Task, model: FlatModel, passes: ForwardPasses | None = None) -> None:
        self._task = task
        self._model = model
        self._passes = passes or ForwardPasses(model.module)
        self._is_behind = False  # a caller may have changed `weights`, which the model's device does not have yet

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        """The weights of the replica: float32, shape (numel,). The caller may change them between two passes."""
        self._is_behind = True
        array: npt.NDArray[np.float32] = self._model.host.numpy()
        return array

    @property
    def num_values(self) -> int:
        return self._model.host.numel()

    @property
    def slices(self) -> Slices:
        """The slices of the weights that the server's shards publish."""
        return self._model.slices

    def load(self, weights: npt.NDArray[np.float32]) -> None:
        """Copy `weights`, float32, shape (numel,), into the replica. Raise ValueError if the shape differs."""
        self._is_behind = True
        self._model.load_weights(weights)

    def compute(
        self, x: Tree, y: Tree, weight: Array | None = None, group: Array | None = None, *,
        use_running_stats: bool = False,
    ) -> Gradient:  # fmt: skip
        """Return the gradient of the summed loss over n >= 1 samples, as in `doll.task.batches.SampleBatch`.

        The computation does not change the weights of the replica, so a worker may compute several batches at one
        version.

        Args:
            use_running_stats: whether batch norm uses its running statistics, so that samples do not influence each
                other.

        Raises:
            TaskError: the loss has no gradient or is not a valid loss, or a buffer of the model has changed its shape.
        """
        model, batch, flat = self._model, SampleBatch(x, y, weight, group), self._model.flat.detach()
        with self._pass() as buffers:
            model.begin_gradient()
            if model.tables is not None:
                model.tables.reset()
            # One sample has no variance, and torch refuses it: a batch with one usable sample would end
            # the worker. Its normalisation uses the running statistics and does not change them.
            uses_running_stats = use_running_stats or batch.num_samples == 1
            output, loss, inputs = self._forward(batch, buffers, use_running_stats=uses_running_stats)
            if not loss.total.requires_grad:
                raise TaskError(
                    f"{type(self._task).__name__}: expected a loss with a gradient, got one without: compute it from "
                    "the model's output with torch, without detach(), item(), numpy, argmax or torch.no_grad()"
                )
            torch.autograd.backward(loss.total)
            with torch.no_grad():
                metrics = passes.metric_sums(self._task, trees.mapped(torch.Tensor.detach, output), inputs)
            model.restore_buffers()
            absent = model.absent()
            vector, floats = model.grad, slice(model.num_parameters, model.num_floats)
            rows = {} if model.tables is None else model.tables.gradients()
            norm = math.hypot(length(vector[: model.num_parameters]), norm_of_rows(rows))
            buffer_change = length(flat[floats] - buffers[: model.num_buffers]) if model.num_buffers else 0.0
            torch.mul(flat[floats], inputs.total_weight, out=vector[floats])
            vector[model.num_floats :] = flat[model.num_floats :]
            return Gradient(
                vector, loss.value, metrics, inputs.total_weight, norm, buffer_change, rows, absent, model.to_host
            )

    def loss(self, x: Tree, y: Tree, weight: Array | None = None, group: Array | None = None) -> float:
        """Return the mean loss over the samples, computed so that samples do not influence each other."""
        batch = SampleBatch(x, y, weight, group)
        with self._pass() as buffers, torch.no_grad():
            return self._forward(batch, buffers, use_running_stats=True)[1].value / batch.total_weight

    def score(self, samples: SampleBatch, seed: int) -> HeldOutScore | None:
        """Return loss and metrics of samples in evaluation mode; None, after a warning, if the model fails on one of
        them or a number is not finite. Raise TaskError, or BlobError or ServiceUnavailableError for rows of tables."""
        self.seed, problem = seed, "the loss or a metric is not finite"
        try:
            with self._pass() as buffers, torch.no_grad():
                output, loss, inputs = self._forward(samples, buffers, use_running_stats=True, evaluates=True)
                metrics = passes.metric_sums(self._task, output, inputs)
            numbers = [loss.value, *(value for value in metrics.values() if not isinstance(value, bytes))]
            if all(map(math.isfinite, numbers)):
                return HeldOutScore(
                    n_samples=inputs.num_samples, weight=inputs.total_weight, loss_sum=loss.value, metric_sums=metrics
                )
        except (MemoryError, OSError, TaskError, BlobError, ServiceUnavailableError):
            raise
        except Exception as exc:  # the user's code may raise anything
            problem = f"{type(exc).__name__}: {exc}"[:500]
        log.warning("held_out_records_not_scored", samples=samples.num_samples, reason=problem)
        return None

    @contextmanager
    def _pass(self) -> Iterator[torch.Tensor]:
        """Yield a copy of the buffers. At the end of the context, undo the forward passes in it."""
        if self._is_behind and self._model.device != "cpu":
            # The pass waits for this copy on the device. It ends after its loss was read, so after the copy.
            self._model.flat.detach().copy_(self._model.host, non_blocking=True)
        self._is_behind = False
        buffers = self._model.flat.detach()[self._model.num_parameters :].clone()
        try:
            yield buffers
        finally:
            self._undo_pass(buffers)

    def _undo_pass(self, buffers: torch.Tensor) -> None:
        """Restore the buffers to their values before a forward pass, and forget the rows that the pass used."""
        self._model.restore_buffers()
        self._model.flat.detach()[self._model.num_parameters :] = buffers
        if self._model.tables is not None:
            self._model.tables.reset()

    @contextmanager
    def stepped_by(self, gradient: Gradient, rate: float) -> Iterator[None]:
        """Add `rate` times `gradient` to the parameters while the context is open."""
        parameters = slice(self._model.num_parameters)
        before, values = self._model.copied(self.weights[parameters]), gradient.values
        try:
            with ExitStack() as stack:
                if self._model.tables is not None:
                    stack.enter_context(self._model.tables.stepped_by(gradient.rows, rate))
                with np.errstate(over="ignore", invalid="ignore"):
                    for at in range(0, self._model.num_parameters, _PIECE):
                        part = slice(at, min(at + _PIECE, self._model.num_parameters))
                        step = rate * values[part].astype(np.float64)
                        self.weights[part] += step.astype(np.float32)
                yield
        finally:
            self.weights[parameters] = before

    def kept(self, gradient: Gradient) -> Gradient:
        """Return `gradient` with a copy of its values, because the next gradient overwrites the model's memory."""
        kept = torch.from_numpy(self._model.copied(gradient.values))
        return gradient._replace(vector=kept, to_host=torch.Tensor.cpu)

    def new_sum(self) -> GradientSum:
        return GradientSum(self._model.num_parameters, self._model.num_floats, self._model.to_host)

    @property
    def num_buffers(self) -> int:
        return self._model.num_buffers

    def buffers(self, gradient: Gradient) -> npt.NDArray[np.float64]:
        """Return the float buffers after the gradient's batch, shape (num_buffers,)."""
        return gradient.values[self._model.num_parameters : self._model.num_floats].astype(np.float64) / gradient.weight

    @contextmanager
    def buffers_changed_by(self, change: npt.NDArray[np.float64]) -> Iterator[None]:
        """Add `change`, shape (num_buffers,), to the float buffers while the context is open."""
        floats = slice(self._model.num_parameters, self._model.num_floats)
        before = self.weights[floats].copy()
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                self.weights[floats] = (before + change).astype(np.float32)
            yield
        finally:
            self.weights[floats] = before

    def _forward(
        self, batch: SampleBatch, buffers: torch.Tensor, *, use_running_stats: bool, evaluates: bool = False
    ) -> tuple[Any, passes.Loss, passes.Inputs]:  # fmt: skip
        """Return the output, the loss and the task's inputs. `buffers` is a copy of the buffers before the pass."""
        if self.seed is not None:
            draw_from(self.seed, self._model.device)
        self._model.module.train(not evaluates)
        if use_running_stats:
            self._model.use_running_stats()
        inputs = passes.inputs_of(self._task, batch)
        if (device := self._model.device) != "cpu":
            inputs = inputs.moved(lambda tensor: tensor.to(device, non_blocking=True))

        def run(module: torch.nn.Module) -> tuple[Any, passes.Loss]:
            output = passes.forward(self._task, module, inputs)
            return output, passes.loss(self._task, output, inputs)

        return *self._passes.run(run, partial(self._undo_pass, buffers)), inputs


class GradientSum:
    """A `SetContribution`: the gradients of one set of batches, added in float32 in the order of the batches.

    A single gradient is not copied. Buffers that are not floats have the values of the last gradient. Not thread-safe.
    """

    def __init__(
        self, num_parameters: int, num_floats: int, to_host: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu
    ) -> None:
        """Create a sum. `num_floats` is the number of parameters and float buffers. The values after these are buffers
        that are not floats. `to_host`: see `FlatModel.to_host`."""
        self._to_host = to_host
        self._num_parameters = num_parameters
        self._num_floats = num_floats
        self._memory: torch.Tensor | None = None  # the sum; allocated when a set has two gradients
        self._is_kept = False  # `_memory` holds the gradients before `_last`
        self._last: torch.Tensor | None = None
        self._bound = 0.0  # upper bound of the values of the sum
        self.absent = 0
        self._rows: dict[str, list[Rows]] = {}
        self._grant: Grant | None = None
        self._holds: list[tuple[int, int]] = []

    @property
    def holds_back(self) -> bool:
        return False

    @property
    def holds(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._holds)

    def rest(self, until: int) -> None:
        self._holds = []  # each push has the complete gradients of its batches

    def rest_stored(self) -> None:
        pass

    def begin(self, grant: Grant) -> bool:
        self._is_kept, self._last, self._bound = False, None, 0.0
        self._rows = {}
        self._grant, self._holds = grant, []
        return True

    def add(self, gradient: Gradient, *, batch: int) -> bool:
        """Add a gradient. Return False if float32 may not be able to represent the sum."""
        self._expect_later(batch)
        floats = gradient.vector[self._num_parameters : self._num_floats]
        bound = self._bound + max(gradient.norm, float(floats.abs().max()) if len(floats) else 0.0)
        if (self._is_kept or self._last is not None) and not bound < _MAX_SUM:
            return False
        self.keep()
        self.absent = gradient.absent if self._last is None and not self._is_kept else self.absent & gradient.absent
        self._last, self._bound = gradient.vector, bound
        for name, rows in gradient.rows.items():
            self._rows.setdefault(name, []).append(rows)
        self._holds.append((batch, grant_id_of(self._grant, batch)))
        return True

    def skip(self, batch: int) -> None:
        self._expect_later(batch)
        self._holds.append((batch, grant_id_of(self._grant, batch)))

    def _expect_later(self, batch: int) -> None:
        if self._holds and batch <= self._holds[-1][0]:
            raise IllegalEventError(f"expected a batch after {self._holds[-1][0]}, got {batch}")

    def keep(self) -> None:
        """Copy the gradient of the last `add`."""
        vector, floats = self._last, self._num_floats
        if vector is None:
            return
        if self._memory is None:
            self._memory = torch.empty_like(vector)
        if self._is_kept:
            vector = vector.to(self._memory.device)  # a gradient that the guard has kept is in the machine's memory
            self._memory[:floats] += vector[:floats]
            self._memory[floats:] = vector[floats:]
        else:
            self._memory.copy_(vector)
        self._is_kept, self._last = True, None

    def values(self) -> npt.NDArray[np.float32] | None:
        """Return the sum on the CPU. The result is the memory of this object or of a single gradient if that memory is
        on the CPU, otherwise a copy, valid until the next copy of a gradient."""
        if self._is_kept:
            self.keep()
        vector = self._memory if self._is_kept else self._last
        return None if vector is None else self._to_host(vector).numpy()

    def rows(self) -> Mapping[str, Rows]:
        return {name: add_in_order(pieces) for name, pieces in self._rows.items()}


def stored_weights(
    blobs: Blobs, key: str, slices: Slices, *, job: str, version: int
) -> npt.NDArray[np.float32] | None:  # fmt: skip
    """Return the weights under `key`, shape (numel,), perhaps as a view. Return None if some of them are missing."""
    try:
        return read_weights(blobs, key, slices, job=job, version=version)
    except BlobError as exc:
        log.warning("weights_refused", key=key, reason=str(exc))
        return None


class LocalModel(Protocol):
    """Port: the weights in one worker's replica. Some policies require one exact version. Other policies allow the
    newest version and older versions down to a minimum. A worker that makes its own steps adds these steps to the
    weights (docs/decisions/0020).

    Not thread-safe, except `offer`: the thread that computes owns the object.
    """

    def offer(self, weights: NewVersion) -> None:
        """Record that the server has published these weights. `load` then does not keep older weights."""

    @property
    def delta_bytes(self) -> int:
        """The bytes of deltas that the last read used instead of the complete weights; 0 if it used none."""

    def load(self, grant: Grant) -> int | None:
        """Load weights that `grant` allows into the replica, and return their version. Return None if the blob store
        does not contain all of the weights. Raise ServiceUnavailableError if the store is unreachable and the worker
        must stop waiting for the store."""


class ReplicaState(NamedTuple):
    """The state of the replica after a refresh."""

    version: int
    is_new: bool = False  # the version was fetched, and the replica contains nothing else
    included: int = 0  # number of this worker's batches in the fetched version


class CachedVersion:
    """A `LocalModel` that keeps the last fetched version while grants allow it and no newer version was offered."""

    def __init__(
        self, job: str, blobs: Blobs, computer: GradientComputer, background: Executor | None = None,
        deltas: Deltas | None = None,
    ) -> None:  # fmt: skip
        """Create the model. `background` is an executor with one thread, which reads offered versions in advance. None:
        offered versions are read when the next batch begins. `deltas` reads the changes of the weights, if the server
        publishes changes. None: the complete weights are read."""
        self._deltas = deltas
        self._ahead = None if background is None else WeightsAhead(self._stored, background)
        self._job = job
        self._blobs = blobs
        self._computer = computer
        self._cached = _NONE  # (term, version) in the replica
        self.delta_bytes = 0  # see `LocalModel.delta_bytes`
        self._offered: NewVersion | None = None  # the newest offered version; set by another thread

    def offer(self, weights: NewVersion) -> None:
        before = self._offered
        if before is None or (before.term, before.version) < (weights.term, weights.version):
            self._offered = weights
            if self._ahead is not None and self._cached < (weights.term, weights.version):
                self._ahead.offer(weights)

    def load(self, grant: Grant) -> int | None:
        refreshed = self.refresh(grant)
        return None if refreshed is None else refreshed.version

    def forget(self) -> None:
        """Forget the fetched version, because the replica has changed. The next `refresh` fetches the weights again."""
        self._cached = _NONE

    def refresh(self, grant: Grant) -> ReplicaState | None:
        """Load the newest weights that the worker knows. Older weights never replace newer weights in the replica."""
        offered = self._offered if self._offered is not None and self._offered.term == grant.term else None
        has, version = self._cached[0] == grant.term, self._cached[1]
        sources: list[Grant | NewVersion] = [grant]
        if offered is not None and offered.version > grant.version:
            sources.insert(0, offered)
        is_allowed = has and grant.min_version <= version <= sources[0].version
        if is_allowed and (offered is None or offered.version <= version):
            return ReplicaState(version)
        for source in sources:
            if is_allowed and source.version <= version:
                break
            if self._read(source):
                self._cached = (source.term, source.version)
                return ReplicaState(source.version, is_new=True, included=source.included)
        return ReplicaState(version) if is_allowed else None

    def _read(self, source: Grant | NewVersion) -> bool:
        weights = None if self._deltas is None else self._deltas.read(source)
        self.delta_bytes = 0 if self._deltas is None or weights is None else self._deltas.num_bytes
        if weights is None:
            weights = None if self._ahead is None else self._ahead.take(source)
            weights = self._stored(source) if weights is None else weights
            if weights is not None and self._deltas is not None:
                self._deltas.keep(weights, source)
        if weights is None:
            return False
        self._cached = _NONE
        self._computer.load(weights)
        return True

    def _stored(self, source: Grant | NewVersion) -> npt.NDArray[np.float32] | None:
        slices = self._computer.slices
        return stored_weights(self._blobs, source.key, slices, job=self._job, version=source.version)
