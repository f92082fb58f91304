"""Notices the end of a job, for processes that have no other reason to end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from doll.kafka.tail import Tail
from doll.records.control import Finished
from doll.telemetry import get_logger

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.services import Services

log = get_logger(__name__)
_POLL_S: Final = 0.5


@contextlib.contextmanager
def on_finish(config: JobConfig, services: Services, call: Callable[[], None]) -> Iterator[None]:
    """Within the context: `call` is called, in a thread, once when the job finishes.

    A Finished record from before is ignored: this process was started because the job goes on.

    Raises:
        ServiceUnavailableError: Kafka does not answer at the start. Later it is waited for.
    """
    exited = threading.Event()

    def watch() -> None:
        while not exited.is_set():
            for timed in tail.poll(_POLL_S):
                if isinstance(timed.record, Finished):
                    log.info("job_finished", version=timed.record.version, reason=timed.record.reason)
                    call()
                    return

    with Tail(config, services, (config.topic("updates"),), from_now_on=True) as tail:
        thread = threading.Thread(target=watch, name="finish", daemon=True)
        thread.start()
        try:
            yield
        finally:
            exited.set()
            thread.join()
