"""Checkpoints of the parameter server: the engine's part of a checkpoint, and a thread that writes checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import msgspec

from doll.errors import CheckpointError
from doll.ps.engine.events import EngineSnapshot
from doll.records.bounded import short
from doll.storage.checkpoints import Checkpoint, VersionStore
from doll.telemetry import get_logger

log = get_logger(__name__)

_RETRY_S = 1.0


def encode_snapshot(snapshot: EngineSnapshot) -> bytes:
    """Encode the engine's part of a checkpoint, `Checkpoint.state`."""
    return msgspec.msgpack.encode(snapshot)


def decode_snapshot(checkpoint: Checkpoint) -> EngineSnapshot:
    """Return the engine's part of a checkpoint. Raises CheckpointError if this build cannot read the part."""
    try:
        return msgspec.msgpack.decode(checkpoint.state, type=EngineSnapshot)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise CheckpointError(
            f"version {checkpoint.version} of job {checkpoint.job!r} holds no engine state that this build reads: use "
            f"the release that wrote it ({short(exc)})"
        ) from exc


class CheckpointWriter:
    """A writer of checkpoints, in a separate thread. A checkpoint is written after its update records are in Kafka.

    A save that fails is tried again, because a store may be unreachable for a while.
    """

    def __init__(
        self,
        store: VersionStore,
        *,
        acknowledged: Callable[[], int],
        retry_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            acknowledged: returns the number of update records that Kafka has acknowledged.
            retry_timeout_s: seconds for which saves may fail before this is an error.
            clock: monotonic seconds.
        """
        self._store = store
        self._acknowledged = acknowledged
        self._retry_timeout_s = retry_timeout_s
        self._clock = clock
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._ordered: tuple[int, Checkpoint] | None = None
        self._saving: tuple[Checkpoint, Future[None]] | None = None
        self._failing_since_s: float | None = None
        self._retry_at_s = 0.0

    def order(self, checkpoint: Checkpoint, *, after_records: int) -> int | None:
        """Save `checkpoint` when Kafka has acknowledged `after_records` update records. Return the version whose
        checkpoint will not be saved any more, because this one takes its place; None if there is none."""
        replaced = None if self._ordered is None else self._ordered[1].version
        self._ordered = (after_records, checkpoint)
        return replaced

    def poll(self) -> int | None:
        """Start due writes and collect finished ones. Return the version that has become durable, or None.

        Raises:
            FencedError: a newer parameter server has claimed the job.
            CheckpointError: saves have failed for longer than `retry_timeout_s`.
        """
        if self._ordered is not None and self._saving is None and self._clock() >= self._retry_at_s:
            needed, checkpoint = self._ordered
            if self._acknowledged() >= needed:
                self._ordered = None
                self._saving = (checkpoint, self._executor.submit(self._store.save, checkpoint))
        if self._saving is None or not self._saving[1].done():
            return None
        checkpoint, future = self._saving
        self._saving = None
        try:
            future.result()
        except CheckpointError as exc:
            now = self._clock()
            self._failing_since_s = now if self._failing_since_s is None else self._failing_since_s
            if now - self._failing_since_s > self._retry_timeout_s:
                raise
            log.warning("checkpoint_not_saved", error=str(exc), action="trying again")
            self._retry_at_s = now + _RETRY_S
            self._ordered = (0, checkpoint)
            return None
        self._failing_since_s = None
        return checkpoint.version

    def wait(self) -> None:
        """Wait until the current save ends. A failed save raises no error here: the caller decides whether to save
        again. Raises FencedError if a newer parameter server has claimed the job."""
        if self._saving is not None:
            with suppress(CheckpointError):
                self._saving[1].result()

    def close(self) -> None:
        self._executor.shutdown(wait=True)
