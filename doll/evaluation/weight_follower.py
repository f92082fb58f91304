"""A reader of the versions of a job's model: from blobs while the job runs, otherwise from checkpoints.

The evaluator and the model server use it. The moving average of the weights (`training.ema`) is only in checkpoints.
Rows of tables are also read from checkpoints. A reader can also follow changed rows, which the server then publishes.
In this case, checkpoints are read only for unchanged rows, and if the reader has missed changes.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from doll.config import JobConfig
from doll.errors import BlobError, CheckpointError, ServiceUnavailableError
from doll.evaluation.stored_weights import Place, StoredWeights, newest_weights, place_of
from doll.ledger.lineage import Lineage, LineageChange, UpdatesRecord
from doll.model.flat_model import FlatModel
from doll.records.control import AnyRecord, TermStarted
from doll.storage.blobs import (
    Blobs,
    decode_latest,
    followed_key,
    latest_key,
    row_changes_key,
    scope_of,
    weights_key,
)
from doll.storage.row_changes import RENEW_S, WORD_LIVES_S, RowChanges, decode_row_changes
from doll.storage.slice_blobs import read_weights
from doll.storage.stores import open_store
from doll.tables.row_layers import NO_LAYERS, RowLayers
from doll.tables.row_slices import joined_rows, row_slices


class RowFollower:
    """The rows of tables for one version after another. It consists of two parts: the rows of a checkpoint, which are
    mapped from its file, and the rows that have changed after this checkpoint, which are in memory. It does no I/O. Not
    thread-safe, but the versions that it returns never change, and any thread may use them.

    Args:
        limit_bytes: memory limit for rows that have changed since the checkpoint.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._base: StoredWeights | None = None
        self._at = Place(0, 0)
        self._layers: Mapping[str, RowLayers] = {}

    @property
    def base(self) -> Place | None:
        """The place of the checkpoint; None: no checkpoint has been read yet."""
        return None if self._base is None else place_of(self._base)

    @property
    def num_bytes(self) -> int:
        return sum(layers.num_bytes for layers in self._layers.values())

    @property
    def needs_checkpoint(self) -> bool:
        """Whether a newer checkpoint should be read, because many rows have changed."""
        return self._base is None or self.num_bytes > self._limit_bytes // 2

    def rebase(self, checkpoint: StoredWeights) -> None:
        """Use the rows of a newer checkpoint for all rows that have not changed since this checkpoint."""
        at = place_of(checkpoint)
        if at.term == self._at.term and at.version <= self._at.version:
            self._layers = {name: layers.after(at.version) for name, layers in self._layers.items()}
        else:
            self._layers, self._at = {}, at
        self._base = checkpoint

    def advance(
        self, to: Place, read: Callable[[int], RowChanges | None], is_newest: Callable[[Place], bool]
    ) -> str:  # fmt: skip
        """Advance to the rows of a published version. Return "" if this succeeds. If it fails, return the reason.

        Args:
            to: place of the version.
            read: function that returns the published changes of a version of this term; None if they do not exist.
            is_newest: function that returns True if no checkpoint is newer than this place. If it raises, the rows do
                not change.
        """
        if self._base is None:
            return "no checkpoint has been read yet"
        base = place_of(self._base)
        is_same_term = self._at.term == to.term
        # A new term continues from a checkpoint: later versions of the previous term are void.
        at, layers = (self._at, self._layers) if is_same_term else (base, {})
        if to == at:
            return ""
        if to.version <= at.version or to.term < base.term:
            return f"term {to.term} has no rows yet above those of the checkpoint of version {base.version}"
        chain: list[RowChanges] = []
        version, num_bytes = to.version, sum(each.num_bytes for each in layers.values())
        while version > at.version:
            changes = read(version)
            if changes is None:
                return f"the rows of version {version} are not published: the next checkpoint has them"
            chain.append(changes)
            version = changes.since
            num_bytes += changes.num_bytes
            if num_bytes > self._limit_bytes:
                return (
                    f"the rows that have changed since the checkpoint of version {base.version} take more than "
                    f"{self._limit_bytes / 1e6:g} MB of memory: raise --row-memory-mb, or save checkpoints more often"
                )
        # Another checkpoint may have the same number, if a server has gone back to one before a damaged checkpoint.
        if at.term != to.term and not (version == chain[-1].began == base.version and is_newest(base)):
            return f"term {to.term} went on from version {chain[-1].began}, whose checkpoint has not been read yet"
        for changes in reversed(chain):
            layers = {
                name: layers.get(name, NO_LAYERS).with_rows(rows, changes.version)
                for name, rows in changes.rows.items()
            }
        self._at, self._layers = to, layers
        return ""

    def with_weights(self, weights: npt.NDArray[np.float32], run_id: str) -> StoredWeights:
        """Return the version of the last `advance`, with its weights."""
        assert self._base is not None, "expected a checkpoint before a version"
        term, version = self._at
        return self._base._replace(
            term=term, version=version, weights=weights, layers=self._layers, samples=-1, run_id=run_id
        )


