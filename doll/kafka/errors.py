"""Errors of Kafka's client library as DOLL's own: the one place that translates them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from confluent_kafka import KafkaError, KafkaException

from doll.errors import ServiceUnavailableError

T = TypeVar("T")

_NEW_TOPIC_S: Final = 10.0
# What brokers answer about a topic that was created a moment ago.
_LEADERLESS: Final = (
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
)


def error_of(exc: KafkaException) -> KafkaError:
    """The error that an exception carries."""
    return exc.args[0]


@contextlib.contextmanager
def translate_errors(address: str, what: str, hint: str = "is it running, and the address right?") -> Iterator[None]:
    """Within the context, raise KafkaException as `Kafka at ADDRESS does not WHAT (reason): HINT`.

    Args:
        what: "describe topic t", "accept records".

    Raises:
        ServiceUnavailableError: in place of KafkaException.
    """
    try:
        yield
    except KafkaException as exc:
        raise ServiceUnavailableError(f"Kafka at {address} does not {what} ({error_of(exc).str()}): {hint}") from exc


def retry_while_leaderless(call: Callable[[], T]) -> T:
    """What `call` returns; a topic that was just created may not have a leader yet, which is waited for.

    Raises:
        KafkaException: as `call` raises it, when waiting does not help.
    """
    deadline_s = time.monotonic() + _NEW_TOPIC_S
    while True:
        try:
            return call()
        except KafkaException as exc:
            if error_of(exc).code() not in _LEADERLESS or time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)
