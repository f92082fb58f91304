"""What `training` says of a step: the optimizer that it asks for, and the check that a model can be trained so."""

from __future__ import annotations

from collections.abc import Callable

from doll.config import TorchConfig, TrainingConfig
from doll.errors import ConfigError
from doll.model.flat_model import FlatModel
from doll.optim.optimizer import Optimizer
from doll.optim.row_optimizer import row_optimizers
from doll.optim.torch_optimizer import TorchOptimizer, check_torch_optimizer


def make_optimizer(
    training: TrainingConfig, model: FlatModel, *, clips_norm: bool = True,
    norm_of_tables: Callable[[], float] = lambda: 0.0,
) -> Optimizer:  # fmt: skip
    """The server's, or a worker's own where workers send steps: that has no average, and its schedule follows the
    versions that the worker has.

    Args:
        clips_norm: False where somebody else clips by norm.
        norm_of_tables: as of `Optimizer`.

    Raises:
        ConfigError: the optimizer or the schedule cannot be made.
    """
    is_worker = training.policy.sends_steps
    clip_norm = training.clip_norm if clips_norm else None
    ema = None if is_worker else decay(training)
    if isinstance(training.optimizer, TorchConfig):
        return TorchOptimizer(
            model, training.optimizer, clip_norm, clip_value=training.clip_value, schedule=training.schedule,
            by_version=is_worker, ema=ema, norm_of_tables=norm_of_tables,
        )  # fmt: skip
    return Optimizer(
        model, training.optimizer, clip_norm, clip_value=training.clip_value, schedule=training.schedule,
        by_version=is_worker, ema=ema, norm_of_tables=norm_of_tables,
    )  # fmt: skip


def decay(training: TrainingConfig) -> float | None:
    """Of the average of weights; None: there is none."""
    return None if training.ema is None else training.ema.decay


def check_recipe(training: TrainingConfig, model: FlatModel) -> None:
    """
    Raises:
        ConfigError: the model cannot be trained so, whoever makes the steps.
    """
    row_optimizers(training, () if model.tables is None else model.tables.shapes)
    if model.tables is not None:
        if training.clip_value is not None:
            raise ConfigError("training.clip_value: expected clip_norm for a model with tables (sparse embeddings)")
        if training.schedule or training.ema is not None:
            raise ConfigError(
                f"training.{'schedule' if training.schedule else 'ema'}: expected none for a model with tables (sparse "
                "embeddings): their rows have a constant rate and no average"
            )
    if isinstance(training.optimizer, TorchConfig):
        check_torch_optimizer(model, training.optimizer, training.schedule)
    elif training.schedule:
        make_optimizer(training, model)