_CHECKPOINTS_EVERY_S: Final = 0.5
_UNREADABLE_S: Final = 30.0  # seconds between attempts to read unreadable checkpoints, while versions are published
BLOBS: Final = "blobs"
CHECKPOINTS: Final = "checkpoints"
ROWS: Final = "rows"


class WeightFollower:
    """Reads versions on request. Not thread-safe.

    Args:
        blobs: store of the published weights; None: this process cannot reach the store.
        run_folder: folder of the checkpoints, unless `checkpoint.folder` is set.
        model: model of the job, for the shapes of the weights; it is not changed.
        average: whether to read the moving average instead of the weights. None: read it if checkpoints have one.
        after_term: terms up to this one belong to earlier runs.
        row_bytes: memory limit for changed rows of tables, which the reader then follows. None: checkpoints only.

    Attributes:
        blobs: as the argument; may be replaced if the job has other services.
        run_id: run id of the newest term, which is a part of all keys in the blob store. "": not known.
        unavailable: reasons why `newest` may miss versions, by the part that does not answer (`BLOBS`, `CHECKPOINTS`)
            or lacks rows (`ROWS`).
    """

    def __init__(
        self, config: JobConfig, blobs: Blobs | None, run_folder: Path, model: FlatModel, *,
        average: bool | None = None, after_term: int = 0, row_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.blobs = blobs
        self.run_id = ""
        self.unavailable: dict[str, str] = {}
        self.has_average = config.training.ema is not None if average is None else average
        self.reads_checkpoints = model.tables is not None or self.has_average
        self._rows: RowFollower | None = None
        if row_bytes is not None and model.tables is not None and not self.has_average:
            self._rows = RowFollower(row_bytes)
        self._table_shapes = {} if model.tables is None else model.tables.shapes
        self._renew_at_s = float("-inf")
        self._config = config
        self._run_folder = run_folder
        self._model = model
        self._average = average
        self._after_term = after_term
        self._clock = clock
        self._lineage = Lineage()
        self._look_at_s = float("-inf")
        self._beside: Place | None = None
        self._look_again_at_s = float("-inf")

    @property
    def row_bytes(self) -> int:
        return 0 if self._rows is None else self._rows.num_bytes

    def feed(self, record: AnyRecord) -> None:
        """Process a record of `updates`, which may begin another run or another term."""
        if not isinstance(record, UpdatesRecord) or record.term <= self._after_term:
            return
        change = self._lineage.feed(record)
        if isinstance(record, TermStarted) and change is not LineageChange.FENCED:
            self.run_id = record.run_id

    def newest(self, beside: Place | None = None) -> StoredWeights | None:
        """Return the newest version; None if it is not newer than `beside`, or no source answers (see
        `unavailable`)."""
        if self._rows is not None:
            return self._newest_with_rows(self._rows, beside)
        is_published = False
        if not self.reads_checkpoints and self.blobs is not None:
            try:
                place = self.published_place()
                is_published = place is not None
                is_new = place is not None and (beside is None or place > beside)
                stored = self.published_version(*place) if place is not None and is_new else None
            except (ServiceUnavailableError, BlobError) as exc:
                self.unavailable[BLOBS] = str(exc)
            else:
                self.unavailable.pop(BLOBS, None)
                if stored is not None:
                    return stored
        return None if is_published else self._look_at_checkpoints(beside)

    def _look_at_checkpoints(self, beside: Place | None) -> StoredWeights | None:
        """Return the newest checkpoint if it is newer than `beside`. Checkpoints are read at most every 0.5 s."""
        if self._clock() < self._look_at_s:
            return None
        self._look_at_s = self._clock() + _CHECKPOINTS_EVERY_S
        try:
            stored = self.checkpointed(beside)
        except CheckpointError as exc:
            self.unavailable[CHECKPOINTS] = str(exc)
            return None
        self.unavailable.pop(CHECKPOINTS, None)
        return stored

    def _newest_with_rows(self, rows: RowFollower, beside: Place | None) -> StoredWeights | None:
        """Return the newest weights: published dense weights and changed rows, with the other rows of a checkpoint."""
        stored, is_there = self._published_with_rows(rows, beside)
        if is_there and not rows.needs_checkpoint:
            return stored
        checkpoint = self._look_at_checkpoints(rows.base)
        if checkpoint is None:
            return stored
        rows.rebase(checkpoint)
        if stored is None and not is_there:
            stored, is_there = self._published_with_rows(rows, beside)
        if stored is None and not is_there and (beside is None or place_of(checkpoint) > beside):
            return checkpoint
        return stored

    def _published_with_rows(self, rows: RowFollower, beside: Place | None) -> tuple[StoredWeights | None, bool]:
        """Return the newest published version if it is newer than `beside`, otherwise None. Also return whether the
        caller then has the newest published version."""
        if self.blobs is None:
            return None, False
        stored, is_there, problem = None, False, ""
        try:
            self._say_that_rows_are_followed()
            place = self.published_place()
            if place is not None and beside is not None and place <= beside:
                is_there = True
            elif place is not None and (weights := self.published_version(*place)) is not None:
                read = partial(self._row_changes, place.term)
                problem = rows.advance(place, read, self._is_newest_checkpoint)
                if is_there := not problem:
                    stored = rows.with_weights(weights.weights, self.run_id)
        except (ServiceUnavailableError, BlobError) as exc:
            self.unavailable[BLOBS] = str(exc)
            return None, False
        except CheckpointError as exc:
            self.unavailable[CHECKPOINTS] = str(exc)
            return None, False
        self.unavailable.pop(BLOBS, None)
        self.unavailable.pop(ROWS, None)
        if problem:
            self.unavailable[ROWS] = problem
        return stored, is_there

    def _say_that_rows_are_followed(self) -> None:
        """Report to the server that rows are followed. It publishes changed rows only while it gets such messages."""
        if self.blobs is not None and self.run_id and self._clock() >= self._renew_at_s:
            self._renew_at_s = self._clock() + RENEW_S
            for key in self._model.slices.keys(followed_key(self._scope)):
                self.blobs.put(key, [secrets.token_bytes(8)], WORD_LIVES_S)

    def _is_newest_checkpoint(self, place: Place) -> bool:
        held = open_store(self._config, self._run_folder).versions()
        return bool(held) and place >= held[-1]

    def _row_changes(self, term: int, version: int) -> RowChanges | None:
        keys = self._model.slices.keys(row_changes_key(self._scope, term, version))
        parts = []
        for key, part in zip(keys, row_slices(len(keys)), strict=True):
            data = None if self.blobs is None else self.blobs.get(key)
            if data is None:
                return None
            shapes = part.shapes(self._table_shapes)
            parts.append(decode_row_changes(data, shapes, job=self._scope, version=version))
        if len({(changes.since, changes.began) for changes in parts}) > 1:
            return None  # a shard has begun to publish later than another one
        rows = {name: joined_rows([changes.rows[name] for changes in parts]) for name in self._table_shapes}
        return parts[0]._replace(rows=rows)

    def rolled_back(self, beside: Place) -> StoredWeights | None:
        """Return the newest checkpoint if its term is later than that of `beside`, the newest version that was read.

        While no server leads, the blob store keeps the last published version, and `doll rollback` may save another one
        as a checkpoint.
        """
        if self.blobs is None or (self.reads_checkpoints and self._rows is None):
            return None  # `newest` reads checkpoints in this case
        if beside != self._beside:  # a new version was published, so a server leads
            self._beside, self._look_again_at_s = beside, self._clock() + _CHECKPOINTS_EVERY_S
        if self._clock() < self._look_again_at_s:
            return None
        self._look_again_at_s = self._clock() + _CHECKPOINTS_EVERY_S
        try:
            stored = self.checkpointed(Place(beside.term, sys.maxsize))
        except CheckpointError:  # the published version is still used
            self._look_again_at_s += _UNREADABLE_S
            return None
        if stored is not None and self._rows is not None:
            self._rows.rebase(stored)
        return stored

    def load(self, version: int) -> StoredWeights:
        """Return the weights of this version. Raises CheckpointError if it is neither published nor in a checkpoint."""
        if not self.reads_checkpoints and self.blobs is not None and (term := self._lineage.newest_term):
            try:
                stored = self.published_version(term, version)
            except (ServiceUnavailableError, BlobError):
                stored = None  # the version may be in a checkpoint
            if stored is not None:
                return stored
        stored = self.checkpointed(version=version)
        if stored is None:
            raise CheckpointError(f"no checkpoint of version {version} yet")
        return stored

    def published_place(self) -> Place | None:
        """Return the place of this run's newest version in the blob store; None if there is none. Raises
        ServiceUnavailableError if the blob store does not answer, and BlobError if the pointer to weights is wrong."""
        if self.blobs is None or (pointer := self.blobs.get(latest_key(self._scope))) is None:
            return None
        latest = decode_latest(pointer)
        # The store may still have versions of an earlier run, or of a server before this term.
        if latest.term < self._lineage.newest_term or not self.is_current(latest.term):
            return None
        return Place(latest.term, latest.version)

    def published(self, beside: Place | None = None) -> StoredWeights | None:
        """Return the newest published weights; None if there are none, or they are the weights of `beside`. Raises
        ServiceUnavailableError or BlobError (as `published_place`)."""
        place = self.published_place()
        return None if place is None or place == beside else self.published_version(*place)

    def published_version(self, term: int, version: int) -> StoredWeights | None:
        """Return the weights of this version from the blob store; None if the store does not have them (any more).

        The weights may be a view of shared memory. In this case, release them soon.

        Raises:
            ServiceUnavailableError: the blob store does not answer.
            BlobError: the blob is damaged, or of another model.
        """
        if self.blobs is None:
            return None
        key = weights_key(self._scope, term, version)
        weights = read_weights(self.blobs, key, self._model.slices, job=self._scope, version=version)
        if weights is None:
            return None
        return StoredWeights(version, weights, term, "", {}, {}, run_id=self.run_id)

    def checkpointed(self, beside: Place | None = None, version: int | None = None) -> StoredWeights | None:
        """Return the weights of the newest checkpoint, or of `version`. Return None if no checkpoint is newer than
        `beside`, or if the newest one belongs to an earlier run.

        Raises:
            CheckpointError: the checkpoint cannot be read, or is not of this job and model; or there is no checkpoint
                of `version`.
        """
        stored = newest_weights(
            self._config, self._run_folder, self._model, version=version, beside=beside, average=self._average,
            in_place=self._rows is not None,
        )  # fmt: skip
        if stored is None or not self.is_current(stored.term):
            return None
        if stored.run_id and (not self.run_id or stored.term >= self._lineage.newest_term):
            self.run_id = stored.run_id
        return stored

    def is_current(self, term: int) -> bool:
        """Return whether versions of this term belong to the current run."""
        return term > self._after_term and self._lineage.is_current(term)

    @property
    def _scope(self) -> str:
        return scope_of(self._config.job, self.run_id)
