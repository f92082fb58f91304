"""Wait for the end of a job, told by its `updates` topic, for processes that have no other reason to end."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from doll.evaluation.kafka_tail import Tail
from doll.records import Epoch, Finished

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.services import Services

_POLL_S: Final = 0.5
# A job that finished before this process started may be about to go on: a new parameter server says so within seconds.
RESUME_GRACE_S: Final = 15.0


def wait_for_finish(config: JobConfig, services: Services, give_up: threading.Event) -> Finished | None:
    """The record that the job has finished, once nothing follows it; None if `give_up` is set before.

    Raises:
        ServiceUnavailableError: Kafka does not answer at the start. Later it is waited for.
    """
    topic = config.topic("updates")
    started_s = time.monotonic()
    finished: Finished | None = None
    with Tail(config, services, (topic,)) as tail:
        while not give_up.is_set():
            news = False
            for one in tail.poll(_POLL_S):
                if isinstance(one.record, Finished):
                    finished, news = one.record, one.offset >= tail.ends[topic]
                elif isinstance(one.record, Epoch):
                    finished, news = None, False
            settled = time.monotonic() - started_s > RESUME_GRACE_S and tail.past(topic)
            if finished is not None and (news or settled):
                return finished
    return None
