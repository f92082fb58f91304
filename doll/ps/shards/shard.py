"""A shard of the model: it carries out the orders of a parameter server on its slice, term after term."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple, assert_never

from doll.errors import BlobError, CheckpointError, DollError, FencedError, ServiceUnavailableError
from doll.optim.optimizer import Updater
from doll.process.fault_points import fault_point
from doll.ps.engine.events import GradientLost
from doll.ps.model.model_host import ModelHost
from doll.ps.shards import messages as m
from doll.ps.shards.pipes import ShardEnd
from doll.ps.tables.row_server import StoredRows
from doll.storage.checkpoints import Checkpoint, CheckpointStore
from doll.storage.differences import MAX_DIFFERENCES, BaseReference
from doll.telemetry import get_logger

log = get_logger(__name__)

_IDLE_S: Final = 1.0
_RETRY_S: Final = 1.0
_EXIT_S: Final = 30.0
_MAX_WHOLE: Final = 2 * MAX_DIFFERENCES  # the server names a base again at most `MAX_DIFFERENCES` times


class ShardTerm(NamedTuple):
    """The model of a shard in one term. `checkpoint`: the part without tensors, of any version."""

    host: ModelHost
    updater: Updater
    checkpoint: Checkpoint


Open = Callable[[m.Begin], ShardTerm]


class Shard:
    """A shard, which waits for orders and carries them out. Not thread-safe."""

    def __init__(
        self, end: ShardEnd, store: CheckpointStore, open_term: Open, *, leave: Callable[[], bool],
        beat: Callable[[str], None] = lambda waits_for: None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """
        Args:
            open_term: opens the model of a term.
            leave: returns whether this process is to end.
            beat: is called at least once in two seconds while the shard is idle, with what it waits for.
        """
        self._end, self._store, self._open = end, store, open_term
        self._leave, self._beat, self._clock = leave, beat, clock
        self._exits_at_s = math.inf
        self._begun: m.Begin | None = None
        self._term: ShardTerm | None = None
        self._parts: PartWriter | None = None

    def run(self) -> None:
        """Carry out orders until `leave` returns True, or for a while after the end of the job: a server that replaces
        the one that has ended the job needs its shards.
        """
        try:
            while not self._leave() and self._clock() < self._exits_at_s:
                self._beat("" if self._term is not None else "the parameter server")
                self._turn()
        finally:
            self._leave_term()

    def _turn(self) -> None:
        """Wait for an order and carry it out."""
        server = "" if self._begun is None else self._begun.reply_to
        try:
            data = self._end.receive(server, _IDLE_S)
            if data is None:
                return
            order = m.decode_order(data)
            if isinstance(order, m.End):
                self._exits_at_s = self._clock() + _EXIT_S
            elif isinstance(order, m.Begin):
                self._begin(order)
            elif self._term is not None and (answer := self._carried_out(self._term, order)) is not None:
                self._end.send(server, m.encode(answer))
        except _TermOver as over:
            self._begin(over.begin)
        except (DollError, MemoryError) as exc:
            if not self._leave():  # otherwise it has given up because it is to end
                self._fail(exc)

    def _begin(self, order: m.Begin) -> None:
        if self._begun is not None and order.term <= self._begun.term:
            return  # of a server that has a successor
        self._leave_term()
        self._begun, self._exits_at_s = order, math.inf
        self._term = self._open(order)
        self._term.updater.squares_of_all = self._exchange
        self._parts = PartWriter(self._end, order, self._store)
        self._end.serve(order.reply_to)
        self._end.send(order.reply_to, m.encode(m.Begun(self._end.process)))
        log.info("term_begun", term=order.term, shard=order.shard, shards=order.shards, place=order.place)

    def _carried_out(self, term: ShardTerm, order: m.Order) -> m.Answer | None:
        """Carry out an order of the current term; return the answer, if there is one."""
        host = term.host
        match order:
            case m.Fetch(order=fetch):
                outcome = host.fetch(fetch)
                if isinstance(outcome.event, GradientLost):
                    return m.Fetched(outcome.event.reason)
                return m.Fetched(
                    "", outcome.event.max_change, outcome.num_bytes, outcome.num_sent, outcome.plain_row_bytes
                )
            case m.AddInOrder(order=fetch):
                host.add_in_order(fetch)
            case m.Prefetch(keys=keys, coming=coming):
                host.prefetch(keys, coming)
            case m.Apply(update=update):
                num_samples = host.apply(update)
                fault_point("shard.after_apply")
                return m.Applied(num_samples)
            case m.StoreRows(request=request, version=version, subscribes=subscribes):
                try:
                    return _put(host.store_rows(request, version, subscribes=subscribes))
                except BlobError as exc:
                    return m.RowsPut("", lost=str(exc))
            case m.StoreChanges(worker=worker, version=version):
                return _put(host.changed_rows(worker, version))
            case m.ForgetRows(worker=worker):
                host.forget_rows(worker)
            case m.Publish(version=version, again=again):
                (host.republish if again else host.publish)(version)
                return m.Published()
            case m.Release(version=version):
                host.release(version)
            case m.Tidy(named=named):
                host.tidy(named)
                return m.Tidied() if host.has_tables else None
            case m.Drop(key=key, held=held):
                host.drop(key, held)
            case m.Snapshot(version=version, base=base):
                assert self._parts is not None, "a term has a writer"
                tensors, changes = host.tensors(), host.row_changes()
                self._parts.add(replace(term.checkpoint, version=version, tensors=tensors, changes=changes), base)
            case m.ForgetSnapshot(version=version):
                assert self._parts is not None, "a term has a writer"
                self._parts.forget(version)
            case m.Squares():
                pass  # of an update whose norms were exchanged already
            case m.Begin() | m.End():
                raise AssertionError("`_turn` carries these out")
            case _:
                assert_never(order)
        return None

    def _exchange(self, squares: list[float]) -> list[float]:
        """Send the squared norms of this slice's blocks, and return those of all slices."""
        assert self._begun is not None, "updates belong to a term"
        self._end.send(self._begun.reply_to, m.encode(m.Squares(squares)))
        while True:
            if self._leave():
                raise ServiceUnavailableError("this process was told to end during an update")
            self._beat("")
            data = self._end.receive(self._begun.reply_to, _IDLE_S)
            order = None if data is None else m.decode_order(data)
            if isinstance(order, m.Squares):
                return order.values
            if isinstance(order, m.Begin) and order.term > self._begun.term:
                raise _TermOver(order)

    def _fail(self, exc: Exception) -> None:
        """Tell the server, which then begins again, and leave its term."""
        kinds: list[m.FailureKind] = [kind for kind, cls in m.ERRORS.items() if isinstance(exc, cls)]
        log.error("term_left", error=str(exc))
        begun = self._begun
        try:
            if begun is not None:
                self._end.send(begun.reply_to, m.encode(m.Failed((*kinds, "other")[0], str(exc))))
        except ServiceUnavailableError:
            time.sleep(_RETRY_S)  # the server sees that nothing serves it any more
        self._leave_term()

    def _leave_term(self) -> None:
        if self._parts is not None:
            self._parts.close()
        self._term = self._parts = None
        self._end.serve("")


