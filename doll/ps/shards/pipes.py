"""Port: the pipe between a parameter server and one of its shards. It carries `doll.ps.shards.messages`.

A shard waits for a Begin of any server. All later messages belong to one process of a server.
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from doll.errors import ServiceUnavailableError

ALIVE_S: Final = 6.0  # a shard that has not renewed its mark for this long counts as lost


class PipeBrokenError(ServiceUnavailableError):
    """Redis has not carried a message. The server and its shards leave the term."""


class Mark(msgspec.Struct, frozen=True):
    """The mark of a shard's process, which renews it while it runs."""

    server: str  # name of the server's process that it serves; "": of none
    host: str
    pid: int
    memory_bytes: int  # its resident memory; 0: unknown


class ServerEnd(Protocol):
    """The server's end of the pipe to one shard."""

    def begin(self, data: bytes) -> None:
        """Send a Begin, in place of an earlier one that no shard has taken."""

    def send(self, data: bytes) -> None:
        """Send an order to the shard that has taken the Begin."""

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next answer; None if there is none after this time. 0: do not wait."""

    def receive_part(self, timeout_s: float) -> bytes | None:
        """Return the next message about a part of a checkpoint. Another thread may call this method."""

    def mark(self, process: str) -> Mark | None:
        """Return what this process of a shard has said last; None if it has not run within the last `ALIVE_S` seconds,
        or is not in the term of this server."""


class ShardEnd(Protocol):
    """A shard's end. `server`: name of the server's process."""

    process: str

    def serve(self, server: str) -> None:
        """Mark this process as a shard of `server` from now on; "": of none."""

    def receive(self, server: str, timeout_s: float) -> bytes | None:
        """Return the next order of the server, or a Begin of any server; None if there is none after this time."""

    def send(self, server: str, data: bytes) -> None: ...

    def send_part(self, server: str, data: bytes) -> None:
        """Send a message about a part of a checkpoint. Another thread may call this method."""

    def close(self) -> None: ...
