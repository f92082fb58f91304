"""Updater that steps on a gradient: sums in a fixed order in float32, scales, clips, and calls torch's optimizers.

torch's functions `sgd` and `adam` are called, not its optimizer classes: constructing one of these imports torch's
compiler, which took 5 s of CPU on two slow cores at each start of a parameter server, restarts included.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt
import torch
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from doll.config import AdamConfig, OptimizerConfig, SgdConfig, TrainingConfig
from doll.errors import CheckpointError, TaskError
from doll.model import FlatModel
from doll.ps.updater import Contribution, Updater

WEIGHTS = "weights"
_STATE = "optimizer."
_ADAM_EPSILON = 1e-8


class DivergedError(TaskError):
    """The gradient or a weight is not finite: the model has diverged, and saving it would destroy it."""


class Optimizer:
    """`Updater` whose contributions are gradients: one step of torch's optimizer on `scale` times their sum.

    The caller's `scale` decides between the mean gradient over the update's samples (the default) and the paper's sum
    (docs/theory.md, D2).
    """

    def __init__(self, model: FlatModel, config: OptimizerConfig, clip_norm: float | None = None) -> None:
        """
        Args:
            clip_norm: the longest gradient that a step is made with, after `scale`; None: any.
        """
        self._model = model
        self._flat = model.flat
        self._num_parameters = model.num_parameters
        self._parameters = model.flat[: model.num_parameters]
        self._sum = torch.zeros_like(model.flat)
        self._config = config
        self._clip_norm = clip_norm
        self._state: dict[str, torch.Tensor] = {}  # named as torch's optimizer classes name it

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        array: npt.NDArray[np.float32] = self._flat.detach().numpy()
        return array

    def apply(self, gradients: Sequence[Contribution], scale: float, num_samples: int) -> None:
        """One step on `scale` times the sum of `gradients`, added in the order given.

        Args:
            gradients: float32, shape (numel,) each: sums over samples; for float buffers, values times samples; the
                other buffers become those of the last gradient.
            scale: 1 / num_samples for the mean.
            num_samples: of all gradients together.

        Raises:
            DivergedError: the mean is not finite, and the weights are unchanged; or a weight, or a number of the
                optimizer's state, is not after the step, and this object cannot be used any more.
        """
        if not gradients:
            return  # nothing but refused records: the version counts, the weights stay
        total = self._sum
        total.copy_(_tensor(gradients[0]))
        for gradient in gradients[1:]:
            total += _tensor(gradient)
        n, floats = self._num_parameters, self._model.num_floats
        if _is_finite(total[:floats]):
            total[n:floats] /= max(num_samples, 1)
            total[:n] *= scale
        else:
            # Finite gradients may have a sum that float32 cannot hold, and a mean that it can.
            exact = torch.stack([_tensor(gradient)[:floats].double() for gradient in gradients]).sum(dim=0)
            total[:n] = exact[:n] * scale
            total[n:floats] = exact[n:] / max(num_samples, 1)
            _check_finite(total[:floats], "the gradient is")
        self._clip(total[:n])
        total[floats:] = _tensor(gradients[-1])[floats:]
        with torch.no_grad():
            self._step(total[:n])
            self._flat[n:] = total[n:]
        _check_finite(self._flat[:floats], "after the step the weights are")
        for state in self._state.values():
            _check_finite(state, "after the step the optimizer's state is")

    def _clip(self, gradient: torch.Tensor) -> None:
        if self._clip_norm is not None:
            norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
            if norm > self._clip_norm:
                gradient *= self._clip_norm / norm

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        tensors = {f"{_STATE}{key}": value.numpy().copy() for key, value in self._state.items()}
        return {WEIGHTS: self.weights.copy(), **tensors}

    def load(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        weights = tensors.get(WEIGHTS)
        try:
            if weights is None:
                raise ValueError(f"expected weights of shape {tuple(self._flat.shape)}, got nothing")
            self._model.load_weights(weights)
        except ValueError as exc:
            raise CheckpointError(str(exc)) from exc
        self._state = {
            key.removeprefix(_STATE): torch.from_numpy(np.array(value))
            for key, value in tensors.items()
            if key.startswith(_STATE)
        }

    def _step(self, gradient: torch.Tensor) -> None:
        """One step on `gradient`, float32, shape (num_parameters,)."""
        config, state, parameters = self._config, self._state, [self._parameters]
        match config:
            case SgdConfig():
                buffers = [state.get("momentum_buffer")]
                sgd(
                    parameters, [gradient], buffers, foreach=False, weight_decay=config.weight_decay,
                    momentum=config.momentum, lr=config.lr, dampening=0.0, nesterov=config.nesterov, maximize=False,
                )  # fmt: skip
                if buffers[0] is not None:
                    state["momentum_buffer"] = buffers[0]
            case AdamConfig():
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(self._parameters)
                    state["exp_avg_sq"] = torch.zeros_like(self._parameters)
                adam(
                    parameters, [gradient], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]],
                    foreach=False, amsgrad=False, beta1=config.beta1, beta2=config.beta2, lr=config.lr,
                    weight_decay=config.weight_decay, eps=_ADAM_EPSILON, maximize=False,
                )  # fmt: skip
            case _:
                assert_never(config)


def make_updater(config: TrainingConfig, model: FlatModel) -> Updater:
    """The updater that `training` asks for; it owns the weights of `model` from now on."""
    return Optimizer(model, config.optimizer, config.clip_norm)


def _is_finite(vector: torch.Tensor) -> bool:
    # One NaN or infinity makes the sum one. A sum of large numbers may overflow by itself: then each is looked at.
    return bool(torch.isfinite(vector.sum())) or bool(torch.isfinite(vector).all())


def _check_finite(vector: torch.Tensor, what: str) -> None:
    if not _is_finite(vector):
        raise DivergedError(
            f"{what} not finite (NaN or infinity): expected a model that converges; lower training.optimizer.lr, set "
            "training.clip_norm, or look for extreme values in the stream; the last checkpoint is intact"
        )


def _tensor(gradient: npt.NDArray[np.float32]) -> torch.Tensor:
    # A blob's view is read-only, which torch warns about; it is only read here.
    return torch.frombuffer(gradient.data, dtype=torch.float32) if gradient.flags.writeable else _read_only(gradient)


def _read_only(gradient: npt.NDArray[np.float32]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(gradient)
