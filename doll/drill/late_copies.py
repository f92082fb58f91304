"""Copies of what the parameter server has sent to a worker, sent again later through Kafka.

A change of channel does this in every run: the server sends again through Kafka what a link still carries. A drill
makes such copies late, out of order, and of commands that were answered long ago.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from doll.control.link_state import record_of
from doll.control.local_socket import next_frame
from doll.errors import RecordError
from doll.kafka.publisher import Delivery, Publisher
from doll.kafka.reader import Partition, Reader, from_end
from doll.records.control import AnyRecord, Grant, Settle, encode

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.services import Services

_KEPT: Final = 8  # newest commands of each worker and kind


class LateCopies:
    """Keeps the newest grants and settles of each worker, and sends copies of them later.

    Grants are taken from a worker's link where `watch` gives its bytes; all commands from Kafka.
    """

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self._topic = config.topic("commands")
        self._kept: dict[tuple[int, type], deque[bytes]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._due: list[tuple[float, int, bytes, Callable[[Delivery], None]]] = []
        self._reader: Reader | None = None
        self._publisher: Publisher | None = None

    def watch(self, worker: int) -> Callable[[bytes], None]:
        """For a new connection of a worker's link: call the result with what the server sends on it, in order."""
        unread = bytearray()

        def take(data: bytes) -> None:
            unread.extend(data)
            while (frame := next_frame(unread)) is not None:
                try:
                    record = record_of(frame)
                except RecordError:
                    continue  # the worker refuses it
                self._keep(worker, record)

        return take

    def open(self, services: Services) -> None:
        """Follow the commands that go through Kafka.

        Raises:
            ServiceUnavailableError: Kafka does not answer.
        """
        partitions = [Partition(self._topic, worker) for worker in range(self._config.data.workers)]
        self._reader = Reader(self._config, services, "watch", partitions, from_end)
        self._publisher = Publisher(self._config, services)

    def close(self) -> None:
        for client in (self._reader, self._publisher):
            if client is not None:
                client.close()
        self._reader = self._publisher = None

    def poll(self, now: float) -> None:
        """Take in what has come, and send what is due."""
        if self._reader is None or self._publisher is None:
            return
        for timed in self._reader.poll(0.0):
            record = timed.record
            if isinstance(record, Grant | Settle):
                self._keep(record.worker, record)
        for entry in [entry for entry in self._due if entry[0] <= now]:
            _, worker, value, on_delivery = entry
            if not self._publisher.try_send(self._topic, value, partition=worker, on_delivery=on_delivery):
                break  # its queue is full while Kafka does not answer
            self._due.remove(entry)
        self._publisher.poll()

    def send_later(self, worker: int, kind: type, by_s: float, now: float, seed: int) -> Callable[[], bool] | None:
        """Send copies of the newest commands of one kind until `by_s`, in random order.

        Returns:
            Whether Kafka has all of them; None where there are no such commands.
        """
        copies = list(self._kept[worker, kind])
        if not copies:
            return None
        random.Random(seed).shuffle(copies)
        delivered: list[Delivery] = []
        step_s = (by_s - now) / len(copies)
        self._due += [
            (now + step_s * number, worker, value, delivered.append) for number, value in enumerate(copies, 1)
        ]
        return lambda: len(delivered) == len(copies)

    def _keep(self, worker: int, record: AnyRecord) -> None:
        if isinstance(record, Grant | Settle):
            self._kept[worker, type(record)].append(encode(record))
