"""The sample guard: it computes the gradient of a batch without harmful samples. A sample is harmful if it cannot be
computed or would break the model.

For a usual batch, the guard only computes one norm. The guard inspects batches that fail, and batches whose gradient is
much longer than the gradients of earlier batches. It also inspects the first batch, unless another process of the job
has reported the usual norms. A sample that fails alone is refused. In a batch that is only unusual, a sample is refused
if two conditions hold (ADR 0011). First, its gradient is much longer than the gradients of usual samples, also with
wrong targets. Second, its step would break the model for ordinary samples. The canary consists of a few samples that
were learned before. It distinguishes bad samples from a task or a model that fails on all samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from doll.config import AdagradConfig, AdamConfig, JobConfig, OptimizerConfig, SgdConfig
from doll.consumers.compute.bisection import RunningMedian, beyond, failing, harmful, usual_norm
from doll.consumers.compute.gradient import Gradient, GradientComputer
from doll.errors import BlobError, ServiceUnavailableError, TaskError
from doll.task import trees
from doll.task.base import Task
from doll.task.batches import SampleBatch, batch_of, joined
from doll.task.trees import Array, Tree
from doll.telemetry import get_logger
from doll.theory.divergence import Divergence

log = get_logger(__name__)

_CANARY_SAMPLES: Final = 16
_CANARY_PARTS: Final = 4
# A batch is inspected above this share of the spike factor, because its other samples dilute a bad sample.
_INSPECT_FROM_SHARE: Final = 0.3
# The usual norm from an inspection is valid for so many learned batches: to measure it costs 32 passes of one sample,
# and the batches of a model that is mostly right are often unusual.
_USUAL_BATCHES: Final = 256
# A model diverges if its loss on learned samples is so many times the usual one. Then any sample may look harmful.
_DIVERGED: Final = 100.0
_MAX_REASON_CHARS: Final = 300
_TINY: Final = 1e-30
_MOST_MOMENTUM: Final = 0.999


class Ordinary(NamedTuple):
    """Samples that are neither bad nor extreme, the same samples with wrong targets, and the usual gradient norm."""

    samples: SampleBatch
    mistaken: SampleBatch
    usual: float


class GuardedGradient(NamedTuple):
    """The gradient of the usable samples (None without a usable sample), and the reason of each refused sample."""

    gradient: Gradient | None
    bad: dict[int, str]


class Guard:
    """The guard of one worker, which computes its batches. Not thread-safe: one thread computes."""

    def __init__(
        self, config: JobConfig, task: Task, computer: GradientComputer, usual: Sequence[float] = ()
    ) -> None:  # fmt: skip
        """Create the guard. `usual` is the property `usual` of another process of the job; (): unknown."""
        self._config = config
        self._task = task
        self._computer = computer
        self._factor = config.training.guard.spike_factor
        self._norms, self._buffer_changes = RunningMedian(), RunningMedian()
        self._losses = Divergence()  # mean losses of the batches
        if len(usual) >= 2 and all(map(math.isfinite, usual)):
            for median, value in zip((self._norms, self._buffer_changes), usual, strict=False):
                median.add(value)
            self._losses = Divergence(*usual[2:3])  # a release before ADR 125 does not tell the first loss
        self._has_diverged = False
        self._last: SampleBatch | None = None  # the batch that was learned last
        self._usual, self._usual_batches = 0.0, 0  # norm by the last inspection; batches for which it is valid

    @property
    def usual(self) -> tuple[float, ...]:
        """The median norm of a sample's gradient and the median change of the buffers, over the last learned batches,
        and the loss of the first batch; () before the first batch."""
        if math.isnan(self._norms.usual):
            return ()
        first = () if math.isnan(self._losses.first) else (self._losses.first,)
        return (self._norms.usual, self._buffer_changes.usual, *first)

    @property
    def _canary(self) -> SampleBatch | None:
        """The canary: a few distinct samples that were learned before. They are selected when first needed."""
        return None if self._last is None else _few(self._last)

    def compute(
        self, x: Tree, y: Tree, weight: Array | None = None, group: Array | None = None, *,
        seed: int | None = None,
    ) -> GuardedGradient:  # fmt: skip
        """Return the gradient of the good samples. The arguments are as in `SampleBatch`.

        The guard judges a sample as if its weight were 1, because a weight of 2 means the same sample twice.

        Args:
            seed: seed of the random numbers of each pass. None: the generator is not seeded.

        Raises:
            TaskError: the fault is the task's or the model's, not the samples'.
            MemoryError, OSError: the fault is this machine's.
        """
        samples = SampleBatch(x, y, weight, group)
        self._computer.seed = seed
        left: Sequence[int] = range(samples.num_samples)
        bad: dict[int, str] = {}
        while left:
            here = samples if not bad else samples.take(left)
            gradient, problem = self._try(here)
            rejected: dict[int, str] = {}
            if problem:
                rejected = self._failing(here, problem)
            elif gradient is not None and self.is_unusual(gradient):
                gradient = self._computer.kept(gradient)  # probes overwrite the original
                rejected = self._spikes(here.unweighted()) if self._may_do_harm(gradient, here.num_samples) else {}
            if not rejected and gradient is not None:
                self.learned(gradient, here)
                return GuardedGradient(gradient, bad)
            bad |= {left[at]: reason for at, reason in rejected.items()}
            left = [index for index in left if index not in bad]
        return GuardedGradient(None, bad)

    def _try(self, samples: SampleBatch, *, use_running_stats: bool = False) -> tuple[Gradient | None, str]:
        try:
            gradient = self._computer.compute(*samples, use_running_stats=use_running_stats)
        except Exception as exc:  # the user's forward, loss or metrics may raise anything
            return None, _reason(exc)
        problem = gradient.problem()
        return (None, problem) if problem else (gradient, "")

    def _loss(self, samples: SampleBatch, *, stepped: bool = False) -> float:
        """Return the mean loss of samples whose gradient can be computed. If the task's loss fails, return infinity if
        the weights were changed by a step (`stepped`); otherwise raise TaskError."""
        try:
            return self._computer.loss(*samples)
        except Exception as exc:
            reason = _reason(exc)
            if stepped:
                return math.inf
            raise TaskError(_fails_together(self._config, reason)) from exc

    def is_unusual(self, gradient: Gradient) -> bool:
        """Return whether a batch that can be computed differs from the batches before."""
        threshold = self._factor * _INSPECT_FROM_SHARE
        return bool(self._factor) and (
            self._buffer_changes.unusual(gradient.buffer_change, threshold)
            or (
                self._norms.unusual(gradient.norm / (gradient.weight or 1.0), threshold)
                and not gradient.norm <= threshold * self._usual
            )
        )

    def _may_do_harm(self, gradient: Gradient, count: int) -> bool:
        """Return whether the step of an unusual batch may harm the model. Streams change, and late in training most
        difficult batches do no harm. This test is cheaper than an inspection: it computes passes of only a few samples.
        Return False if the model diverges, because then the samples are not the cause."""
        if self._diverges():
            return False
        if self._canary is None or self._buffer_changes.unusual(
            gradient.buffer_change, self._factor * _INSPECT_FROM_SHARE
        ):
            return True
        ordinary = self._ordinary(self._canary)
        if ordinary is None:
            return True
        self._usual, self._usual_batches = ordinary.usual, _USUAL_BATCHES
        before, wrong = self._loss(ordinary.samples), self._loss(ordinary.mistaken)
        usual_weight = gradient.weight / count  # mean weight of its samples; the step divides by the weight
        return harmful(before, wrong, self._loss_after(gradient, self._norms.usual, ordinary.samples, usual_weight))

    def _diverges(self, parts: int = 1) -> bool:
        """Return whether the model diverges, by the losses of the batches or by that of learned samples. `parts`:
        number of parts of the learned samples, of which the second lowest loss counts: a sample with an extreme target
        has a large loss in a good model, too."""
        loss, before = self._losses.now, self._has_diverged
        self._has_diverged = self._losses.has_diverged
        if not self._has_diverged and self._canary is not None:
            places = [range(at, self._canary.num_samples, parts) for at in range(min(parts, self._canary.num_samples))]
            loss = sorted(self._loss(self._canary.take(part), stepped=True) for part in places)[len(places) > 1]
            is_loss = parts == 1 or loss < math.inf  # the loss of a task may need more samples than a part has
            self._has_diverged = is_loss and loss > _DIVERGED * self._losses.usual > 0
        if self._has_diverged and not before:
            log.warning(
                "model_diverges", loss=loss, at_first=self._losses.first,
                action="no sample is refused for its gradient",
                hint="lower training.optimizer.lr, or set training.clip_norm",
            )  # fmt: skip
        return self._has_diverged

    def learned(self, gradient: Gradient, samples: SampleBatch) -> None:
        """Update the usual norms with this gradient, which the update uses."""
        if not gradient.weight:
            return
        self._norms.add(gradient.norm / gradient.weight)
        self._losses.add(gradient.loss_sum / gradient.weight)
        self._buffer_changes.add(gradient.buffer_change)
        self._last = samples
        self._usual_batches -= 1
        if self._usual_batches <= 0:
            self._usual = 0.0

    # --- samples that cannot be computed ----------------------------------------------------------------------------

    def _failing(self, samples: SampleBatch, problem: str) -> dict[int, str]:
        if self._canary is not None and (again := self._try(self._canary)[1]):
            raise TaskError(
                f"{self._config.task.cls} fails on a batch ({problem}), and at these weights also on samples that it "
                f"has learned before ({again}): the model has diverged or the task is wrong; lower "
                "training.optimizer.lr, set training.clip_norm, or correct the task"
            )
        if self._diverges(_CANARY_PARTS):
            raise TaskError(
                f"the model has diverged: its loss was {self._losses.first:.4g} at first and is now far above, and "
                f"{self._config.task.cls} fails on a batch ({problem}); no sample is refused for that; lower "
                "training.optimizer.lr, or set training.clip_norm"
            )
        everything = range(samples.num_samples)
        rejected = failing(everything, lambda part: self._try(samples.take(part), use_running_stats=True)[1])
        if len(rejected) > 1:
            rejected = self._failing_together(samples, problem, rejected)
        if not rejected:
            # Each sample can be computed alone, but not all together: their sum overflows.
            rejected = self._spikes(samples)
        if not rejected:
            raise TaskError(_fails_together(self._config, problem))
        return rejected

    def _failing_together(self, samples: SampleBatch, problem: str, alone: dict[int, str]) -> dict[int, str]:
        """Return the samples of `alone` that also fail together with good samples. (Some losses need several samples,
        so a good sample may fail alone.)"""
        good = [at for at in range(samples.num_samples) if at not in alone]
        good_samples = self._canary or (_few(samples.take(good)) if good else self._held_out())
        if good_samples is not None and not self._try(good_samples)[1]:
            rejected = failing(list(alone), lambda part: self._try(joined([samples.take(part), good_samples]))[1])
            return rejected or (alone if good else {})
        if good:
            return alone
        raise TaskError(
            f"{self._config.task.cls} fails on every sample of its first batch ({problem}): correct the task, its "
            "model or its records"
        )

    def _held_out(self) -> SampleBatch | None:
        try:
            held_out = batch_of(self._task, self._task.holdout(), _CANARY_SAMPLES).unweighted()
        except Exception as exc:  # the user's code may raise anything
            log.warning("no_held_out_samples", error=f"{type(exc).__name__}: {exc}")
            return None
        return held_out if held_out.num_samples else None

    # --- samples that would break the model -------------------------------------------------------------------------

    def _spikes(self, samples: SampleBatch) -> dict[int, str]:
        if not self._factor:
            return {}
        reference = self._ordinary(self._canary or _few(samples))
        if reference is None:
            return {}
        ordinary, wrong, usual = reference
        suspects = beyond(range(samples.num_samples), self._factor * usual, lambda part: self._norm(samples.take(part)))
        before, wrong_loss = self._loss(ordinary), self._loss(wrong)
        rejected, usual_with = {}, dict[bytes, float]()
        if suspects and self._any_sample_does_harm(wrong, usual, ordinary, before, wrong_loss):
            return {}
        for at in suspects:
            sample = samples.take([at])
            if (target := trees.bytes_of(sample.y)) not in usual_with:
                usual_with[target] = max(usual, self._usual_with_its_target(sample, ordinary))
            its_usual = usual_with[target]
            gradient, _ = self._try(sample, use_running_stats=True)
            norm = math.inf if gradient is None else gradient.norm
            if norm <= self._factor * its_usual:
                continue
            after = math.inf if gradient is None else self._loss_after(gradient, its_usual, ordinary)
            if harmful(before, wrong_loss, after):
                rejected[at] = (
                    f"its gradient is {norm / its_usual:.3g} times as long as is usual, and its step would take the "
                    f"loss of ordinary samples from {before:.3g} to {after:.3g} (training.guard.spike_factor)"
                )
        rest = [at for at in range(samples.num_samples) if at not in rejected]
        return {**rejected, **self._drifts(samples, rest, ordinary, wrong_loss)}

    def _ordinary(self, canary: SampleBatch) -> Ordinary | None:
        """Return the samples of the canary that define the usual norm; None if there are none.

        The canary may contain a bad sample. While the model happens to predict such a sample correctly, the sample has
        no gradient and is learned. With a wrong target, its gradient is long. The sample is then left out, because any
        good step would increase its loss.
        """
        mistaken = canary._replace(y=self._wrong_targets(canary.y))
        norms, mistaken_norms = self._norms_of(canary), self._norms_of(mistaken)
        usual = max(usual_norm(norms), usual_norm(mistaken_norms))
        if not 0 < usual < math.inf:
            return None
        both = zip(norms, mistaken_norms, strict=True)
        kept = [at for at, pair in enumerate(both) if max(pair) <= self._factor * usual]
        return Ordinary(canary.take(kept), mistaken.take(kept), usual) if kept else None

    def _any_sample_does_harm(
        self, wrong: SampleBatch, usual: float, ordinary: SampleBatch, before: float, wrong_loss: float
    ) -> bool:
        """Return whether ordinary samples with wrong targets also break the model: then the learning rate is at
        fault."""
        norms = self._norms_of(wrong)
        middle = sorted(range(len(norms)), key=lambda at: norms[at])[len(norms) // 2]
        gradient, _ = self._try(wrong.take([middle]), use_running_stats=True)
        return gradient is None or harmful(before, wrong_loss, self._loss_after(gradient, usual, ordinary))

    def _drifts(
        self, samples: SampleBatch, rest: Sequence[int], ordinary: SampleBatch, wrong_loss: float
    ) -> dict[int, str]:
        """Return the samples of `rest` that would break the statistics of batch norm, independent of their gradient."""
        if not self._computer.num_buffers:
            return {}
        count = ordinary.num_samples
        parts = [ordinary.take(slice(at, min(at + 4, count))) for at in range(0, count - 1, 4)]
        moves = [self._buffer_change(part) for part in parts]
        calm = min(moves, default=math.inf)
        if not calm < math.inf:
            return {}
        quiet = [part for part, move in zip(parts, moves, strict=True) if move <= self._factor * calm]
        good_samples = joined(quiet)
        usual, _ = self._try(good_samples)
        if usual is None:
            return {}
        suspects = beyond(
            rest,
            self._factor * usual.buffer_change,
            lambda part: self._buffer_change(joined([samples.take(part), good_samples])),
        )
        before, statistics, rejected = self._loss(good_samples), self._computer.buffers(usual), {}
        for at in suspects:
            gradient, _ = self._try(joined([samples.take([at]), good_samples]))
            after, extreme = math.inf, True
            if gradient is not None:
                # An untrained model shows no harm, but would keep such statistics for hundreds of updates.
                extreme = gradient.buffer_change > self._factor**2 * usual.buffer_change
                # In training, the sample is one of a whole group of batches, not of so few samples.
                share = (good_samples.num_samples + 1) / (self._config.data.batch_size * self._config.group_size)
                change = share * (self._computer.buffers(gradient) - statistics)
                with self._computer.buffers_changed_by(change):
                    after = self._loss(good_samples, stepped=True)
            if extreme or harmful(before, wrong_loss, after):
                rejected[at] = (
                    "it would change the statistics of normalisation so much that the loss of ordinary samples goes "
                    f"from {before:.3g} to {after:.3g} (training.guard.spike_factor)"
                )
        return rejected

    def _buffer_change(self, samples: SampleBatch) -> float:
        gradient, _ = self._try(samples)
        return math.inf if gradient is None else gradient.buffer_change

    def _norms_of(self, samples: SampleBatch) -> list[float]:
        return [self._norm(samples.take([at])) for at in range(samples.num_samples)]

    def _norm(self, samples: SampleBatch) -> float:
        gradient, _ = self._try(samples, use_running_stats=True)
        return math.inf if gradient is None else gradient.norm

    def _wrong_targets(self, y: Tree) -> Tree:
        if (classes := self._task.num_classes) is not None and classes > 1 and trees.is_alone(y):
            return trees.mapped(lambda target: (target + 1) % classes, y)
        return trees.rolled(y)

    def _usual_with_its_target(self, sample: SampleBatch, ordinary: SampleBatch) -> float:
        """Return the usual norm of ordinary features with the target of `sample`. (A rare target causes a long gradient
        even with ordinary features.)"""
        if self._task.num_classes is None:
            largest = max(1.0, trees.largest(ordinary.y))
            if not trees.largest(sample.y) <= self._factor * largest:
                return 0.0
        same = ordinary._replace(y=trees.taken(sample.y, [0] * ordinary.num_samples))
        return usual_norm([norm for norm in self._norms_of(same) if math.isfinite(norm)])

    def _loss_after(self, gradient: Gradient, usual: float, ordinary: SampleBatch, usual_weight: float = 1.0) -> float:
        """Return the loss of ordinary samples after the step of one sample's gradient. `usual_weight` is the usual
        weight of a sample, because the mean gradient is weighted."""
        training = self._config.training
        lr, momentum, normalizes = _rates(training.optimizer)
        batches = 1 if training.policy.sends_steps else self._config.group_size  # batches of one step
        share = 1.0 / (self._config.data.batch_size * batches * usual_weight)
        if normalizes:
            # These optimizers divide by the size of the gradients so far. Here one number stands for all: the size
            # of means, so that the sample's share is a share of the mean, for each reduction. Adagrad's steps
            # become shorter, but its sums keep a long gradient: it is judged with the length of the first steps.
            rate = lr * math.sqrt(gradient.num_values) / max(usual, _TINY)
        else:
            rate = lr
            share = 1.0 if training.reduction == "sum" else share
        rate /= 1.0 - momentum
        if training.clip_norm is not None:
            share = min(share, training.clip_norm / max(gradient.norm, _TINY))
        with self._computer.stepped_by(gradient, -rate * share):
            return self._loss(ordinary, stepped=True)


def _reason(exc: Exception) -> str:
    """Return the reason for which a sample is dead, from the task's exception `exc`. Raise `exc` itself if its cause is
    not a sample, but this machine, rows of tables that do not arrive, or a faulty task."""
    if isinstance(exc, MemoryError | OSError | BlobError | ServiceUnavailableError | TaskError):
        raise exc
    if "allocate memory" in str(exc) or "out of memory" in str(exc):
        raise MemoryError(str(exc)) from exc
    return f"{type(exc).__name__}: {exc}"[:_MAX_REASON_CHARS]


def _fails_together(config: JobConfig, problem: str) -> str:
    return (
        f"{config.task.cls} fails on a batch ({problem}) and on none of its samples alone: expected a loss that can be "
        "computed, and is finite, for a batch if it is for each of its samples; compare the shapes of output and target"
    )


def _rates(optimizer: OptimizerConfig) -> tuple[float, float, bool]:
    """Return the learning rate, the momentum, and whether steps are divided by the size of the gradients so far. The
    rates of a schedule are not known here, so `lr` is used in their place."""
    match optimizer:
        case SgdConfig():
            return optimizer.lr, optimizer.momentum, False
        case AdamConfig():
            return optimizer.lr, 0.0, True
        case AdagradConfig():
            return optimizer.lr, optimizer.momentum, True
        case _:
            lr, momentum = (_number(optimizer.args.get(key), usual) for key, usual in (("lr", 1e-3), ("momentum", 0.0)))
            return lr, min(momentum, _MOST_MOMENTUM), not optimizer.cls.endswith("SGD")


def _number(value: Any, usual: float) -> float:
    return float(value) if isinstance(value, int | float) else usual


def _few(samples: SampleBatch) -> SampleBatch:
    return samples.few(_CANARY_SAMPLES).unweighted()
