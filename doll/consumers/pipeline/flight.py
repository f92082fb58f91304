"""One minibatch in a pipeline of stages: what the coordinator knows of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from doll.consumers.compute.gradient import Gradient
from doll.consumers.compute.gradient_engine import GoesOn
from doll.consumers.compute.guard import Samples
from doll.consumers.protocol.worker_core import Batch, ComputedBatch, GradientDone
from doll.pipeline.links.frames import DTYPES
from doll.pipeline.runtime.messages import Backward
from doll.pipeline.runtime.virtual_worker import Submitted
from doll.records.control import Grant

NO_VALUES: Final = np.zeros(0, np.float32)


@dataclass(slots=True, eq=False)
class Flight:
    """One batch from its submission to its answer."""

    grant: Grant
    batch: Batch
    goes_on: GoesOn
    future: Future[GradientDone | None]
    samples: Samples
    computed: ComputedBatch | None = None
    bad: dict[int, str] | None = None  # None: not inspected
    started_s: float = 0.0


def gradient_of(message: Backward) -> Gradient:
    """What is known of the gradient that is at the stages."""
    return Gradient(
        NO_VALUES, message.loss_sum, dict(message.metric_sums), math.sqrt(message.squares),
        math.sqrt(message.buffer_squares),
    )  # fmt: skip


def for_link(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`array`, of a type that links carry, which an undivided worker would take too where that is possible."""
    if (native := array.dtype.newbyteorder("=")) in DTYPES:
        return array.astype(native, copy=False)
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64)


def names_of(members: Sequence[Submitted]) -> tuple[tuple[int, int], ...]:
    """(batch, grant id) of each, whose token is its flight."""
    return tuple((item.batch, item.token.grant.grant_ids[0]) for item in members)
