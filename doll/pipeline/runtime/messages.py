"""Records between a virtual worker's coordinator and its stages.

`Forward` and `StageOrders` go down the chain, from the coordinator to the last stage, and `Backward` comes up again;
arrays travel after them. Each stage takes what it receives in the order in which it comes, so all stages make the same
steps in the same order. The other records go between the coordinator and one stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from doll.errors import SampleError
from doll.task import trees
from doll.task.trees import Array, Tree


class Commit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A minibatch is complete: each stage steps on its gradient, or drops it, and its slot is free.

    Attributes:
        batch: its number in the worker's stream.
        slot: where its gradient is; -1: no gradient.
        scale: what the gradient is multiplied by, so that it is the mean; 0: it is dropped.
        weight: sum of the weights of the minibatch's samples.
        ends_wave: it is the last of its wave.
    """

    batch: int
    slot: int
    scale: float
    weight: float
    ends_wave: bool = False


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    pass


class Forward(_Message, frozen=True):
    """Compute this minibatch, on the weights of `version` with the worker's own steps that these do not hold.

    Arrays: those of x for the first stage, or the activations of the stage before for the others; those of y; weights
    and groups if there are any.

    Attributes:
        received, target: x or activations, and y, as `doll.task.trees.plain_of` has them: their numbers are places
            among the arrays.
        weight: sum of the weights of the samples.
        has_weights, has_groups: what follows them.
        slot: of the N_m in which its weights are kept until its backward pass.
        included: batches of this worker's stream that `version` holds.
        commits: come before it.
        seed: of its random numbers; each stage has its own of it.
    """

    batch: int
    slot: int
    num_samples: int
    version: int
    included: int
    seed: int = 0
    commits: tuple[Commit, ...] = ()
    received: Any = 0
    target: Any = 1
    weight: float = 0.0
    has_weights: bool = False
    has_groups: bool = False


class StageOrders(_Message, frozen=True):
    """The orders between two minibatches.

    Attributes:
        commits: come first.
        forget_from: the steps of this batch and later ones are void; None: none are.
        store: write the sum of the steps of the wave that ends below this batch to the shared file; None: nothing.
        show: write the weights with all own steps there.
        version, included: as in `Forward`, if a stage before has failed on a minibatch that was to be computed on
            them; -1: none has.
    """

    commits: tuple[Commit, ...] = ()
    forget_from: int | None = None
    store: int | None = None
    show: bool = False
    version: int = -1
    included: int = 0


class StageTask(msgspec.Struct, frozen=True, array_like=True):
    """The work of one stage, in seconds of the machine's monotonic clock. `kind`: F, B, or FB."""

    stage: int
    kind: str
    batch: int
    start_s: float
    end_s: float


class Backward(_Message, frozen=True):
    """The gradient of this minibatch is in its slot at the stage that sends this, and at all after it.

    Arrays: the gradients of the activations that the receiver had sent, of those that have one.

    Attributes:
        of: which of the activations these are of.
        weight: as in `Forward`.
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
    of: tuple[int, ...] = ()
    weight: float = 0.0


class StopStage(_Message, frozen=True):
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
    """The answer to `StageOrders`: all is in the shared file; `until` is its `store`, None for `show`."""

    stage: int
    until: int | None


class StageAlive(_Message, frozen=True):
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


Down: TypeAlias = Forward | StageOrders
ToStage: TypeAlias = StopStage
FromStage: TypeAlias = Ready | Adopted | Stored | StageAlive | Leaving | Failed
AnyMessage: TypeAlias = Down | Backward | ToStage | FromStage


class Payload(NamedTuple):
    """The payload that goes down the chain with a minibatch; trees of arrays, see `doll.task.trees`.

    Attributes:
        received: x, or the activations of the stage before.
        target: y.
        weight, group: of each sample, as in `doll.task.batches.SampleBatch`.
    """

    received: Tree
    target: Tree
    weight: Array | None = None
    group: Array | None = None

    def to_message(self, message: Forward) -> tuple[Forward, list[Array]]:
        """The message with this payload, and the arrays that follow it."""
        received, received_plain = trees.numbered(self.received)
        target, target_plain = trees.numbered(self.target, len(received))
        more = [part for part in (self.weight, self.group) if part is not None]
        whole = msgspec.structs.replace(
            message, received=received_plain, target=target_plain, has_weights=self.weight is not None,
            has_groups=self.group is not None,
        )  # fmt: skip
        return whole, [*received, *target, *more]

    @classmethod
    def from_message(cls, message: Forward, arrays: Sequence[Array]) -> Payload:
        """
        Raises:
            ValueError: these are not the arrays of this message.
        """
        left = list(arrays)
        try:
            group = left.pop() if message.has_groups else None
            weight = left.pop() if message.has_weights else None
            return cls(trees.from_plain(message.received, left), trees.from_plain(message.target, left), weight, group)
        except (IndexError, SampleError) as exc:
            raise ValueError(f"expected the arrays of a minibatch, got {len(arrays)}: {exc}") from exc


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
