"""A message as the client library has it, with what a test cares for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class FakeMessage:
    key_bytes: bytes | None = None
    header_list: Any = None  # an exception: the library cannot read the headers
    stamp: tuple[int, int] = (0, -1)
    at: int = 0
    content: bytes | None = b"{}"

    def key(self) -> bytes | None:
        return self.key_bytes

    def headers(self) -> Any:
        if isinstance(self.header_list, Exception):
            raise self.header_list
        return self.header_list

    def timestamp(self) -> tuple[int, int]:
        return self.stamp

    def offset(self) -> int:
        return self.at

    def value(self) -> bytes | None:
        return self.content
