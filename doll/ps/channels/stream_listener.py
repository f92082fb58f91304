"""Control links of all workers over one stream in Redis: the parameter server's side.

While Redis is unavailable, there are no links. A separate thread reconnects, so the main loop never waits for Redis.
"""

from __future__ import annotations

import selectors
import threading
from typing import TYPE_CHECKING, Final

from doll.control.link_state import TO_SERVER, LinkError, LinkState
from doll.control.redis_streams import ControlStreams, ServerStreamLink, link_and_frame, server_stream
from doll.process.platform import WakeUp
from doll.records.control import Attach
from doll.telemetry import get_logger

if TYPE_CHECKING:
    from doll.ps.channels.control_links import ControlLinks, ServerLink
    from doll.services import Services

log = get_logger(__name__)

_RETRY_S: Final = 0.5
_MAX_RETRY_S: Final = 8.0
_STEADY_S: Final = 10.0  # after a connection that lasted this long, the next attempt is made without a pause
_CLOSE_S: Final = 0.5


class StreamListener:
    """A listener for links over Redis. A separate thread opens all connections, including the first one."""

    def __init__(self, links: ControlLinks, services: Services, scope: str, term: int, max_links: int) -> None:
        self._name = server_stream(scope, term)
        self.endpoint = f"redis:{self._name}"
        self._links = links
        self._services = services
        self._max_links = max_links
        self._streams: ControlStreams | None = None
        self._open: dict[bytes, ServerStreamLink] = {}
        self._opened: ControlStreams | None = None  # set by the thread
        self._opened_s = 0.0
        self._pause_s = 0.0  # pause before the next attempt
        self._wake = WakeUp()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        links.selector.register(self._wake, selectors.EVENT_READ, self._take_opened)
        self._start_opening()

    def check(self, now: float) -> None:
        if self._streams is not None:
            try:
                self._streams.check(now)
            except LinkError as exc:
                self._fail(exc)

    def forget(self, link: ServerLink) -> None:
        assert isinstance(link, ServerStreamLink)
        self._open.pop(link.key, None)

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
        self._take_opened()
        if self._streams is not None:
            self._unregister(self._streams)
            self._streams.close()
        self._links.selector.unregister(self._wake)
        self._wake.close()

    # --- connecting ---------------------------------------------------------------------------------------------------

    def _start_opening(self) -> None:
        if not self._closed.is_set():
            self._thread = threading.Thread(target=self._open_streams, name="control-redis", daemon=True)
            self._thread.start()

    def _open_streams(self) -> None:
        while not self._closed.wait(self._pause_s):
            try:
                self._opened = ControlStreams(self._services, self._name, self._links.clock())
            except LinkError as exc:
                self._lengthen_pause()
                log.info("control_streams_not_open", reason=str(exc), again_s=self._pause_s)
            else:
                self._wake.set()
                return

    def _lengthen_pause(self) -> None:
        self._pause_s = min(max(2 * self._pause_s, _RETRY_S), _MAX_RETRY_S)

    def _take_opened(self) -> None:
        if not self._wake.clear():
            return
        self._streams, self._opened = self._opened, None
        assert self._streams is not None
        self._opened_s = self._links.clock()
        incoming, replies = self._streams.filenos()
        self._links.selector.register(incoming, selectors.EVENT_READ, self._read)
        self._links.selector.register(replies, selectors.EVENT_READ, self._read_replies)

    def _fail(self, error: LinkError) -> None:
        """Close all links, because the connection to Redis has failed."""
        streams, self._streams = self._streams, None
        assert streams is not None
        self._unregister(streams)
        for link in list(self._open.values()):
            self._links.broken(link, error)
        streams.close()
        # If Redis accepts connections but refuses commands, there must be a pause before the next attempt.
        if self._links.clock() - self._opened_s >= _STEADY_S:
            self._pause_s = 0.0
        else:
            self._lengthen_pause()
        log.warning("control_redis_lost", reason=str(error), again_s=self._pause_s)
        self._start_opening()

    def _unregister(self, streams: ControlStreams) -> None:
        for descriptor in streams.filenos():
            self._links.selector.unregister(descriptor)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        if self._streams is None:
            return
        now = self._links.clock()
        try:
            entries = self._streams.read(now)
        except LinkError as exc:
            self._fail(exc)
            return
        for fields in entries:
            named = link_and_frame(fields)
            if named is None:
                if fields != {b"": b""}:
                    self._links.counters["control_refused"] += 1
                continue
            self._receive(*named, now)

    def _receive(self, name: bytes, frame: bytes, now: float) -> None:
        key = self._name.encode() + b":" + name
        link = self._open.get(key)
        if link is None and (link := self._new_link(key, frame, now)) is None:
            return
        try:
            record = link.state.unpack(frame, now)
        except LinkError as exc:
            self._links.broken(link, exc)
            return
        if record is not None:
            self._links.received(link, [record])

    def _new_link(self, key: bytes, frame: bytes, now: float) -> ServerStreamLink | None:
        """Return a link for its first frame, an Attach. A frame of a closed link is answered with the link's end."""
        assert self._streams is not None
        state = LinkState(TO_SERVER, now)
        link = ServerStreamLink(self._streams, key, state)
        try:
            is_new = isinstance(LinkState((Attach,), now).unpack(frame, now), Attach)
        except LinkError:
            is_new = False
        if not is_new or len(self._open) >= self._max_links:
            link.close("unknown to the parameter server", now)
            return None
        self._open[key] = link
        self._links.opened(link, self)
        return link

    def _read_replies(self) -> None:
        if self._streams is None:
            return
        try:
            missing = self._streams.missing()
        except LinkError as exc:
            self._fail(exc)
            return
        for key in missing:
            if (link := self._open.get(key)) is not None:
                self._links.broken(link, LinkError("the worker's stream in Redis is gone"))