def _put(rows: StoredRows | None) -> m.RowsPut:
    if rows is None:
        return m.RowsPut("")
    return m.RowsPut(rows.key, "", *rows.size, rows.since, rows.request_bytes)


class _TermOver(Exception):
    """A newer server has begun while this shard waited for the current one."""

    def __init__(self, begin: m.Begin) -> None:
        super().__init__()
        self.begin = begin


class PartWriter:
    """A thread that stores the parts of checkpoints in the order of their versions. A failed part is tried again."""

    def __init__(self, end: ShardEnd, begun: m.Begin, store: CheckpointStore) -> None:
        self._end, self._begun, self._store = end, begun, store
        self._waiting: deque[tuple[Checkpoint, int | None]] = deque()
        self._whole: deque[BaseReference] = deque(maxlen=_MAX_WHOLE)  # parts that were stored whole
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="parts", daemon=True)
        self._thread.start()

    def add(self, checkpoint: Checkpoint, base: int | None) -> None:
        """Store a part, later. `base`: see `Snapshot`."""
        with self._changed:
            self._waiting.append((checkpoint, base))
            self._changed.notify()

    def forget(self, version: int) -> None:
        """Do not store the part of this version, unless it is being stored now."""
        with self._changed:
            self._waiting = deque(item for item in self._waiting if item[0].version != version)
            self._changed.notify()

    def close(self) -> None:
        """End the thread after the part that is being stored."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        failed = False
        while True:
            with self._changed:
                if failed:
                    self._changed.wait(_RETRY_S)
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                item = self._waiting[0]
            failed = not self._store_part(*item)
            if not failed:
                with self._changed:
                    if self._waiting and self._waiting[0] is item:
                        self._waiting.popleft()

    def _store_part(self, checkpoint: Checkpoint, base: int | None) -> bool:
        """Store a part and tell the server; return False if it must be tried again."""
        version, begun = checkpoint.version, self._begun
        reference = next((each for each in self._whole if each.version == base), None)
        try:
            part = self._store.save_part(checkpoint, begun.shard, begun.shards, reference)
            if part.base is None and all(each.version != version for each in self._whole):
                self._whole.append(BaseReference(version, part.checksum))
            fault_point("shard.after_part")
            self._end.send_part(begun.reply_to, m.encode(m.PartStored(version, part)))
        except FencedError:
            return True  # the server finds out itself
        except (CheckpointError, ServiceUnavailableError) as exc:
            log.warning("part_not_stored", version=version, error=str(exc), action="trying again")
            with suppress(ServiceUnavailableError):  # the server, which waits for this part, gets the same error
                self._end.send_part(begun.reply_to, m.encode(m.PartFailed(version, str(exc))))
            return False
        return True
