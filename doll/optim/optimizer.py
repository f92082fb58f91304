"""The port (interface) `Updater`, which computes the next weights from contributions, and its adapters. One makes a
step with the sum of gradients, as torch does; others use steps of workers (docs/decisions/0020, 0034).

To add a built-in optimizer, add its section in `doll.config.training`, a case in `Optimizer._step`, and one in
`doll.optim.row_optimizer` for the rows of tables (CONTRIBUTING.md has all places). The results are the same as with
torch's SGD, Adam and Adagrad, bit for bit (a test compares them), with as few passes over memory as possible. Unlike
torch's Adagrad, Adagrad may have momentum. Adam and Adagrad use torch's functions, called on slices that stay in the
processor's cache. Torch's own classes (`doll.optim.torch_optimizer`) import torch's compiler, which takes 5 s of CPU at
each start (ADR 82).
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt
import torch
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam

from doll.config import AdagradConfig, AdamConfig, OptimizerConfig, SchedulePart, SgdConfig, TorchConfig
from doll.config.policy import OuterStep
from doll.errors import CheckpointError, TaskError
from doll.model.slices import BLOCK, Slice
from doll.optim.named_classes import packed, unpacked
from doll.optim.schedule import GroupValues, Rates, Schedule

WEIGHTS: Final = "weights"
AVERAGE: Final = "average"
STATE: Final = "optimizer."
VALUES: Final = "optimizer.values"  # state of a schedule or a class, except tensors
_ADAM_EPSILON = 1e-8
_ADAGRAD_EPSILON = 1e-10
SLICED: Final = (
    WEIGHTS, AVERAGE, *(f"{STATE}{part}" for part in ("exp_avg", "exp_avg_sq", "sum", "momentum_buffer")),
)  # fmt: skip
"""The tensors of a checkpoint with a number for each weight or parameter. A shard has a slice of them, and the others
whole."""
SQUARES: Final = ("exp_avg_sq", "sum")  # parts of the state; if a number in them is infinite, its later steps are 0
# The sum is multiplied by this factor, so that the sum of many finite numbers is finite if their mean is. The factor is
# a power of two, so the sum has the same bits as without it, except for numbers below 1e-33.
_SUM_FACTOR = 2.0**-16

# The contribution of one set of batches to an update, float32, shape (numel,), with the layout of
# `doll.model.flat_model`: the sum of the gradients of the set's samples, each times its weight, or the sum of the
# worker's steps. Float buffers are values times weights.
Contribution: TypeAlias = npt.NDArray[np.float32]


class DivergedError(TaskError):
    """The model has diverged: a gradient or a weight is not finite. A checkpoint of the model would be useless."""


class _ParameterRun(NamedTuple):
    """The parameters with indices from `first` to `until` - 1. `numbers`: their slice of the vector."""

    first: int
    until: int
    numbers: slice


class FlatVector(Protocol):
    """The vector of a model (`FlatModel`), or one shard's slice of it (`ModelSlice`)."""

    @property
    def flat(self) -> torch.Tensor: ...
    @property
    def host(self) -> torch.Tensor: ...
    @property
    def num_parameters(self) -> int: ...
    @property
    def num_floats(self) -> int: ...
    @property
    def ends_of_parameters(self) -> Sequence[int]: ...
    def load_weights(self, weights: npt.NDArray[np.float32]) -> None: ...


