"""The parameter server's ends of all control links, which know the attached worker of each link and receive records.

A worker attaches with the session of its last Welcome. A link of another session, term or run is refused. Each worker
has at most one link: a later link replaces the earlier one. Broken and refused links are closed, counted and logged;
their workers use Kafka and try again.
"""

from __future__ import annotations

import functools
import selectors
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from doll.control.link_state import TO_SERVER, LinkError, LinkState
from doll.control.local_socket import LocalSocket, SocketLink
from doll.control.redis_streams import ServerStreamLink
from doll.records.control import (
    AnyRecord,
    Attach,
    Attached,
    GetRows,
    Grant,
    Nack,
    NewVersion,
    Push,
    RowsStored,
    Welcome,
)
from doll.telemetry import get_logger

log = get_logger(__name__)

_CHECK_EVERY_S: Final = 0.2
_ATTACH_S: Final = 4.0  # seconds until a connection without an Attach is closed

ServerLink = SocketLink | ServerStreamLink


class LinkListener(Protocol):
    """A listener that makes links of one kind for `ControlLinks`, and reads them.

    Attributes:
        endpoint: address, as in `Welcome.endpoints`.
    """

    endpoint: str

    def check(self, now: float) -> None:
        """Check for timeouts; called several times a second."""

    def forget(self, link: ServerLink) -> None:
        """Forget a link that has been closed."""

    def close(self) -> None:
        """Close the listener."""


@dataclass(slots=True, eq=False)
class _Peer:
    """One link, and the number of the worker that is attached to it; the number is -1 if no worker is attached yet."""

    link: ServerLink
    listener: LinkListener
    opened_s: float
    worker: int = -1
    session: int = 0


class ControlLinks:
    """All links of one server. Not thread-safe: only the main loop may use it.

    Attributes:
        selector: selector in which listeners register their descriptors, each with a callback without arguments.
        counters: numbers of attachments, failures and refusals.
        clock: function that returns monotonic seconds.
    """

    def __init__(self, term: int, clock: Callable[[], float] = time.monotonic, *, run_id: str = "") -> None:
        self._term = term
        self._run_id = run_id
        self.clock = clock
        self._listeners: list[LinkListener] = []
        self._peers: dict[ServerLink, _Peer] = {}
        self._of_worker: dict[int, _Peer] = {}
        self._sessions: dict[int, int] = {}  # worker -> session of its last Welcome
        self._checked_s = clock()
        self._received: list[Push | Nack | GetRows] = []
        self._changed: dict[int, None] = {}
        self.selector = selectors.DefaultSelector()
        self.counters: Counter[str] = Counter()

    # --- for the channel ----------------------------------------------------------------------------------------------

    def add(self, listener: LinkListener) -> None:
        """Add a listener. Workers prefer the links of listeners that were added earlier."""
        self._listeners.append(listener)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The addresses for `Welcome.endpoints`."""
        return tuple(listener.endpoint for listener in self._listeners)

    def kinds(self) -> dict[int, str]:
        return {worker: peer.link.kind for worker, peer in self._of_worker.items()}

    def poll(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for the first record, and read all records that have arrived."""
        for key, _ in self.selector.select(timeout_s):
            key.data()
        now = self.clock()
        if now - self._checked_s >= _CHECK_EVERY_S:
            # Check timeouts after reading: otherwise a server that was busy for long would consider its workers silent.
            self._checked_s = now
            self._check(now)

    def take(self) -> tuple[list[int], list[Push | Nack | GetRows]]:
        """Return the workers whose link was opened or closed since the last call, and the new records, in order."""
        changed, self._changed = list(self._changed), {}
        received, self._received = self._received, []
        return changed, received

    def welcome(self, record: Welcome) -> None:
        """Record a Welcome that is about to be sent. From now on, only the session in this Welcome may attach."""
        self._sessions[record.worker] = record.session
        peer = self._of_worker.get(record.worker)
        if peer is not None and peer.session != record.session:
            self._end(peer, "replaced by a newer process", "replaced")

    def send(self, worker: int, record: Grant | NewVersion | RowsStored) -> bool:
        """Send a record on the worker's link, and return True. Return False if the record must be sent through Kafka.

        If the link breaks during the send of a grant, the `GrantsLost` that follows sends all grants again, in order.
        """
        peer = self._of_worker.get(worker)
        if peer is None or (not isinstance(record, NewVersion) and record.session != peer.session):
            return False
        try:
            peer.link.send(record, self.clock())
        except LinkError as exc:
            self._break(peer, exc)
            return isinstance(record, Grant)
        return True

    def close(self) -> None:
        now = self.clock()
        for link in list(self._peers):
            link.close("the parameter server ends", now)
        self._peers.clear()
        self._of_worker.clear()
        for listener in self._listeners:
            listener.close()
        self.selector.close()

    # --- for listeners ------------------------------------------------------------------------------------------------

    def opened(self, link: ServerLink, listener: LinkListener) -> None:
        self._peers[link] = _Peer(link, listener, self.clock())

    def received(self, link: ServerLink, records: list[AnyRecord]) -> None:
        peer = self._peers.get(link)
        for record in records:
            if peer is None or peer.link not in self._peers:
                return
            if isinstance(record, Attach):
                self._attach(peer, record)
            elif isinstance(record, Push | Nack | GetRows) and record.worker == peer.worker:
                self._received.append(record)
            else:
                self._break(peer, LinkError(f"unexpected {type(record).__name__}", is_refusal=True))

    def broken(self, link: ServerLink, error: LinkError) -> None:
        if (peer := self._peers.get(link)) is not None:
            self._break(peer, error)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _attach(self, peer: _Peer, record: Attach) -> None:
        expected = (self._term, self._sessions.get(record.worker), self._run_id)
        if peer.worker >= 0 or (record.term, record.session, record.run_id) != expected:
            self.counters["refused_attach"] += 1
            reason = (
                f"expected worker {record.worker} with term {expected[0]}, session {expected[1]} and run "
                f"{expected[2]!r}, got term {record.term}, session {record.session} and run {record.run_id!r}"
            )
            log.warning("control_link_refused", kind=peer.link.kind, reason=reason)
            self._end(peer, reason, "refused")
            return
        if (before := self._of_worker.get(record.worker)) is not None:
            self._end(before, "replaced by a newer link", "replaced")
        peer.worker, peer.session = record.worker, record.session
        try:
            attached = Attached(term=self._term, worker=record.worker, session=record.session, run_id=self._run_id)
            peer.link.send(attached, self.clock())
        except LinkError as exc:
            self._break(peer, exc)
            return
        self._of_worker[record.worker] = peer
        self._changed[record.worker] = None
        self.counters[f"control_{peer.link.kind}"] += 1
        log.info("control_channel", worker=record.worker, kind=peer.link.kind)

    def _break(self, peer: _Peer, error: LinkError) -> None:
        self.counters["control_refused" if error.is_refusal else "control_broken"] += 1
        self._end(peer, str(error), "refused" if error.is_refusal else "broken")

    def _end(self, peer: _Peer, reason: str, why: str) -> None:
        if self._peers.pop(peer.link, None) is None:
            return
        peer.listener.forget(peer.link)
        peer.link.close(reason, self.clock())
        if self._of_worker.get(peer.worker) is peer:
            del self._of_worker[peer.worker]
            self._changed[peer.worker] = None
            log.info("control_channel", worker=peer.worker, kind="kafka", was=peer.link.kind, why=why, reason=reason)

    def _check(self, now: float) -> None:
        for listener in self._listeners:
            listener.check(now)
        for peer in list(self._peers.values()):
            try:
                peer.link.check(now)
                if peer.worker < 0 and now - peer.opened_s >= _ATTACH_S:
                    raise LinkError("no Attach has come", is_refusal=True)
            except LinkError as exc:
                self._break(peer, exc)


