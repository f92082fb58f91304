"""Port: how the contributions of one group make the next model. Adapters compute with torch and do no I/O.

`doll.ps.optimizer.Optimizer` steps on the sum of gradients. Policies whose workers send steps instead of gradients add
these to the weights: another adapter of the same port (docs/decisions/0020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from doll.ps.events import ApplyUpdate

# What one batch adds to an update: float32, shape (numel,), laid out as `doll.model` says; sums over its samples.
Contribution: TypeAlias = npt.NDArray[np.float32]


class HoldsTensors(Protocol):
    """Whatever starts from the tensors of a checkpoint."""

    def load(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Continue from a checkpoint's tensors.

        Raises:
            CheckpointError: they do not fit the model.
        """


class Updater(HoldsTensors, Protocol):
    """Owns the flat weights and whatever state the step needs. Not thread-safe."""

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        """float32, shape (numel,), laid out as `doll.model` says; a view of the live tensor."""
        ...

    def apply(self, contributions: Sequence[Contribution], scale: float, num_samples: int) -> None:
        """Make the next model from `contributions`, in the order given. Without any, the weights stay as they are.

        The result depends on the weights, the state and the arguments only, bit for bit: a replay makes the same model.

        Args:
            scale: factor for the sum of the contributions.
            num_samples: of all contributions together.

        Raises:
            DivergedError: a number is not finite. The object must not be used any more.
        """

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Copies of the weights and of the state, by name, for a checkpoint. `load` takes them."""
        ...


class ContributionBuffer:
    """Contributions that wait for their update, and the apply step: the one place that turns them into a version.

    The parameter server, a replay of its event log and the simulation all apply updates through it.
    """

    def __init__(self, updater: Updater) -> None:
        self._updater = updater
        self._waiting: dict[int, Contribution] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, grant_id: int, contribution: Contribution) -> None:
        """Keep the answer to `grant_id` until its update comes. It is not copied."""
        self._waiting[grant_id] = contribution

    def drop(self, grant_id: int) -> None:
        """Forget the answer to `grant_id`: its update will never come."""
        del self._waiting[grant_id]

    def apply(self, update: ApplyUpdate) -> int:
        """Make the version of `update`; how many samples it has learned from.

        Raises:
            DivergedError: as `Updater.apply`.
            KeyError: a push of the update has a gradient that was never put here.
        """
        contributions = []
        for item in update.batches:
            contribution = self._waiting.pop(item.grant_id, None)
            if contribution is not None:
                contributions.append(contribution)
            elif item.push.key:
                raise KeyError(f"update {update.version}: expected the gradient of grant {item.grant_id}, got none")
        num_samples = sum(item.push.n_samples for item in update.batches)
        self._updater.apply(contributions, update.scale, num_samples)
        return num_samples
