"""The program's side of a run's source: it sends records over a Unix socket and keeps them until Kafka has them."""

from __future__ import annotations

import contextlib
import itertools
import select
import shutil
import socket
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from doll.errors import ConfigError, RecordError
from doll.records import feed

_POLL_S: Final = 0.1
# Limits of the samples that Kafka does not have yet; above them, the iterator waits. A fast iterator would otherwise
# take the time of the program, and a live one be read long before its samples are learned.
_KEPT_BYTES: Final = 64 << 20
_KEPT_SAMPLES: Final = 20_000
_READ_BYTES: Final = 1 << 16
_SENT_AT_ONCE: Final = 256  # records


class Feeder:
    """Serves the records of an iterator to a producer. One thread reads the iterator, another one sends the records.

    Sample i goes to stream i mod N. When a producer connects, it sends the number of samples that each stream has, and
    receives the remaining samples.

    Attributes:
        path: path of the socket, in a folder that only this user can read.
        error: the exception of the iterator, or the problem of a record; the source has ended with this error.
        taken: number of samples taken from the iterator.
    """

    def __init__(self, records: Iterator[bytes], streams: int, max_record_bytes: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="doll-feed-"))  # a run folder's path may be too long for a socket
        self.path: Final = self._folder / "feed.sock"
        self.error: BaseException | None = None
        self.taken = 0
        self._records = records
        self._streams = streams
        self._max_record_bytes = max_record_bytes
        self._changed = threading.Condition()
        self._kept: deque[bytes] = deque()  # frames of the samples from number `_first` on
        self._kept_bytes = 0
        self._first = 0
        self._ended = self._closed = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(1)
        self._listener.settimeout(_POLL_S)
        threading.Thread(target=self._take_all, name="doll-source", daemon=True).start()
        self._sender = threading.Thread(target=self._serve, name="doll-feed", daemon=True)
        self._sender.start()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """End the threads and remove the socket. This does not wait for an iterator that is computing an item."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._sender.join()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _take_all(self) -> None:
        try:
            for record in self._records:
                if len(record) > self._max_record_bytes:
                    raise ConfigError(
                        f"source: sample {self.taken}: expected at most {self._max_record_bytes} bytes "
                        f"(data.max_record_bytes), got {len(record)}"
                    )
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._closed or (self._kept_bytes < _KEPT_BYTES and len(self._kept) < _KEPT_SAMPLES)
                    )
                    if self._closed:
                        return
                    frame = feed.frame(self.taken % self._streams, record)
                    self.taken += 1
                    self._kept.append(frame)
                    self._kept_bytes += len(frame)
                    self._changed.notify_all()
        except BaseException as error:  # the iterator may raise anything; `error` passes it to the caller
            self.error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def frames_from(self, at: int, positions: list[int]) -> tuple[int, bytes, bool]:
        """Return the next available frames. If there are none, wait for a moment.

        Args:
            at: number of the next sample.
            positions: number of samples that each stream had when its producer connected.

        Returns:
            The number of the sample after these frames; the frames that the streams do not have yet; whether the source
                ends after them.
        """
        with self._changed:
            at = max(at, self._first)
            if at == self._first + len(self._kept) and not self._ended:
                self._changed.wait(_POLL_S)
            begin = at - self._first
            kept = list(itertools.islice(self._kept, begin, begin + _SENT_AT_ONCE))
            ended = self._ended and begin + len(kept) == len(self._kept)
        wanted = (
            frame
            for number, frame in enumerate(kept, at)
            if positions[number % self._streams] <= number // self._streams
        )
        return at + len(kept), b"".join(wanted), ended

    def release(self, line: bytes) -> list[int]:
        """Delete the samples that Kafka already has. `line` is a producer's report of the number of samples in each
        stream; return these numbers.

        Raises:
            RecordError: the line is not valid.
        """
        positions = feed.decode_positions(line, self._streams)
        with self._changed:
            while self._kept and positions[self._first % self._streams] > self._first // self._streams:
                self._kept_bytes -= len(self._kept.popleft())
                self._first += 1
            self._changed.notify_all()
        return positions

    def _serve(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            # If a producer was killed, the next one gets its unacknowledged samples again.
            with connection, contextlib.suppress(OSError, RecordError):
                _Connection(self, connection).serve()


class _Connection:
    """The connection of one producer."""

    def __init__(self, feeder: Feeder, connection: socket.socket) -> None:
        self._feeder = feeder
        self._connection = connection
        self._connection.setblocking(False)
        self._line = b""
        self._positions: list[int] = []

    def serve(self) -> None:
        """Send until the producer disconnects or the feeder is closed.

        Raises:
            OSError: the producer has disconnected.
            RecordError: a line of the producer is not valid.
        """
        while not self._positions:
            self._listen(_POLL_S)
        begin, at, ended = self._positions, 0, False
        while not ended:
            at, frames, ended = self._feeder.frames_from(at, begin)
            self._send(frames)
            self._listen(0.0)
        self._send(feed.frame(feed.END, b""))
        while True:
            self._listen(_POLL_S)

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._connection.send(view) :]
            except BlockingIOError:
                select.select([self._connection], [self._connection], [], _POLL_S)
                self._listen(0.0)

    def _listen(self, timeout_s: float) -> None:
        """Process what the producer has sent."""
        if self._feeder.closed:
            raise ConnectionError("the feeder is closed")
        readable, _, _ = select.select([self._connection], [], [], timeout_s)
        if not readable:
            return
        data = self._connection.recv(_READ_BYTES)
        if not data:
            raise ConnectionError("the producer has gone")
        *lines, self._line = (self._line + data).split(b"\n")
        if lines:
            self._positions = self._feeder.release(lines[-1])