class Updater(ABC):
    """The weights of a model as one vector, and the sum of contributions to its next version. Not thread-safe.

    Attributes:
        clipped_by: factor, at most 1, by which the last `apply` clipped its contributions, including those to tables.
        num_parameters: number of parameters, which are the first weights of the vector.
        squares_of_all: function that returns the squared norms of the blocks of all shards, in order, for those of this
            shard. If the model has no shards, they are the same.
    """

    clipped_by = 1.0
    squares_of_all: Callable[[list[float]], list[float]] = staticmethod(lambda squares: squares)
    metric: str | None = None  # name of the metric that the learning rate depends on
    _factor: float = 1.0  # factor of each contribution in the sum

    def __init__(self, model: FlatVector, sum_in: torch.Tensor | None = None, ema: float | None = None) -> None:
        """
        Args:
            sum_in: memory for the sum, as long as the weights; None: the updater allocates it.
            ema: decay of the moving average of the weights; None: there is no average.
        """
        self._model = model
        self._own = self._flat = model.host  # `_flat` has the weights, in the updater's own memory or in given memory
        self.num_parameters = model.num_parameters
        self._sum = torch.zeros_like(self._own) if sum_in is None else sum_in
        self._sum_is_empty = True
        self._ema = ema
        self._average = None if ema is None else self._own.clone()

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        """The weights, float32, shape (numel,), with the layout of `doll.model.flat_model`; a view of the tensor."""
        array: npt.NDArray[np.float32] = self._flat.numpy()
        return array

    def weight(self, set_weight: float, age: int) -> float:
        """Return the factor of a contribution's parameters in the sum. `set_weight`: sum of the weights of its samples.
        `age`: number of updates since the version of the weights that it was computed on."""
        return 1.0

    def add(self, contribution: Contribution | torch.Tensor) -> None:
        """Add `contribution` to the next `apply`, after earlier ones. The array is not used after the call."""
        tensor, floats = tensor_of(contribution), self._model.num_floats
        if self._sum_is_empty:
            torch.mul(tensor[:floats], self._factor, out=self._sum[:floats])
            self._sum_is_empty = False
        else:
            self._sum[:floats].add_(tensor[:floats], alpha=self._factor)
        if len(tensor) > floats:
            self._sum[floats:] = tensor[floats:]

    def max_change(self, contribution: Contribution) -> float:
        """Return the largest change of one parameter by `contribution`, before `scale`; inf if a change is not finite.

        The result is 0 for a gradient, which does not change the weights by itself.
        """
        return 0.0

    def apply(
        self,
        contributions: Sequence[Contribution | torch.Tensor],
        scale: float,
        weight: float,
        into: npt.NDArray[np.float32] | None = None,
        absent: int = 0,
        lr_factor: float = 1.0,
        ema_factor: float = 1.0,
    ) -> None:
        """Compute the next weights from the added contributions and then `contributions`, in this order.

        Without contributions, the weights stay the same. The result depends only on the weights, the state, and the
        contributions in their order. It is the same bit for bit in a replay, whenever the contributions were added.

        Args:
            scale: factor for the sum; 1 / weight gives the mean of gradients.
            weight: sum of the weights of all contributions' samples, at least 0.
            into: memory for the new weights, float32, shape (numel,). From now on, `weights` returns it. The array with
                the earlier weights is not changed (unless it is `into`) and not used any more. None: the updater's own
                memory is used, in place if possible.
            absent: bit mask of parameters that no sample of the contributions has used, see `FlatModel.absent`. An
                optimizer does not change them or their state, as torch does if `.grad` is None.
            lr_factor: factor of the learning rate of an optimizer's step. An updater without one takes only 1.
            ema_factor: factor of 1 - decay of the moving average.

        Raises:
            DivergedError: a number of the sum, of the weights or of the state is not finite. Then the object must not
                be used any more.
        """
        for contribution in contributions:
            self.add(contribution)
        if self._sum_is_empty:
            return  # the update has only refused records, so only the version changes
        self._sum_is_empty = True
        target = self._own if into is None else torch.from_numpy(into)
        self._apply_sum(scale, weight, target, absent, lr_factor)
        if self._average is not None and self._ema is not None:
            n = self.num_parameters
            self._average[:n].lerp_(self._flat[:n], min(1.0, (1 - self._ema) * ema_factor))
            self._average[n:] = self._flat[n:]

    def measure(self, total: float, weight: float) -> None:  # noqa: B027
        """Take `metric` of the samples of the next `apply`: its weighted sum, and the sum of their weights."""

    @abstractmethod
    def _apply_sum(self, scale: float, weight: float, target: torch.Tensor, absent: int, lr_factor: float) -> None:
        """Compute the next weights from `_sum` into `target`, which becomes `_flat`. `absent`: see `apply`."""

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Return the weights and the state by name, for a checkpoint; `load` accepts them.

        The arrays are copies, except weights in memory that was given to `apply`. The owner must not change that memory
        while the result is used.
        """
        tensors = {WEIGHTS: self.weights.copy() if self._flat is self._own else self.weights}
        return tensors if self._average is None else tensors | {AVERAGE: self._average.numpy().copy()}

    def load(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Continue from a checkpoint's tensors. Raise CheckpointError if the weights are missing, or of another
        shape."""
        weights = tensors.get(WEIGHTS)
        try:
            if weights is None:
                raise ValueError(f"expected weights of shape {tuple(self._model.flat.shape)}, got nothing")
            self._model.load_weights(weights)
        except ValueError as exc:
            raise CheckpointError(str(exc)) from exc
        self._flat = self._own
        if self._average is not None:  # without an average in the checkpoint, it begins with the weights
            self._average[:] = torch.from_numpy(np.array(tensors.get(AVERAGE, weights)))


