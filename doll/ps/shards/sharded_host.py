"""The host of a model in shards: it passes the engine's orders to all shards, and gathers their answers.

The engine is the only sequencer. Each shard carries out the same orders in the same sequence, so a version J of the
model is the version J of every slice. If a shard fails, the term ends, and the next one begins from the newest
checkpoint, as after the end of a server.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from doll.config import JobConfig
from doll.errors import BlobError, CheckpointError, DollError
from doll.model.slices import Slices
from doll.ps.engine.events import ApplyUpdate, FetchGradient, GradientFetched, GradientLost
from doll.ps.model.model_host import FetchOutcome
from doll.ps.shards import messages as m
from doll.ps.shards.pipes import Mark, ServerEnd
from doll.ps.tables.bounded_ids import Totals
from doll.ps.tables.row_server import StoredRows
from doll.records.control import GetRows, ShardStatus
from doll.storage.blobs import Blobs, Buffer, Latest, encode_latest, latest_key, scope_of, weights_key
from doll.storage.checkpoints import BaseDeletedError, Checkpoint, CheckpointPart, VersionStore
from doll.storage.contributions import decode_contribution, whole_contribution
from doll.storage.differences import Base, BaseReference, RowChanges
from doll.storage.sections import WireSize
from doll.tables.row_slices import joined_rows, row_slices
from doll.tables.rows import TableShape
from doll.telemetry import get_logger

log = get_logger(__name__)

A = TypeVar("A")

_NO_TABLES: Final[Mapping[str, TableShape]] = {}
_WAIT_S: Final = 1.0
_BEGIN_AGAIN_S: Final = 15.0  # a shard that has taken a Begin and not answered may have ended


class ShardLostError(DollError):
    """A shard has ended, or does not answer. The term ends, and the next one begins from the newest checkpoint."""


class ShardedHost:
    """The model of one term, in shards; see `ModelHost` for its methods. Calls block until all shards have answered.

    Every call may raise ShardLostError, or PipeBrokenError if Redis does not answer. Then the host must not be
    used any more.
    """

    def __init__(
        self, config: JobConfig, term: int, slices: Slices, ends: Sequence[ServerEnd], blobs: Blobs, *, run_id: str,
        process: str, wait: Callable[[str], object] = lambda waits_for: None, keeps_gradients: bool = False,
        tables: Mapping[str, TableShape] = _NO_TABLES,
    ) -> None:  # fmt: skip
        """
        Args:
            tables: shapes of the model's tables, by name.
            ends: the pipes to the shards, in order.
            process: name of this process, to which the shards answer.
            wait: is called about once a second while this host waits, with what it waits for. It may raise an error.
            keeps_gradients: whether `fetch` returns gradients, for an event log.
        """
        self._scope = scope_of(config.job, run_id)
        self._run_id, self._process = run_id, process
        self._term, self._slices, self._ends, self._blobs = term, slices, ends, blobs
        self._tables = tables
        self._ttl_s = config.blobs.ttl_s
        self._wait, self._keeps_gradients = wait, keeps_gradients
        self._processes: list[str] = []
        self._published = self._pointed_at = -1
        self._is_tidy = True
        self._version = 0
        self._parts: dict[int, dict[int, CheckpointPart]] = {}  # stored parts by version and shard
        self._base: Base | None = None  # the newest whole checkpoint of this term that is durable
        self._ordered = m.Snapshot(-1)  # the last one
        self._is_closed = threading.Event()
        self._marks = dict[int, Mark | None].fromkeys(range(len(ends)))  # None: the shard is lost
        self._stored: dict[int, int] = {}  # the version of the newest part of each shard

    @property
    def num_values(self) -> int:
        return self._slices.numel

    def begin(self, fingerprint: str, place: tuple[int, int] | None, leave: Callable[[], bool]) -> bool:
        """Wait until every shard holds its slice of the checkpoint of `place`, (term, version), or of the first model.
        Return False if `leave` returns True first."""
        self._version = 0 if place is None else place[1]
        orders = [
            m.encode(m.Begin(self._term, number, len(self._slices), fingerprint, self._run_id, self._process, place))
            for number in range(len(self._ends))
        ]
        for end, order in zip(self._ends, orders, strict=True):
            end.begin(order)
        for number, end in enumerate(self._ends):
            waited_s = 0.0
            while (data := end.receive(_WAIT_S)) is None:
                if leave():
                    return False
                self._wait(f"shard {number}")
                waited_s += _WAIT_S
                if waited_s >= _BEGIN_AGAIN_S:
                    end.begin(orders[number])
                    waited_s = 0.0
            answer = self._checked(number, m.decode_answer(data))
            if not isinstance(answer, m.Begun):
                raise ShardLostError(f"shard {number}: expected Begun, got {type(answer).__name__}")
            self._processes.append(answer.process)
        self._require_alive()
        return True

    def fetch(self, order: FetchGradient) -> FetchOutcome:
        answers = self._ask(m.Fetch(_with_order(order, in_order=False)), m.Fetched)
        lost = next((answer.lost for answer in answers if answer.lost), "")
        blob: Buffer | None = None
        if self._keeps_gradients and not lost:
            try:
                blob = self._gradient(order)
            except BlobError as exc:
                lost = str(exc)
        if lost:
            for answer, end in zip(answers, self._ends, strict=True):
                if not answer.lost:
                    end.send(m.encode(m.Drop(order.key, order.grant_id)))
            return FetchOutcome(GradientLost(grant_id=order.grant_id, reason=lost))
        if order.in_order:
            self._tell(m.AddInOrder(order))
        return FetchOutcome(
            GradientFetched(grant_id=order.grant_id, max_change=max(answer.max_change for answer in answers)),
            blob, sum(answer.num_bytes for answer in answers), sum(answer.num_sent for answer in answers),
            sum(answer.plain_row_bytes for answer in answers),
        )  # fmt: skip

    def _gradient(self, order: FetchGradient) -> Buffer:
        """Return the whole gradient as one blob, for the event log."""
        parts = []
        for number, (part, rows) in enumerate(zip(self._slices, row_slices(len(self._slices)), strict=True)):
            data = self._blobs.get(self._slices.key(order.key, number))
            if data is None:
                raise BlobError(f"slice {number} of {order.key} has expired")
            parts.append(
                decode_contribution(
                    data,
                    part.num_parameters,
                    job=self._scope,
                    version=order.version,
                    numel=part.size,
                    tables=rows.shapes(self._tables),
                )
            )
        values = np.concatenate([part.values for part in parts])
        num_parameters = sum(part.num_parameters for part in self._slices)
        of_tables = {name: joined_rows([part.rows[name] for part in parts]) for name in parts[0].rows}
        return b"".join(
            whole_contribution(values, num_parameters, of_tables, self._tables, job=self._scope, version=order.version)
        )

    def prefetch(self, keys: Sequence[str], coming: Sequence[str] = ()) -> None:
        self._tell(m.Prefetch(tuple(keys), tuple(coming)))

    def is_reading(self, key: str) -> bool:
        return False  # `fetch` waits for the shards

    def apply(self, update: ApplyUpdate) -> int:
        self._tell(m.Apply(update))
        answers = self._gather((m.Applied, m.Squares))
        if any(isinstance(answer, m.Squares) for answer in answers):
            squares = [value for answer in answers if isinstance(answer, m.Squares) for value in answer.values]
            self._tell(m.Squares(squares))
            answers = self._gather((m.Applied,))
        self._version, self._is_tidy = update.version, False
        return int(answers[0].num_samples)

    def publish(self, version: int) -> str:
        if version > self._published:
            self._ask(m.Publish(version), m.Published)
            self._published, self._is_tidy = version, False
        return weights_key(self._scope, self._term, version)

    def republish(self, version: int) -> str:
        self._ask(m.Publish(version, again=True), m.Published)
        self._pointed_at, self._is_tidy = -1, False
        return weights_key(self._scope, self._term, version)

    def release(self, version: int) -> None:
        self._tell(m.Release(version))
        self._is_tidy = False

    def tidy(self, named: Collection[int] = ()) -> None:
        if self._is_tidy:
            return
        self._is_tidy = True
        if self._tables:
            self._ask(m.Tidy(tuple(named)), m.Tidied)
        else:
            self._tell(m.Tidy(tuple(named)))
        if self._published != self._pointed_at:
            key = weights_key(self._scope, self._term, self._published)
            latest = Latest(term=self._term, version=self._published, key=key)
            self._blobs.put(latest_key(self._scope), encode_latest(latest), self._ttl_s)
            self._pointed_at = self._published

    def drop(self, key: str, held: int = 0) -> None:
        self._tell(m.Drop(key, held))

    def store_rows(self, request: GetRows, version: int, *, subscribes: bool) -> StoredRows:
        if not self._tables:
            raise BlobError(f"worker {request.worker} asks for rows, but the model has no tables")
        answers = self._ask(m.StoreRows(request, version, subscribes), m.RowsPut)
        if lost := next((answer.lost for answer in answers if answer.lost), ""):
            raise BlobError(lost)
        return _stored(answers)

    def changed_rows(self, worker: int, version: int) -> StoredRows | None:
        if not self._tables:
            return None
        answers = self._ask(m.StoreChanges(worker, version), m.RowsPut)
        return _stored(answers) if answers[0].key else None

    def forget_rows(self, worker: int) -> None:
        if self._tables:
            self._tell(m.ForgetRows(worker))

    def table_totals(self) -> dict[str, Totals]:
        return {}  # bounded tables are not divided

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Order the parts of a checkpoint of the current version, and return no tensors: `PartedStore` gathers the
        parts. All have the same base, so that retention needs to know of one."""
        base = self._base
        if self._ordered.version != self._version:  # a part that is stored again must have the same bytes
            is_worth = base is not None and base.is_worth(0)
            self._ordered = m.Snapshot(self._version, base.reference.version if base and is_worth else None)
        self._tell(self._ordered)
        return {}

    def row_changes(self) -> RowChanges | None:
        return None

    def load(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Do nothing, because each shard has loaded its slice (`begin`)."""

    def forget_snapshot(self, version: int) -> None:
        """Forget the parts of a checkpoint that will not be saved."""
        self._tell(m.ForgetSnapshot(version))

    def check(self) -> None:
        """Raise ShardLostError if the process of a shard has ended, or the error of a shard that has left the term.
        Call it about once a second."""
        for number, end in enumerate(self._ends):
            if (data := end.receive(0.0)) is not None:
                answer = self._checked(number, m.decode_answer(data))
                raise ShardLostError(f"shard {number}: expected nothing, got {type(answer).__name__}")
        self._require_alive()

    def close(self) -> None:
        """End `gather_parts` in its thread."""
        self._is_closed.set()

    def _require_alive(self) -> None:
        for number, (end, process) in enumerate(zip(self._ends, self._processes, strict=True)):
            self._marks[number] = end.mark(process)
            if self._marks[number] is None:
                raise ShardLostError(
                    f"shard {number} has ended, is frozen, or has left the term: the next term begins from the newest "
                    "checkpoint"
                )

    def shard_statuses(self) -> tuple[ShardStatus, ...]:
        """Return the state of each shard at the last `check`."""
        return tuple(
            ShardStatus(
                shard=number, is_alive=mark is not None, host="" if mark is None else mark.host,
                pid=0 if mark is None else mark.pid, version=self._version,
                slice_bytes=4 * self._slices[number].size, memory_bytes=0 if mark is None else mark.memory_bytes,
                part_version=self._stored.get(number, -1),
            )
            for number, mark in self._marks.items()
        )  # fmt: skip

    def end(self) -> None:
        """Let the shards exit, because the job has ended."""
        self._tell(m.End())

    def gather_parts(self, version: int) -> tuple[CheckpointPart, ...]:
        """Wait until every shard has stored its part of the checkpoint of this version, and return the parts. Another
        thread than that of the other calls may call this method. Raises CheckpointError if a part cannot be stored now,
        and ShardLostError if it will not be."""
        parts = self._parts.setdefault(version, {})
        for number, end in enumerate(self._ends):
            while number not in parts:
                data = end.receive_part(_WAIT_S)
                if data is None:
                    if self._is_closed.is_set():
                        raise CheckpointError(f"this server has ended before shard {number} has stored its part")
                    self._require_alive()
                    continue
                answer = m.decode_answer(data)
                if isinstance(answer, m.PartFailed) and answer.version == version:
                    raise CheckpointError(f"shard {number}: {answer.reason}")
                if isinstance(answer, m.PartStored) and answer.version >= version:
                    self._parts.setdefault(answer.version, {})[number] = answer.part
                    self._stored[number] = answer.version
        return tuple(parts[number] for number in range(len(self._ends)))

    def note_durable(self, version: int) -> None:
        """Note that the checkpoint of this version, whose parts were gathered, is durable, and forget its parts."""
        parts = self._parts[version].values()
        num_bytes = sum(part.size_bytes for part in parts)
        if all(part.base is None for part in parts):
            self._base = Base(self._term, BaseReference(version, b""), num_bytes)  # each shard knows its part's digest
        elif self._base is not None:
            self._base.note_difference(num_bytes)
        for older in [key for key in self._parts if key <= version]:
            del self._parts[older]

    def _tell(self, order: m.Order) -> None:
        data = m.encode(order)
        for end in self._ends:
            end.send(data)

    def _ask(self, order: m.Order, kind: type[A]) -> list[A]:
        self._tell(order)
        return self._gather((kind,))

    def _gather(self, kinds: tuple[type[Any], ...]) -> list[Any]:
        answers: list[Any] = []
        waiting = deque(enumerate(self._ends))
        while waiting:
            number, end = waiting[0]
            data = end.receive(_WAIT_S)
            if data is None:
                self._wait("")
                self._require_alive()
                continue
            answer = self._checked(number, m.decode_answer(data))
            if not isinstance(answer, kinds):
                raise ShardLostError(f"shard {number}: expected {kinds[0].__name__}, got {type(answer).__name__}")
            answers.append(answer)
            waiting.popleft()
        return answers

    def _checked(self, number: int, answer: m.Answer) -> m.Answer:
        if isinstance(answer, m.Failed):
            self._marks[number] = None
            error = ShardLostError if answer.kind == "other" else m.ERRORS[answer.kind]
            raise error(f"shard {number}: {answer.reason}")
        return answer


def _stored(answers: Sequence[m.RowsPut]) -> StoredRows:
    """Return the rows that all shards have stored. Every shard gets all requests, so `since` is the same."""
    size = WireSize(sum(each.plain_bytes for each in answers), sum(each.coded_bytes for each in answers))
    return StoredRows(answers[0].key, size, answers[0].since, sum(each.request_bytes for each in answers))


def _with_order(order: FetchGradient, *, in_order: bool) -> FetchGradient:
    return FetchGradient(order.grant_id, order.key, order.version, in_order)


class PartedStore:
    """A `VersionStore` for a model in shards. `save` first waits for the parts of the checkpoint."""

    def __init__(self, store: VersionStore, host: ShardedHost) -> None:
        self._store, self._host = store, host

    def newest_term(self) -> int:
        return self._store.newest_term()

    def save(self, checkpoint: Checkpoint) -> None:
        try:
            self._store.save(replace(checkpoint, parts=self._host.gather_parts(checkpoint.version)))
        except BaseDeletedError as exc:  # the parts would need it at each further try; those of a new term are whole
            raise ShardLostError(str(exc)) from exc
        self._host.note_durable(checkpoint.version)
