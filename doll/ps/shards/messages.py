"""The messages between the parameter server and its shards, as MessagePack. Pure.

The server sends orders. A shard carries them out in order, and answers those that the server waits for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import msgspec

from doll.errors import CheckpointError, ConfigError, DollError, RecordError
from doll.optim.optimizer import DivergedError
from doll.ps.engine.events import ApplyUpdate, FetchGradient
from doll.records.bounded import short
from doll.records.control import GetRows
from doll.storage.checkpoints import CheckpointPart

FailureKind: TypeAlias = Literal["config", "checkpoint", "diverged", "other"]


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base class of all messages."""


# --- orders ---------------------------------------------------------------------------------------------------------


class Begin(Message, frozen=True):
    """Hold the slice of `shard` in this term, from the checkpoint of `place`, (term, version), or as the model begins.
    Answered by Begun or Failed.

    Attributes:
        reply_to: name of the server's process, in the keys of the messages that follow.
    """

    term: int
    shard: int
    shards: int
    fingerprint: str
    run_id: str
    reply_to: str
    place: tuple[int, int] | None


class Fetch(Message, frozen=True):
    """Get the shard's slice of a gradient. Answered by Fetched."""

    order: FetchGradient


class AddInOrder(Message, frozen=True):
    """Add a gradient that all shards have fetched."""

    order: FetchGradient


class Prefetch(Message, frozen=True):
    """Prepare to fetch gradients; see `ModelHost.prefetch`."""

    keys: tuple[str, ...]
    coming: tuple[str, ...]


class StoreRows(Message, frozen=True):
    """Store the rows of the current version that a worker asks for; see `ModelHost.store_rows`. Answered by RowsPut."""

    request: GetRows
    version: int
    subscribes: bool


class StoreChanges(Message, frozen=True):
    """Store the changed rows of a worker; see `ModelHost.changed_rows`. Answered by RowsPut."""

    worker: int
    version: int


class ForgetRows(Message, frozen=True):
    """See `ModelHost.forget_rows`."""

    worker: int


class Apply(Message, frozen=True):
    """Make the next version. Answered by Applied; before it by Squares if the gradient is clipped by norm."""

    update: ApplyUpdate


class Squares(Message, frozen=True):
    """The squared norms of the blocks of a slice, or in an order those of all slices."""

    values: list[float]


class Publish(Message, frozen=True):
    """Publish the weights of the current version, a second time if `again`. Answered by Published."""

    version: int
    again: bool = False


class Release(Message, frozen=True):
    """See `ModelHost.release`."""

    version: int


class Tidy(Message, frozen=True):
    """See `ModelHost.tidy`. Answered by Tidied if the model has tables: readers that see the pointer to a version find
    the rows that it has changed."""

    named: tuple[int, ...]


class Drop(Message, frozen=True):
    """See `ModelHost.drop`."""

    key: str
    held: int


class Snapshot(Message, frozen=True):
    """Store the slice of the current version as a part of its checkpoint. The part is announced by PartStored.

    Attributes:
        base: version of a stored whole checkpoint. The part may contain only the rows that have changed since. None:
            the part is whole.
    """

    version: int
    base: int | None = None


class ForgetSnapshot(Message, frozen=True):
    """Do not store the part of this version any more, because its checkpoint will not be stored."""

    version: int


class End(Message, frozen=True):
    """The job has ended: exit."""


# --- answers --------------------------------------------------------------------------------------------------------


class Begun(Message, frozen=True):
    """The shard holds its slice. `process`: name of the shard's process."""

    process: str


class Fetched(Message, frozen=True):
    """The outcome of a Fetch. `lost`: reason why the gradient was lost; "": the shard has it."""

    lost: str
    max_change: float = 0.0
    num_bytes: int = 0
    num_sent: int = 0
    plain_row_bytes: int = 0


class RowsPut(Message, frozen=True):
    """The shard's part of rows is in the blob store, under the slice of `key`; see `StoredRows`. `key`: "": it is not.
    `lost`: reason why the request cannot be answered."""

    key: str
    lost: str = ""
    plain_bytes: int = 0
    coded_bytes: int = 0
    since: int = 0
    request_bytes: int = 0


class Tidied(Message, frozen=True):
    """The rows that a version has changed are in the blob store, if a reader follows them."""


class Applied(Message, frozen=True):
    """The shard has made the version."""

    num_samples: int


class Published(Message, frozen=True):
    """The slice of the weights is in the blob store."""


class PartStored(Message, frozen=True):
    """The part of a checkpoint is durable."""

    version: int
    part: CheckpointPart


class PartFailed(Message, frozen=True):
    """The part of a checkpoint could not be stored. The shard tries again."""

    version: int
    reason: str


class Failed(Message, frozen=True):
    """The shard could not carry out an order, and has left the term. The server raises the error."""

    kind: FailureKind
    reason: str


# The errors that the server raises as a shard has raised them. After all others it begins a new term.
ERRORS: Final[Mapping[FailureKind, type[DollError]]] = {
    "config": ConfigError, "checkpoint": CheckpointError, "diverged": DivergedError,
}  # fmt: skip

Order = (
    Begin | Fetch | AddInOrder | Prefetch | Apply | Squares | StoreRows | StoreChanges | ForgetRows | Publish | Release
    | Tidy | Drop | Snapshot | ForgetSnapshot | End
)  # fmt: skip
Answer = Begun | Fetched | Squares | RowsPut | Applied | Published | Tidied | PartStored | PartFailed | Failed

_ORDERS: Final = msgspec.msgpack.Decoder(Order)
_ANSWERS: Final = msgspec.msgpack.Decoder(Answer)


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_order(data: bytes) -> Order:
    """Return the order in `data`. Raise RecordError if it is none of this release."""
    order: Order = _decoded(_ORDERS, data)
    return order


def decode_answer(data: bytes) -> Answer:
    """Return the answer in `data`. Raise RecordError if it is none of this release."""
    answer: Answer = _decoded(_ANSWERS, data)
    return answer


def _decoded(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise RecordError(f"expected a message between server and shard, got {len(data)} bytes: {short(exc)}") from exc
