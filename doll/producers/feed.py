"""Records that a program on this machine makes while the job runs (`doll.train`): the producer's end of the socket.

The program keeps the records that Kafka has not acknowledged. After a restart, the producer reports how many samples
each stream has, and gets the remaining records: a restart loses no record, and no record is sent twice.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from doll.errors import ConfigError
from doll.records import feed

_POLL_S: Final = 0.02
_ACKNOWLEDGE_S: Final = 0.1
_CONNECT_S: Final = 10.0
_READ_BYTES: Final = 1 << 18


class Feed:
    """The connection to the program. Use it as a context manager."""

    def __init__(self, path: Path, positions: Sequence[int], max_bytes: int) -> None:
        """Connect, and send the program the positions at which to begin.

        Args:
            positions: number of samples that each stream already has.
            max_bytes: maximum size of a record; the program refuses larger records before it sends them.

        Raises:
            ConfigError: no program listens on the socket.
        """
        self._max_bytes = max_bytes
        self._positions = list(positions)
        self._acknowledged = list(positions)
        self._acknowledged_s = time.monotonic()
        self.settled: Callable[[], Sequence[int]] = lambda: ()  # samples per stream since then, delivered or failed
        self._socket = _connected(path)
        try:
            self._socket.sendall(feed.encode_positions(positions))
        except OSError as exc:
            self._socket.close()
            raise _gone(path, exc) from exc
        self._path = path

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()

    def records(self) -> Iterator[tuple[int, bytes] | None]:
        """Yield (stream, record) as records arrive, and None after each 20 ms without a record, until the program ends.

        Raises:
            ConfigError: the program ended without an end message, or sent bytes that are not a frame.
        """
        self._socket.settimeout(_POLL_S)
        rest = bytearray()
        while True:
            at = 0
            while len(rest) - at >= feed.HEAD.size:
                length, stream = feed.HEAD.unpack_from(rest, at)
                if stream == feed.END:
                    return
                if stream >= len(self._positions) or length > self._max_bytes:
                    raise ConfigError(
                        f"source.socket {self._path}: expected records of at most {self._max_bytes} bytes for streams "
                        f"0 to {len(self._positions) - 1}, got {length} bytes for stream {stream}"
                    )
                if len(rest) - at - feed.HEAD.size < length:
                    break
                begin = at + feed.HEAD.size
                at = begin + length
                yield stream, bytes(rest[begin:at])
            del rest[:at]
            self.acknowledge()
            try:
                data = self._socket.recv(_READ_BYTES)
            except TimeoutError:
                yield None
                continue
            except OSError as exc:
                raise _gone(self._path, exc) from exc
            if not data:
                raise _gone(self._path, None)
            rest += data

    def acknowledge(self, *, now: bool = False) -> None:
        """Report to the program what Kafka has acknowledged, at most ten times per second. `now`: report at once."""
        at_s = time.monotonic()
        if not now and at_s - self._acknowledged_s < _ACKNOWLEDGE_S:
            return
        self._acknowledged_s = at_s
        settled = self.settled()
        done = [first + count for first, count in zip(self._positions, settled, strict=True)] if settled else []
        if done and done != self._acknowledged:
            self._acknowledged = done
            self._socket.settimeout(_CONNECT_S)
            try:
                self._socket.sendall(feed.encode_positions(done))
            except OSError as exc:
                raise _gone(self._path, exc) from exc
            finally:
                self._socket.settimeout(_POLL_S)


def check_program(path: Path) -> None:
    """Check that the program that feeds a run listens.

    Raises:
        ConfigError: no program listens on the socket.
    """
    _connected(path).close()


def _connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_CONNECT_S)
    try:
        connection.connect(str(path))
    except OSError as exc:
        connection.close()
        raise _gone(path, exc) from exc
    return connection


def _gone(path: Path, error: OSError | None) -> ConfigError:
    reason = f": {error.strerror or error}" if error is not None else ""
    return ConfigError(
        f"source.socket {path}: expected the program that feeds this run, which has ended{reason}; go on without it, "
        "with what Kafka has: doll resume RUN --set source=null, or with a source of kind jsonl, csv, ..."
    )
