"""Port: where the model lives at the parameter server. It takes in gradients, makes versions and publishes weights.

`doll.ps.model.local_host.LocalModelHost` keeps all of it in the server's own process. A host of several processes, each
with a slice of the flat vector, is another adapter: it passes every call on to its slices and returns when all have
done it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

from doll.ps.engine.events import ApplyUpdate, FetchGradient, GradientFetched, GradientLost
from doll.ps.model.updater import HoldsTensors
from doll.ps.tables.bounded_ids import Totals
from doll.ps.tables.row_server import StoredRows
from doll.records.control import GetRows
from doll.storage.blobs import Buffer


class FetchOutcome(NamedTuple):
    """The outcome of a FetchGradient.

    Attributes:
        event: for the engine.
        blob: the gradient as the worker stored it, for the event log; None if it was lost.
        num_sent: numbers in the blob.
        plain_row_bytes: of its rows of tables, before coding: 8 bytes for each key.
    """

    event: GradientFetched | GradientLost
    blob: Buffer | None = None
    num_sent: int = 0
    plain_row_bytes: int = 0


class ModelHost(HoldsTensors, Protocol):
    """The model of one term. Calls block until they are done; not thread-safe.

    Every call may raise ServiceUnavailableError if the blob store is away and waiting for it is given up.
    """

    @property
    def num_values(self) -> int:
        """Numbers in the flat vector."""
        ...

    def fetch(self, order: FetchGradient) -> FetchOutcome:
        """Get this gradient and keep it until its update. A torn, foreign or missing one is reported as lost.

        Raises:
            DivergedError: too many in a row were not finite. The host must not be used any more.
        """
        ...

    def prefetch(self, keys: Sequence[str], coming: Sequence[str] = ()) -> None:
        """Gradients under these keys will probably be fetched now. Those of `coming`, some of them, are on their way to
        the store: `fetch` waits for them, for a while."""

    def is_reading(self, key: str) -> bool:
        """Whether the gradient under this key is on its way since `prefetch`: `fetch` would wait for it."""
        ...

    def apply(self, update: ApplyUpdate) -> int:
        """Make the version of `update` from its gradients; how many samples it learned from.

        Raises:
            DivergedError: a number is not finite. The host must not be used any more.
        """
        ...

    def publish(self, version: int) -> str:
        """The blob key of the weights, which workers can read when this returns. May be repeated; costs nothing then.

        Args:
            version: that of the weights now; or an older one, which is not published any more: only its key is
                returned.
        """
        ...

    def republish(self, version: int) -> str:
        """Publish a version again: a worker has not found its blob."""
        ...

    def release(self, version: int) -> None:
        """Release a version that no grant names any more: the next `tidy` may delete its blob."""
        ...

    def tidy(self, named: Container[int] = ()) -> None:
        """Do what no worker waits for: point at the newest published weights, delete blobs that nobody needs now.

        Called after each event of the engine, when its grants are sent; costs nothing if nothing is to be done.

        Published weights live while they are among the newest (`blobs.keep_versions`), and then while a grant names
        them, until `release`. Of those older ones there is at most one for each worker, or two if it may have
        several pushes under way: the oldest go first.

        Args:
            named: versions that grants name.
        """
        ...

    def store_rows(self, request: GetRows, version: int, *, subscribes: bool) -> StoredRows:
        """Put the rows of tables that a worker asks for into the blob store, as they are now.

        Args:
            version: the newest.
            subscribes: `changed_rows` is to have them from now on.

        Raises:
            BlobError: the request is not whole, or not for this model's tables.
        """
        ...

    def changed_rows(self, worker: int, version: int) -> StoredRows | None:
        """Put the rows that `worker` has asked for into the blob store: rows that have changed since the last call;
        None if it has asked for none."""
        ...

    def forget_rows(self, worker: int) -> None:
        """A new process of `worker` has asked for no rows."""

    def table_totals(self) -> Mapping[str, Totals]:
        """The totals of bounded tables, by name."""
        ...

    def drop(self, key: str, held: int = 0) -> None:
        """Delete the blob of a gradient that will not be applied; forget the set `held`, if that is not 0."""
        ...

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Weights and state by name, for a checkpoint. They stay as they are."""
        ...
