"""The optimizer for the section `training`, and the check that a model can be trained with it."""

from __future__ import annotations

from collections.abc import Callable

from doll.config import TorchConfig, TrainingConfig
from doll.config.tables import settings_of_tables
from doll.errors import ConfigError
from doll.model.flat_model import FlatModel
from doll.optim.optimizer import FlatVector, Optimizer
from doll.optim.row_optimizer import row_optimizers
from doll.optim.torch_optimizer import TorchOptimizer, check_torch_optimizer


def make_optimizer(
    training: TrainingConfig, model: FlatVector, *, clips_norm: bool = True,
    norm_of_tables: Callable[[], float] = lambda: 0.0,
) -> Optimizer:  # fmt: skip
    """Make the optimizer of the server. If workers send steps, make the optimizer of a worker instead: it has no moving
    average, and its schedule follows the versions of the worker's weights.

    Args:
        clips_norm: False if another part of the process clips by norm.
        norm_of_tables: see `Optimizer`.

    Raises:
        ConfigError: the optimizer or the schedule cannot be made.
    """
    is_worker = training.policy.sends_steps
    clip_norm = training.clip_norm if clips_norm else None
    ema = None if is_worker else decay(training)
    cls: type[Optimizer] = TorchOptimizer if isinstance(training.optimizer, TorchConfig) else Optimizer
    return cls(
        model, training.optimizer, clip_norm, clip_value=training.clip_value, schedule=training.schedule,
        by_version=is_worker, ema=ema, norm_of_tables=norm_of_tables,
    )  # fmt: skip


def decay(training: TrainingConfig) -> float | None:
    """Return the decay of the moving average of the weights; None: there is no average."""
    return None if training.ema is None else training.ema.decay


def check_recipe(training: TrainingConfig, model: FlatModel) -> None:
    """Raise ConfigError if the model cannot be trained with these settings, by the server or by workers."""
    names = () if model.tables is None else model.tables.shapes
    row_optimizers(training, names)
    if names:
        if training.clip_value is not None:
            raise ConfigError("training.clip_value: expected clip_norm for a model with tables (sparse embeddings)")
        if training.ema is not None:
            raise ConfigError("training.ema: expected none for a model with tables (sparse embeddings): rows have none")
        settings = settings_of_tables(training.tables, names)
        if training.schedule and (without := [name for name in names if settings[name].optimizer is None]):
            raise ConfigError(
                "training.schedule: expected tables with optimizers of their own (training.tables), because the rates "
                f"of rows do not change; {', '.join(map(repr, without))} has none"
            )
    if isinstance(training.optimizer, TorchConfig):
        if not model.num_parameters:
            raise ConfigError(
                "training.optimizer.class: expected parameters in addition to the tables, got none: remove it"
            )
        check_torch_optimizer(model, training.optimizer, training.schedule)
    elif training.schedule:
        make_optimizer(training, model)
