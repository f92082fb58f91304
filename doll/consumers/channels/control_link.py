"""A worker's end of the control channel. It uses the fastest link to the server that works, or Kafka if none works.

All code runs on the worker's event loop, except the opening of connections. Each change of the channel is reported. The
worker then sends its unconfirmed records again on the new channel, in order (ADR 0026).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from doll.control.link_state import TO_WORKER, LinkError, LinkState
from doll.control.local_socket import SocketLink, connect
from doll.control.redis_streams import StreamLink
from doll.records.control import AnyRecord, Attach, Attached, Push, Welcome
from doll.services import Services
from doll.telemetry import get_logger

log = get_logger(__name__)

_ATTACH_S: Final = 3.0
_CHECK_EVERY_S: Final = 0.2
_RETRY_S: Final = 0.25
_MAX_RETRY_S: Final = 8.0
_STEADY_S: Final = 10.0  # a link that held for this long starts again with the shortest pause
_FASTER_EVERY_S: Final = 5.0  # how often a faster link is tried while another link works
Link: TypeAlias = SocketLink | StreamLink  # a worker's end of an open connection

_ACCEPTED: Final = {"auto": ("local", "redis"), "local": ("local",), "redis": ("redis",), "kafka": ()}


class ControlLink:
    """The control link of one worker process.

    Args:
        kind: `control.kind`; it selects the endpoints of a Welcome that may be used.
        on_refused: function that is called when an endpoint of a Welcome belongs to another user or run. Its argument
            is the number of refusals so far.
    """

    def __init__(self, services: Services, kind: str, *, on_refused: Callable[[int], object] = lambda _: None) -> None:
        self._num_refused = 0
        self._refused = ("", "")  # endpoint and reason of the last refusal
        self._on_refused = on_refused
        self._services = services
        self._accepted = _ACCEPTED[kind]
        self._welcome: Welcome | None = None
        self._term = 0  # term of the newest Welcome
        self._welcomed = asyncio.Event()
        self._link: Link | None = None
        self._failed = asyncio.Event()
        self._due = asyncio.Event()  # set when a check of the link is due
        self._failure: LinkError | None = None
        self._deliver: Callable[[list[AnyRecord]], object] = lambda _: None
        self._on_change: Callable[[], object] = lambda: None

    @property
    def kind_in_use(self) -> str:  # "local", "redis" or "kafka"
        return "kafka" if self._link is None else self._link.kind

    def welcome(self, welcome: Welcome) -> None:
        """Attach to the server that has welcomed this process. The same Welcome may arrive again.

        A late Welcome of a server that has been replaced is ignored.
        """
        if welcome.term < self._term:
            return
        self._term = welcome.term
        before, self._welcome = self._welcome, welcome
        if not any(self._usable(endpoint) for endpoint in welcome.endpoints):
            self._welcome = None
        if before is not None and (before.term, before.session) != (welcome.term, welcome.session):
            self._fail(LinkError("there is a new parameter server"))
        self._welcomed.set()

    def send(self, record: AnyRecord) -> bool:
        """Send a record on the link. Return False if the record must be sent through Kafka.

        If the link breaks during a push, the worker sends the push again on the new channel, after the earlier pushes.
        """
        welcome, link = self._welcome, self._link
        if link is None or welcome is None or getattr(record, "term", welcome.term) != welcome.term:
            return False
        if self._failed.is_set():
            return isinstance(record, Push)
        try:
            link.send(record, time.monotonic())
        except LinkError as exc:
            self._fail(exc)
            return isinstance(record, Push)
        return True

    async def run(self, deliver: Callable[[list[AnyRecord]], object], on_change: Callable[[], object]) -> None:
        """Keep a link open. This method never returns. `deliver` receives the records. `on_change` is called when
        grants and pushes change to another channel."""
        self._deliver, self._on_change = deliver, on_change
        pause_s = _RETRY_S
        while True:
            while (welcome := self._welcome) is None:
                self._welcomed.clear()
                await self._welcomed.wait()
            link = await self._open(welcome, self._endpoints(welcome))
            if link is not None:
                opened_s = time.monotonic()
                await self._hold(welcome, link)
                if time.monotonic() - opened_s >= _STEADY_S:
                    pause_s = _RETRY_S
            if self._welcome is not welcome:  # a newer Welcome has come: attach to its server now
                pause_s = _RETRY_S
                continue
            self._welcomed.clear()
            try:
                await asyncio.wait_for(self._welcomed.wait(), pause_s)
            except TimeoutError:
                pause_s = min(2 * pause_s, _MAX_RETRY_S)
            else:  # a server has just started, or this process has joined it again
                pause_s = _RETRY_S

    def close(self, reason: str) -> None:
        """End the link, and open no other."""
        self._welcome = None
        link, self._link = self._link, None
        if link is not None:
            _stop_reading(link)
            link.close(reason, time.monotonic())

    # --- one link -----------------------------------------------------------------------------------------------------

    async def _hold(self, welcome: Welcome, link: Link) -> None:
        """Use `link`, or a faster link that opens later, until it fails."""
        self._use(link)
        tried_s = time.monotonic()
        while True:
            await self._until_due()
            if not self._failed.is_set():
                self._check()
            if self._failed.is_set():
                break
            if time.monotonic() - tried_s >= _FASTER_EVERY_S:
                faster = [item for item in self._endpoints(welcome) if self._is_faster(item)]
                if faster and (better := await self._open(welcome, faster)) is not None:
                    self._drop("there is a faster link")
                    self._use(better)
                tried_s = time.monotonic()
        self._drop("")
        log.info("control_channel", kind="kafka", reason=str(self._failure))
        self._on_change()

    async def _until_due(self) -> None:
        """Wait until a check is due or the link has failed. This method runs all the time on every link, so it does not
        use `asyncio.wait_for`, which costs twice as much."""
        if self._failed.is_set():
            return
        self._due.clear()
        timer = asyncio.get_running_loop().call_later(_CHECK_EVERY_S, self._due.set)
        try:
            await self._due.wait()
        finally:
            timer.cancel()

    def _use(self, link: Link) -> None:
        self._link, self._failure = link, None
        self._failed.clear()
        loop = asyncio.get_running_loop()
        for descriptor in link.filenos():
            loop.add_reader(descriptor, self._read)
        log.info("control_channel", kind=link.kind)
        self._on_change()
        self._read()  # records that came together with the Attached

    def _read(self) -> None:
        if self._link is None or self._failed.is_set():
            return
        try:
            records = self._link.receive(time.monotonic())
        except LinkError as exc:
            self._fail(exc)
        else:
            if records:
                self._deliver(records)

    def _check(self) -> None:
        self._read()  # first: after a pause of this process, the server must not look silent
        if self._link is None or self._failed.is_set():
            return
        try:
            self._link.check(time.monotonic())
        except LinkError as exc:
            self._fail(exc)

    def _fail(self, error: LinkError) -> None:
        if self._link is not None and not self._failed.is_set():
            self._failure = error
            _stop_reading(self._link)
            self._failed.set()
            self._due.set()

    def _drop(self, reason: str) -> None:
        link, self._link = self._link, None
        if link is not None:
            _stop_reading(link)
            link.close(reason or str(self._failure), time.monotonic())

    # --- opening ------------------------------------------------------------------------------------------------------

    def _usable(self, endpoint: str) -> bool:
        return endpoint.partition(":")[0] in self._accepted

    def _is_faster(self, endpoint: str) -> bool:
        kind = endpoint.partition(":")[0]
        return self.kind_in_use in self._accepted and self._accepted.index(kind) < self._accepted.index(
            self.kind_in_use
        )

    def _endpoints(self, welcome: Welcome) -> list[str]:
        return [endpoint for endpoint in welcome.endpoints if self._usable(endpoint)]

    async def _open(self, welcome: Welcome, endpoints: Sequence[str]) -> Link | None:
        """Return a link to the first of these endpoints that accepts this process. Return None if no endpoint accepts
        the process, or if `welcome` is outdated."""
        loop = asyncio.get_running_loop()
        for endpoint in endpoints:
            if self._is_replaced(welcome):
                return None
            try:
                link: Link = await loop.run_in_executor(None, self._connect, endpoint)
            except LinkError as exc:
                self._report(endpoint, exc)
                continue
            try:
                await self._attach(link, welcome)
            except LinkError as exc:
                self._report(endpoint, exc)
                link.close()
            except BaseException:
                link.close()
                raise
            else:
                if not self._is_replaced(welcome):
                    return link
                link.close("there is a new parameter server", time.monotonic())
        return None

    def _report(self, endpoint: str, error: LinkError) -> None:
        """Report that this endpoint accepts no link now. An endpoint that refuses does not belong to the server."""
        if not error.is_refusal:
            log.info("control_link_unavailable", endpoint=endpoint, reason=str(error))
            return
        self._num_refused += 1
        self._on_refused(self._num_refused)
        if self._refused != (endpoint, str(error)):  # log only once: the endpoint is tried again every few seconds
            self._refused = (endpoint, str(error))
            log.warning("control_endpoint_refused", endpoint=endpoint, reason=str(error))

    def _is_replaced(self, welcome: Welcome) -> bool:
        """Return whether a newer server or session has replaced that of `welcome`, or this process is ending. A
        repeated Welcome does not count as a new session."""
        newest = self._welcome
        return newest is None or (newest.term, newest.session) != (welcome.term, welcome.session)

    def _connect(self, endpoint: str) -> Link:
        kind, _, address = endpoint.partition(":")
        now = time.monotonic()
        if kind == "local":
            return SocketLink(connect(self._services.control or address), LinkState(TO_WORKER, now))
        return StreamLink(self._services, address, now)

    async def _attach(self, link: Link, welcome: Welcome) -> None:
        attach = Attach(
            worker=welcome.worker, session=welcome.session, term=welcome.term, run_id=welcome.run_id
        )  # fmt: skip
        link.send(attach, time.monotonic())
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        for descriptor in link.filenos():
            loop.add_reader(descriptor, readable.set)
        try:
            deadline_s = time.monotonic() + _ATTACH_S
            while True:
                try:
                    await asyncio.wait_for(readable.wait(), max(deadline_s - time.monotonic(), 0.001))
                except TimeoutError:
                    raise LinkError(f"no answer within {_ATTACH_S:g} s") from None
                readable.clear()
                for number, record in enumerate(records := link.receive(time.monotonic())):
                    if isinstance(record, Attached):
                        if record.run_id != welcome.run_id:
                            raise LinkError(
                                f"expected the parameter server of run {welcome.run_id!r}, got {record.run_id!r}",
                                is_refusal=True,
                            )
                        self._deliver(records[number + 1 :])
                        return
        finally:
            _stop_reading(link)


def _stop_reading(link: Link) -> None:
    loop = asyncio.get_running_loop()
    for descriptor in link.filenos():
        if descriptor >= 0:
            loop.remove_reader(descriptor)
