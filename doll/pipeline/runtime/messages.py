"""Records between a virtual worker's coordinator and its stages.

`Forward` and `Settle` go down the chain, from the coordinator to the last stage, and `Backward` comes up again; arrays
travel behind them. Each stage takes what it receives in the order in which it comes, so all stages make the same steps
in the same order. The other records go between the coordinator and one stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec


class Commit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A minibatch is complete: each stage steps on its gradient, or drops it, and its slot is free.

    Attributes:
        batch: its number in the worker's stream.
        slot: where its gradient is; -1: no gradient.
        scale: what the gradient is multiplied by, so that it is the mean; 0: it is dropped.
        num_samples: of the minibatch.
        ends_wave: it is the last of its wave.
    """

    batch: int
    slot: int
    scale: float
    num_samples: int
    ends_wave: bool = False


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    pass


class Forward(_Message, frozen=True):
    """Compute this minibatch, on the weights of `version` with the worker's own steps that these do not hold.

    Arrays: x, y for the first stage; the activations of the stage before, y for the others.

    Attributes:
        slot: of the N_m in which its weights are kept until its backward pass.
        included: batches of this worker's stream that `version` holds.
        commits: come before it.
    """

    batch: int
    slot: int
    num_samples: int
    version: int
    included: int
    commits: tuple[Commit, ...] = ()


class Settle(_Message, frozen=True):
    """What comes between two minibatches.

    Attributes:
        commits: come first.
        forget_from: the steps of this batch and later ones are void; None: none are.
        store: write the sum of the steps of the wave that ends below this batch to the shared file; None: nothing.
        show: write the weights with all own steps there.
        version, included: as in `Forward`, where a stage before has failed on a minibatch that was to be computed on
            them; -1: none has.
    """

    commits: tuple[Commit, ...] = ()
    forget_from: int | None = None
    store: int | None = None
    show: bool = False
    version: int = -1
    included: int = 0


class StageTask(msgspec.Struct, frozen=True, array_like=True):
    """What one stage did when, in seconds of the machine's monotonic clock. `kind`: F, B, or FB."""

    stage: int
    kind: str
    batch: int
    start_s: float
    end_s: float


class Backward(_Message, frozen=True):
    """The gradient of this minibatch is in its slot at the stage that sends this, and at all behind it.

    Arrays: the gradient of the activations that the receiver had sent; no array where activations have no gradient.

    Attributes:
        loss_sum, metric_sums: over the samples.
        squares: sum of the squares of the gradient's numbers so far.
        buffer_squares: of the changes of the float buffers.
        problem: why there is no gradient; "": there is one.
        tasks: of all stages that have computed it.
    """

    batch: int
    slot: int
    num_samples: int
    loss_sum: float = 0.0
    metric_sums: Mapping[str, float] = {}
    squares: float = 0.0
    buffer_squares: float = 0.0
    problem: str = ""
    tasks: tuple[StageTask, ...] = ()


class Stop(_Message, frozen=True):
    pass


class Ready(_Message, frozen=True):
    """A stage is there: what it runs, which must be what the coordinator runs."""

    stage: int
    fingerprint: str


class Adopted(_Message, frozen=True):
    """The weights in the shared file are in use at this stage: it does not read them there again."""

    stage: int
    version: int


class Stored(_Message, frozen=True):
    """What `Settle` asked for is in the shared file; `until` is its `store`, None for `show`."""

    stage: int
    until: int | None


class Alive(_Message, frozen=True):
    stage: int


class Leaving(_Message, frozen=True):
    """The machine of this stage goes away: the virtual worker has this long."""

    stage: int
    within_s: float
    cause: str


class Failed(_Message, frozen=True):
    """This stage cannot go on. `is_task`: the fault is the task's or the model's; else it is this machine's."""

    stage: int
    error: str
    is_task: bool


Down: TypeAlias = Forward | Settle
ToStage: TypeAlias = Stop
FromStage: TypeAlias = Ready | Adopted | Stored | Alive | Leaving | Failed
AnyMessage: TypeAlias = Down | Backward | ToStage | FromStage

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> AnyMessage:
    """
    Raises:
        ValueError: not one of these records.
    """
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as exc:
        raise ValueError(f"expected a message between stages: {exc}") from exc
