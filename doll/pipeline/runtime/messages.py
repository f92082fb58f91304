"""Records between a virtual worker's coordinator and its stages.

`Forward` and `StageOrders` go from the coordinator down the chain to the last stage; `Backward` goes back up the chain.
Arrays follow these records. Each stage processes records in the order of their arrival, so all stages take the same
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
    """A minibatch is complete: each stage applies its gradient as a step, or drops it, and frees its slot.

    Attributes:
        slot: slot of its gradient; -1: no gradient.
        scale: factor that makes the gradient the mean; 0: the gradient is dropped.
        weight: sum of the weights of the minibatch's samples.
        lr_factor: factor of the learning rate of the step.
        ends_wave: whether it is the last minibatch of its wave.
    """

    batch: int
    slot: int
    scale: float
    weight: float
    lr_factor: float = 1.0
    ends_wave: bool = False


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    pass


class Forward(_Message, frozen=True):
    """Compute this minibatch on the weights of `version` plus the worker's own steps that `version` lacks.

    The arrays are x for the first stage, or the activations of the stage before for other stages; then y; then weights
    and groups, if there are any.

    Attributes:
        received, target: x or activations, and y, in the form of `doll.task.trees.plain_of`, with indexes of arrays.
        weight: sum of the weights of the samples.
        has_weights, has_groups: whether arrays of weights and groups follow.
        slot: one of the N_m slots, which keeps the weights of this minibatch until its backward pass.
        term: term of the server that published `version`; a later term may use its number for other weights.
        included: number of batches of this worker's stream that `version` includes.
        commits: commits to apply before this minibatch.
        seed: seed of its random numbers; each stage derives its own seed from it.
    """

    batch: int
    slot: int
    num_samples: int
    version: int
    included: int
    term: int = 0
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
        forget_from: the steps of this batch and of later ones are void; None: no steps are void.
        store: write the sum of the steps of the wave that ends below this batch to the shared file; None: write none.
        show: write the weights, with all own steps, to the shared file.
        version, included, term: as in `Forward`, if an earlier stage failed on the first minibatch of this version; -1:
            no stage failed.
    """

    commits: tuple[Commit, ...] = ()
    forget_from: int | None = None
    store: int | None = None
    show: bool = False
    version: int = -1
    included: int = 0
    term: int = 0


class StageTask(msgspec.Struct, frozen=True, array_like=True):
    """The work of one stage, in seconds of the machine's monotonic clock. `kind`: F (forward), B (backward), or FB."""

    stage: int
    kind: str
    batch: int
    start_s: float
    end_s: float


class Backward(_Message, frozen=True):
    """The gradient of this minibatch is in the slot at the stage that sends this message and at all later stages.

    The arrays are the gradients of the activations that the receiver sent, except activations that have no gradient.

    Attributes:
        of: indexes of the activations that these gradients belong to.
        weight: as in `Forward`.
        loss_sum, metric_sums: sums over the samples.
        squares: sum of the squares of the gradient's numbers at these stages.
        buffer_squares: sum of the squares of the changes of the float buffers.
        problem: reason why there is no gradient; "": there is a gradient.
        tasks: tasks of all stages that have computed the minibatch.
    """

    batch: int
    slot: int
    num_samples: int
    loss_sum: float = 0.0
    metric_sums: Mapping[str, float | bytes] = {}
    squares: float = 0.0
    buffer_squares: float = 0.0
    problem: str = ""
    tasks: tuple[StageTask, ...] = ()
    of: tuple[int, ...] = ()
    weight: float = 0.0


class StopStage(_Message, frozen=True):
    pass


class Begin(_Message, frozen=True):
    """All stages of a gang on other machines are there, so the receiver connects to the next one.

    Attributes:
        host, port: address of the next stage; port 0: the receiver is the last stage.
        layers: names of the receiver's layers, as the worker has cut the model.
    """

    host: str
    port: int
    layers: tuple[str, ...]


class Part(_Message, frozen=True):
    """Values of the model's vector from position `at` on, for or from a stage on another machine: an array of float32,
    shape (n,). From a stage, `Stored` follows the last part.

    Attributes:
        term, version: to a stage, the pulled weights that are complete with this part; -1: they are not.
    """

    at: int
    term: int = -1
    version: int = -1


class Ready(_Message, frozen=True):
    """A stage is ready. It reports its fingerprint, which must be equal to the coordinator's.

    Attributes:
        ranges: first position and length of the stage's parts of the model's vector, if the stage is on another
            machine.
    """

    stage: int
    fingerprint: str
    ranges: tuple[tuple[int, int], ...] = ()


class Adopted(_Message, frozen=True):
    """This stage now uses the weights in the shared file, and will not read the file again for them."""

    stage: int
    version: int


class Stored(_Message, frozen=True):
    """The answer to `StageOrders`: all data is in the shared file; `until` is the value of `store`, None for `show`."""

    stage: int
    until: int | None


class StageAlive(_Message, frozen=True):
    """The process of this stage runs. A worker sends it back to stages on other machines: its own process runs."""

    stage: int


class Leaving(_Message, frozen=True):
    """The machine of this stage will be taken away: the virtual worker has this many seconds to leave."""

    stage: int
    within_s: float
    cause: str


class Failed(_Message, frozen=True):
    """This stage cannot continue. `is_task`: the cause is the task or the model; otherwise it is this machine."""

    stage: int
    error: str
    is_task: bool


Down: TypeAlias = Forward | StageOrders
ToStage: TypeAlias = StopStage | Begin | Part | StageAlive
FromStage: TypeAlias = Ready | Adopted | Part | Stored | StageAlive | Leaving | Failed
AnyMessage: TypeAlias = Down | Backward | ToStage | FromStage


def rest_of(message: Forward) -> StageOrders:
    """Return the orders of a message whose minibatch is not computed."""
    return StageOrders(commits=message.commits, version=message.version, included=message.included, term=message.term)


class Payload(NamedTuple):
    """The data that goes down the chain with a minibatch: trees of arrays, see `doll.task.trees`.

    Attributes:
        received: x, or the activations of the stage before.
        target: y.
        weight, group: weights and groups of the samples, as in `doll.task.batches.SampleBatch`.
    """

    received: Tree
    target: Tree
    weight: Array | None = None
    group: Array | None = None

    def to_message(self, message: Forward) -> tuple[Forward, list[Array]]:
        """Return the message with this payload, and the arrays that follow the message."""
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
        """Return the payload of a message. Raise ValueError if the arrays do not belong to this message."""
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
    """Decode a record. Raise ValueError if the data is not one of these records."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as exc:
        raise ValueError(f"expected a message between stages: {exc}") from exc
