"""Hear of the end of a job, for processes that have no other reason to end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from doll.kafka.tail import Tail
from doll.records import Finished
from doll.telemetry import get_logger

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.services import Services

log = get_logger(__name__)
_POLL_S: Final = 0.5


@contextlib.contextmanager
def on_finish(config: JobConfig, services: Services, call: Callable[[], None]) -> Iterator[None]:
    """Within the context: `call` is called, in a thread, once when the job finishes.

    A job that had finished before is about to go on, or why would this process have been started?

    Raises:
        ServiceUnavailableError: Kafka does not answer at the start. Later it is waited for.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            for topic_record in tail.poll(_POLL_S):
                if isinstance(topic_record.record, Finished):
                    log.info("job_finished", version=topic_record.record.version, reason=topic_record.record.reason)
                    call()
                    return

    with Tail(config, services, (config.topic("updates"),), from_now_on=True) as tail:
        thread = threading.Thread(target=watch, name="finish", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