class LocalListener:
    """Links over the server's Unix socket. Connections beyond `max_links` are closed; their workers try again."""

    def __init__(self, links: ControlLinks, listening: LocalSocket, max_links: int) -> None:
        self.endpoint = f"local:{listening.path}"
        self._links = links
        self._listening = listening
        self._max_links = max_links
        self._open: set[ServerLink] = set()
        self._is_listening = False
        self._listen()

    def check(self, now: float) -> None:
        self._listen()

    def forget(self, link: ServerLink) -> None:
        if link in self._open:
            self._open.discard(link)
            assert isinstance(link, SocketLink)
            self._links.selector.unregister(link)

    def close(self) -> None:
        self._listening.close()

    def _listen(self) -> None:
        if not self._is_listening:
            self._is_listening = True
            self._links.selector.register(self._listening, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            connection = self._listening.accept()
        except OSError as exc:
            # The socket stays readable. It is not watched until the next check, because the loop would spin otherwise.
            log.warning("control_socket_busy", reason=str(exc), action="trying again")
            self._is_listening = False
            self._links.selector.unregister(self._listening)
            return
        if connection is None:
            return
        if len(self._open) >= self._max_links:
            connection.close()  # the worker tries again
            return
        link = SocketLink(connection, LinkState(TO_SERVER, self._links.clock()))
        self._open.add(link)
        self._links.opened(link, self)
        self._links.selector.register(link, selectors.EVENT_READ, functools.partial(self._read, link))

    def _read(self, link: SocketLink) -> None:
        if link not in self._open:  # closed by an earlier callback of this round
            return
        try:
            records = link.receive(self._links.clock())
        except LinkError as exc:
            self._links.broken(link, exc)
        else:
            self._links.received(link, records)
