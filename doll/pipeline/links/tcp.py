"""Links over TCP, between stages on different machines: authenticated, limited, and ended when the peer is dead (ADR
0140).

Before a connection becomes a link, both ends prove that they know the run's secret (HMAC-SHA256 over two nonces), and
the end that has connected claims a place. Until then a connection gets a fixed number of bytes and a few seconds. The
data that follow are neither encrypted nor signed: the network between the machines must be trusted.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from doll.errors import ConfigError, DollError
from doll.pipeline.links.link import StageLink
from doll.telemetry import get_logger

log = get_logger(__name__)

HANDSHAKE_S: Final = 5.0
MAX_HANDSHAKES: Final = 16  # at once; a further connection ends the oldest one
SECRET_BYTES: Final = 32
_MAGIC: Final = b"dst1"
_NONCE_BYTES: Final = 32
_MAC_BYTES: Final = 32
_MAX_TEXT_BYTES: Final = 1024
_SIZE: Final = struct.Struct("<H")
_PAUSE_S: Final = 0.1
_EVERYWHERE: Final = ("0.0.0.0", "::", "[::]", "")  # refused: they name no machine to the worker


class LinkRefusedError(DollError):
    """A stage cannot be reached, does not know the run's secret, or refuses the connection."""


class Address(msgspec.Struct, frozen=True):
    """The address at which a stage listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Claim(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The purpose of a connection.

    Attributes:
        worker, stage: place of the stage that is connected to.
        gang: name of the gang, which is new for each process of a worker.
        is_control: whether it is the link to the worker; otherwise it is the link to the stage before, or to the worker
            at the first stage.
    """

    job: str
    worker: int
    stage: int
    gang: str
    is_control: bool


_claims: msgspec.msgpack.Decoder[Claim] = msgspec.msgpack.Decoder(Claim)


def parse_address(text: str) -> Address:
    """Return the address of `host:port`. Raise ConfigError if `text` has another form, or names no single host."""
    host, _, port = text.rpartition(":")
    if host in _EVERYWHERE or ":" in host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(
            "--listen: expected HOST:PORT of this machine, as the worker reaches it, such as 10.0.0.3:7400 (port 0: "
            f"any free port), got {text!r}"
        )
    return Address(host, int(port))


