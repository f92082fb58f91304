"""Port: where a worker's batches are decoded, away from its event loop and from the thread that computes gradients."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from doll.consumers.intake.decoding import Decoded, Records


class Decoder(Protocol):
    """Decodes what it is given, in that order. Called from one thread; the futures are set by another.

    Attributes:
        depth: how many batches the caller may have under way at once.
    """

    @property
    def depth(self) -> int: ...

    def decode(self, records: Records) -> Future[Decoded]:
        """The usable samples of one batch, as `Batch.data` takes them. What is refused is dead-lettered by then.

        Futures are done in the order of the calls. Fails with ServiceUnavailableError where Kafka does not take a dead
        letter.
        """
        ...

    def close(self) -> None:
        """Wait for what is under way, and drop the rest."""


class ThreadDecoder:
    """`Decoder` in one thread of its own: a batch that is being decoded delays no gradient that is granted."""

    depth = 8  # those that follow wake neither thread

    def __init__(self, decode: Callable[[Records], Decoded]) -> None:
        self._decode = decode
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="decode")

    def decode(self, records: Records) -> Future[Decoded]:
        return self._executor.submit(self._decode, records)

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)