class Optimizer(Updater):
    """An `Updater` of gradients, summed in float32: one step of torch's optimizer with `scale` times their sum.

    The caller's `scale` selects the mean of the samples' gradients (default) or the paper's sum (docs/theory.md, D2).
    """

    _factor = _SUM_FACTOR

    def __init__(
        self, model: FlatVector, config: OptimizerConfig, clip_norm: float | None = None, *,
        clip_value: float | None = None, schedule: Sequence[SchedulePart] = (), by_version: bool = False,
        ema: float | None = None, norm_of_tables: Callable[[], float] = lambda: 0.0,
        sum_in: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            clip_norm: maximum norm of the gradient of a step, after `scale`; None: no limit.
            clip_value: maximum absolute value of one number of the gradient; None: no limit.
            schedule: parts of the schedule of the learning rate.
            by_version: True: only `go_to` advances the schedule. False: each `apply` advances it.
            ema: see `Updater`.
            norm_of_tables: function that returns the norm, before `scale`, of the contributions to tables, which are
                clipped together with the other gradients.
            sum_in: memory for the sum, float32, as long as the weights. No other code uses it between `add` and
                `apply`. None: the optimizer allocates it.

        Raises:
            ConfigError: `schedule` cannot be made.
        """
        super().__init__(model, sum_in, ema)
        self._config = config
        self._clip_norm, self._clip_value = clip_norm, clip_value
        self._norm_of_tables = norm_of_tables
        self._state: dict[str, torch.Tensor] = {}  # with the names of torch's optimizer classes
        self._by_version = by_version
        self._schedule = self._make_schedule(schedule)

    def _make_schedule(self, parts: Sequence[SchedulePart]) -> Schedule | None:
        if not parts or isinstance(self._config, TorchConfig):
            return None
        self._rates = Rates(self._config)
        self._groups = GroupValues(self._rates)
        return Schedule(parts, self._rates, self._groups)

    @property
    def metric(self) -> str | None:  # type: ignore[override]
        return None if self._schedule is None else self._schedule.metric

    def measure(self, total: float, weight: float) -> None:
        if self._schedule is not None:
            self._schedule.measure(total, weight)

    def go_to(self, version: int) -> None:
        """Set the learning rate of the update after `version`, if there is a schedule by version."""
        if self._schedule is not None and self._by_version:
            self._schedule.go_to(version)

    def _apply_sum(self, scale: float, weight: float, target: torch.Tensor, absent: int, lr_factor: float) -> None:
        total, n, floats = self._sum, self.num_parameters, self._model.num_floats
        factor = scale / _SUM_FACTOR
        if self._clip_norm is not None or self._clip_value is not None:
            total[:n] *= factor
            factor = self._clip(total[:n], scale * self._norm_of_tables())
        self._step(total[:n], factor, target[:n], absent, lr_factor)
        total[n:floats] /= (weight or 1.0) * _SUM_FACTOR
        target[n:] = total[n:]
        self._flat = target
        # If a number of the gradient was not finite, a number of the weights is not finite now.
        if not is_finite(target[:floats]):
            where = "after the step the weights are" if is_finite(total[:floats]) else "the gradient is"
            raise diverged(where)
        if not all(map(is_finite, self._squares())):
            raise diverged("after the step the optimizer's state is")
        if self._schedule is not None and not self._by_version:
            self._schedule.step()

    def _squares(self) -> Iterable[torch.Tensor]:
        """Return the parts of the state that are sums or means of squares."""
        return (self._state[key] for key in SQUARES if key in self._state)

    def _clip(self, gradient: torch.Tensor, further: float) -> float:
        """Clip by value, and return the factor that clips by norm. `further`: norm of further gradients."""
        if self._clip_value is not None:
            expect_finite(gradient)
            gradient.clamp_(-self._clip_value, self._clip_value)
        if self._clip_norm is not None:
            squares = [_norm(gradient[part]) ** 2 for part in _blocks(slice(0, len(gradient)))]
            norm = math.sqrt(sum(self.squares_of_all(squares)) + further**2)
            self.clipped_by = self._clip_norm / norm if norm > self._clip_norm else 1.0
        return self.clipped_by

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        return super().tensors() | self._state_tensors()

    def _state_tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Return copies of the state's tensors, and the encoded plain state."""
        tensors = {f"{STATE}{key}": value.numpy().copy() for key, value in self._state.items()}
        if self._schedule is not None:
            tensors[VALUES] = packed({"groups": self._groups.changed(), "schedule": self._schedule.state()})
        return tensors

    def load(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        super().load(tensors)
        self._load_state(tensors)

    def _load_state(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Continue from a result of `_state_tensors`; `tensors` may contain other tensors, too."""
        self._state = {
            key.removeprefix(STATE): torch.from_numpy(np.array(value))
            for key, value in tensors.items()
            if key.startswith(STATE) and key != VALUES
        }
        if self._schedule is not None and (values := unpacked(tensors.get(VALUES))):
            self._groups.restore(values["groups"])
            self._schedule.load(values["schedule"])

    def _step(self, gradient: torch.Tensor, factor: float, target: torch.Tensor, absent: int, lr_factor: float) -> None:
        """Make one step with `factor` times `gradient`, float32, shape (num_parameters,), which may be changed."""
        before = self._flat[: self.num_parameters]
        config, runs = self._config_now(lr_factor), self._runs(absent)
        if absent and target.data_ptr() != before.data_ptr():
            target.copy_(before)
        match config:
            case SgdConfig():
                self._sgd(config, gradient, factor, before, target, runs)
            case AdamConfig():
                self._adam(config, gradient, factor, before, target, runs)
            case AdagradConfig():
                self._adagrad(config, gradient, factor, before, target, runs)
            case TorchConfig():
                raise TypeError("expected a TorchOptimizer for a class")
            case unknown:
                assert_never(unknown)

    def _config_now(self, lr_factor: float) -> OptimizerConfig:
        """Return the settings with the current rates of the schedule, and `lr_factor` times the learning rate."""
        config = self._config
        if isinstance(config, TorchConfig):
            return config
        if self._schedule is not None:
            config = self._rates.applied_to(config)
        return config if lr_factor == 1 else config.model_copy(update={"lr": config.lr * lr_factor})

    def _runs(self, absent: int) -> list[_ParameterRun]:
        """Return runs of parameters that have a gradient; neighbours with the same number of steps form one run."""
        ends, steps = self._model.ends_of_parameters, self._state.get("step")
        if absent and isinstance(self._config, AdamConfig) and (steps is None or not steps.ndim):
            steps = self._state["step"] = torch.zeros(len(ends)) + (0.0 if steps is None else steps)
        counts = [0.0] * len(ends) if steps is None or not steps.ndim else steps.tolist()
        if not absent and (steps is None or not steps.ndim):
            return [_ParameterRun(0, len(ends), slice(0, self.num_parameters))]
        runs: list[_ParameterRun] = []
        begin = 0
        for place, end in enumerate(ends):
            if not absent >> place & 1:
                first, start = place, begin
                if runs and runs[-1].until == place and counts[runs[-1].first] == counts[place]:
                    first, _, numbers = runs.pop()
                    start = numbers.start
                runs.append(_ParameterRun(first, place + 1, slice(start, end)))
            begin = end
        return runs

    def _sgd(
        self, config: SgdConfig, gradients: torch.Tensor, factor: float, before: torch.Tensor, target: torch.Tensor,
        runs: Sequence[_ParameterRun],
    ) -> None:  # fmt: skip
        # A factor that is a power of two commutes with rounding, so it needs no pass. Others are applied as in torch.
        is_power_of_two = math.frexp(factor)[0] == 0.5
        scales_first = not is_power_of_two or config.weight_decay or (config.momentum and config.nesterov)
        if config.momentum and "momentum_buffer" not in self._state:
            self._state["momentum_buffer"] = torch.zeros_like(gradients)
        for *_, run in runs:
            gradient, scale = gradients[run], factor
            if scales_first:
                gradient *= factor
                scale = 1.0
            if config.weight_decay:
                gradient.add_(before[run], alpha=config.weight_decay)
            if config.momentum:
                buffer = self._state["momentum_buffer"][run].mul_(config.momentum).add_(gradient, alpha=scale)
                gradient, scale = (gradient.add_(buffer, alpha=config.momentum) if config.nesterov else buffer), 1.0
            torch.add(before[run], gradient, alpha=-config.lr * scale, out=target[run])

    def _adam(
        self, config: AdamConfig, gradient: torch.Tensor, factor: float, before: torch.Tensor, target: torch.Tensor,
        runs: Sequence[_ParameterRun],
    ) -> None:  # fmt: skip
        state = self._state
        if "exp_avg" not in state:
            state.setdefault("step", torch.tensor(0.0))
            state["exp_avg"] = torch.zeros_like(gradient)
            state["exp_avg_sq"] = torch.zeros_like(gradient)
        steps = state["step"]  # one number for all parameters, or one for each after some had no gradient
        for first, until, run in runs:
            step = steps[first] if steps.ndim else steps
            for part in _copied_blocks(run, before, target):
                adam(
                    [target[part]], [gradient[part].mul_(factor)], [state["exp_avg"][part]],
                    [state["exp_avg_sq"][part]], [], [step.clone()], foreach=False, amsgrad=False, beta1=config.beta1,
                    beta2=config.beta2, lr=config.lr, weight_decay=config.weight_decay, eps=_ADAM_EPSILON,
                    maximize=False,
                )  # fmt: skip
            if steps.ndim:
                steps[first:until] += 1
        if not steps.ndim:
            steps += 1

    def _adagrad(
        self, config: AdagradConfig, gradient: torch.Tensor, factor: float, before: torch.Tensor, target: torch.Tensor,
        runs: Sequence[_ParameterRun],
    ) -> None:  # fmt: skip
        state = self._state
        if not state:
            state["step"] = torch.tensor(0.0)
            state["sum"] = torch.full_like(gradient, config.initial_accumulator)
            if config.momentum:
                state["momentum_buffer"] = torch.zeros_like(gradient)
        for part in (part for *_, run in runs for part in _copied_blocks(run, before, target)):
            if config.momentum:
                self._adagrad_with_momentum(config, gradient[part].mul_(factor), target[part], part)
                continue
            adagrad(
                [target[part]], [gradient[part].mul_(factor)], [state["sum"][part]], [state["step"].clone()],
                foreach=False, lr=config.lr, weight_decay=config.weight_decay, lr_decay=0.0, eps=_ADAGRAD_EPSILON,
                maximize=False,
            )  # fmt: skip
        state["step"] += 1

    def _adagrad_with_momentum(
        self, config: AdagradConfig, gradient: torch.Tensor, weights: torch.Tensor, part: slice
    ) -> None:
        """Make an Adagrad step with momentum, which torch does not have. The momentum is taken of the steps, whose
        norms are similar; momentum of the gradients would keep the long gradients of the first batches."""
        if config.weight_decay:
            gradient.add_(weights, alpha=config.weight_decay)
        total = self._state["sum"][part].addcmul_(gradient, gradient)
        step = gradient.div_(total.sqrt().add_(_ADAGRAD_EPSILON))
        buffer = self._state["momentum_buffer"][part].mul_(config.momentum).add_(step)
        weights.add_(buffer, alpha=-config.lr)


class OuterOptimizer(Optimizer):
    """An `Updater` whose contributions are changes of the weights by several local steps of a worker.

    It makes one step of SGD with Nesterov momentum. The gradient is the negative mean of the changes, weighted by their
    samples (Douillard et al., DiLoCo, arXiv 2311.08105). If the weights that a change was computed on are `age` updates
    old, the change has the factor `age_discount ** age`. The sum is divided by all samples, so a late change has less
    effect.
    """

    def __init__(self, model: FlatVector, step: OuterStep, ema: float | None = None) -> None:
        config = SgdConfig(lr=step.lr, momentum=step.momentum, nesterov=step.momentum > 0)
        super().__init__(model, config, ema=ema)
        self._age_discount = step.age_discount

    def weight(self, set_weight: float, age: int) -> float:
        return -set_weight * self._age_discount**age


class StepAdder(Updater):
    """An `Updater` whose contributions are steps that each worker's optimizer made from its batches. They are added
    without a change.

    A contribution has float buffers as values times weights, as with gradients, and `apply` takes their mean. Other
    buffers are copied from the last contribution.
    """

    def max_change(self, contribution: Contribution) -> float:
        parameters = contribution[: self.num_parameters]
        largest = float(max(parameters.max(initial=0.0), -parameters.min(initial=0.0)))
        return largest if math.isfinite(largest) else math.inf

    def _apply_sum(self, scale: float, weight: float, target: torch.Tensor, absent: int, lr_factor: float) -> None:
        if lr_factor != 1:
            raise ValueError(f"expected a factor of the learning rate of 1, because steps are added, got {lr_factor}")
        total, n, floats = self._sum, self.num_parameters, self._model.num_floats
        torch.add(self._flat[:n], total[:n], alpha=scale, out=target[:n])
        if weight > 0:
            total[n:floats] /= weight
            target[n:] = total[n:]
        elif target is not self._flat:
            target[n:] = self._flat[n:]
        self._flat = target
        if not is_finite(target[:floats]):
            raise diverged("after the steps the weights are" if is_finite(total[:floats]) else "a worker's step is")


def slice_of_tensors(tensors: Mapping[str, npt.NDArray[Any]], part: Slice) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of one shard from those of a whole model (`Updater.tensors`)."""
    vectors = {name: part.begin + (part.size if name in (WEIGHTS, AVERAGE) else part.num_parameters) for name in SLICED}
    return {
        name: tensor[part.begin : vectors[name]] if name in vectors and tensor.ndim else tensor
        for name, tensor in tensors.items()
    }


def is_finite(vector: torch.Tensor) -> bool:
    # A NaN or infinity makes the sum not finite. A sum of large numbers may also overflow, so then check each number.
    return math.isfinite(vector.sum().item()) or bool(torch.isfinite(vector).all())


def expect_finite(gradient: torch.Tensor) -> None:
    """Raise DivergedError if a number is not finite."""
    if not is_finite(gradient):
        raise diverged("the gradient is")


def diverged(what: str) -> DivergedError:
    return DivergedError(
        f"{what} not finite (NaN or infinity): expected a model that converges; lower training.optimizer.lr, set "
        "training.clip_norm, or look for extreme values in the stream; the last checkpoint is intact"
    )


def _norm(vector: torch.Tensor) -> float:
    norm = float(torch.linalg.vector_norm(vector))
    if 1e-15 < norm < math.inf:
        return norm
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))  # for squares beyond the range of float32


def _blocks(run: slice) -> Iterator[slice]:
    return (slice(begin, min(begin + BLOCK, run.stop)) for begin in range(run.start, run.stop, BLOCK))


def _copied_blocks(run: slice, before: torch.Tensor, target: torch.Tensor) -> Iterator[slice]:
    """Yield the blocks of `run`, each after its weights were copied to `target`."""
    for part in _blocks(run):
        if target.data_ptr() != before.data_ptr():
            target[part] = before[part]
        yield part


def tensor_of(gradient: npt.NDArray[np.float32] | torch.Tensor) -> torch.Tensor:
    if isinstance(gradient, torch.Tensor):
        return gradient
    # Torch warns about read-only memory such as a view of a blob. The view is only read here.
    if gradient.flags.writeable:
        return torch.from_numpy(gradient)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(gradient)


def square_length(vector: torch.Tensor) -> float:
    """Return the sum of the squares of a float32 vector; infinite if a number of it is not finite."""
    square = float(torch.dot(vector, vector))
    if 1e-30 < square < math.inf:
        return square
    # Some squares are beyond the range of float32, or some number is not finite.
    exact = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
    return exact**2 if math.isfinite(exact) else math.inf


def length(vector: torch.Tensor) -> float:
    """Return the Euclidean norm of a float32 vector; infinite if a number of it is not finite."""
    return math.sqrt(square_length(vector))