def link_of(connection: socket.socket, silent_s: float) -> StageLink:
    """Return the link of an authenticated connection. It ends when the other machine does not answer for `silent_s`,
    and when the other end takes nothing, or stops in the middle of a message, for so long."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe_s = max(1, int(silent_s / 4))
    for name, value in (
        ("TCP_KEEPIDLE", probe_s), ("TCP_KEEPINTVL", probe_s), ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", int(1000 * silent_s)),
    ):  # fmt: skip
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    link = StageLink(connection)
    link.limit_sending(silent_s)
    link.limit_receiving(silent_s)
    return link


def connect(address: Address, secret: bytes, claim: Claim, silent_s: float) -> StageLink:
    """Connect to a stage and claim a place there; `silent_s` as in `link_of`. Raise LinkRefusedError if the stage
    cannot be reached, does not prove that it knows the secret, or refuses the claim."""
    connection: socket.socket | None = None
    try:
        connection = socket.create_connection((address.host, address.port), HANDSHAKE_S)
        hands = _Handshake(connection, HANDSHAKE_S)
        hands.nonces = secrets.token_bytes(_NONCE_BYTES)
        hands.write(_MAGIC + hands.nonces)
        if hands.read(len(_MAGIC)) != _MAGIC:
            raise _HandshakeError("it is no stage of this release")
        hands.nonces += hands.read(_NONCE_BYTES)
        hands.read_text(secret, b"stage")
        hands.write_text(secret, b"claim", msgspec.msgpack.encode(claim))
        if reason := hands.read_text(secret, b"answer"):
            raise LinkRefusedError(f"the stage at {address} refuses: {reason.decode(errors='replace')}")
        return link_of(connection, silent_s)
    except BaseException as exc:
        if connection is not None:
            connection.close()
        if isinstance(exc, OSError | OverflowError | UnicodeError | _HandshakeError):  # also of a bad host or port
            raise LinkRefusedError(f"no stage answers at {address}: {exc}") from exc
        raise


class Door:
    """A listening socket of a stage. Connections that pass the handshake, and whose claim is admitted, become links.

    Attributes:
        address: address at which it listens, with the port that the system chose if none was given.
        links: the links of admitted claims.
        refused: number of refused connections.
    """

    def __init__(
        self, listen: Address, secret: Callable[[], bytes], admit: Callable[[Claim], str], *, silent_s: float,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:  # fmt: skip
        """
        Args:
            secret: function that returns the secret of the run.
            admit: function that takes the place of a claim, and returns "", or the reason why it cannot. One thread at
                a time calls it.
            silent_s: as in `link_of`.

        Raises:
            ConfigError: this machine does not have the address, or the port is in use.
        """
        try:
            self._socket = socket.create_server((listen.host, listen.port), backlog=MAX_HANDSHAKES)
        except OSError as exc:
            raise ConfigError(f"--listen: cannot listen at {listen}: {exc.strerror or exc}") from exc
        self.address = Address(listen.host, self._socket.getsockname()[1])
        self.links: queue.SimpleQueue[tuple[Claim, StageLink]] = queue.SimpleQueue()
        self.refused = 0
        self._secret, self._admit = secret, admit
        self._silent_s, self._handshake_s = silent_s, handshake_s
        self._lock, self._is_closed = threading.Lock(), threading.Event()
        self._pending: deque[socket.socket] = deque()
        threading.Thread(target=self._accept, name="door", daemon=True).start()

    def close(self) -> None:
        """Refuse all further connections, and close links that were not taken from `links`. May be called again."""
        self._is_closed.set()
        _end(self._socket)  # wakes the thread that accepts
        self._socket.close()
        with self._lock:
            for connection in self._pending:
                _end(connection)
        self._close_links()

    def _close_links(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self.links.get_nowait()[1].close()

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._socket.accept()
            except OSError:
                if self._is_closed.wait(_PAUSE_S):
                    return
                continue  # the connection has gone, or this process has too many open files for now
            with self._lock:
                # The oldest one has had the longest time; the processes of a gang need milliseconds.
                if len(self._pending) >= MAX_HANDSHAKES:
                    _end(self._pending.popleft())
                self._pending.append(connection)
            threading.Thread(target=self._greet, args=(connection, str(peer[0])), name="greets", daemon=True).start()

    def _greet(self, connection: socket.socket, peer: str) -> None:
        try:
            claim, link = self._authenticate(connection), link_of(connection, self._silent_s)
            with self._lock:
                if connection not in self._pending:
                    raise _HandshakeError("newer connections have taken its turn")
                self._pending.remove(connection)  # before its link can be taken: `close` ends pending connections
            self.links.put((claim, link))
            if self._is_closed.is_set():  # `close` may have looked before
                self._close_links()
        except (OSError, _HandshakeError) as exc:
            with self._lock:
                self.refused += 1
            log.warning("stage_connection_refused", peer=peer, reason=str(exc), refused=self.refused)
            connection.close()
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._pending.remove(connection)

    def _authenticate(self, connection: socket.socket) -> Claim:
        hands = _Handshake(connection, self._handshake_s)
        if (magic := hands.read(len(_MAGIC))) != _MAGIC:
            raise _HandshakeError(f"expected a process of this job and release, got {magic!r}")
        own = secrets.token_bytes(_NONCE_BYTES)
        hands.nonces = hands.read(_NONCE_BYTES) + own
        secret = self._secret()
        hands.write(_MAGIC + own)
        hands.write_text(secret, b"stage", b"")
        try:
            claim = _claims.decode(hands.read_text(secret, b"claim"))
        except msgspec.DecodeError as exc:
            raise _HandshakeError(f"expected a claim: {exc}") from exc
        with self._lock:
            reason = self._admit(claim)
        hands.write_text(secret, b"answer", reason.encode()[:_MAX_TEXT_BYTES])
        if reason:
            raise _HandshakeError(reason)
        return claim


class _HandshakeError(DollError):
    """The other end did not complete the handshake."""


class _Handshake:
    """The steps of both ends before a link begins.

    The time limit is for all of them: a sender of single bytes does not get more time. Each text is followed by its
    proof, with a label of its own, so that no proof serves for another step.
    """

    def __init__(self, connection: socket.socket, within_s: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._until_s = connection, time.monotonic() + within_s
        self.nonces = b""  # of the end that has connected, then of the stage

    def write(self, data: bytes) -> None:
        self._limit()
        self._connection.sendall(data)

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            self._limit()
            part = self._connection.recv(size - len(data))
            if not part:
                raise _HandshakeError("the other end has closed the connection")
            data += part
        return data

    def write_text(self, secret: bytes, label: bytes, text: bytes) -> None:
        proof = hmac.digest(secret, label + self.nonces + text, "sha256")
        self.write(_SIZE.pack(len(text)) + text + proof)

    def read_text(self, secret: bytes, label: bytes) -> bytes:
        (size,) = _SIZE.unpack(self.read(_SIZE.size))
        if size > _MAX_TEXT_BYTES:
            raise _HandshakeError(f"expected at most {_MAX_TEXT_BYTES} bytes, got {size}")
        text, proof = self.read(size), self.read(_MAC_BYTES)
        if not hmac.compare_digest(proof, hmac.digest(secret, label + self.nonces + text, "sha256")):
            raise _HandshakeError("the other end does not know the secret of this run")
        return text

    def _limit(self) -> None:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise _HandshakeError("the handshake took too long")
        self._connection.settimeout(left_s)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
