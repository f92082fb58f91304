"""A stand-in for the parameter server that only confirms: what a worker announces is durable at once.

With it, a real worker process shows how fast samples come through broker, Faust, batcher and decoder, no gradient.
"""

from __future__ import annotations

import json
import time
from pathlib import Path


def confirm_all(job_path: str, kafka: str, redis: str, out: str, batches: int) -> None:
    """Welcome worker 0, confirm `batches` batches, write [monotonic time, batches so far] pairs to `out`, say Stop."""
    from doll.config import load
    from doll.kafka import topics
    from doll.model import build, fingerprint
    from doll.ps.kafka_channel import KafkaChannel
    from doll.records import Announce, Durable, Join, Stop, Welcome, decode
    from doll.services import Services
    from doll.task import load_task

    config, services = load(Path(job_path)), Services(kafka, redis)
    topics.ensure(config, services)
    mark = fingerprint(config, build(config, load_task(config)))
    channel = KafkaChannel(config, services)
    # At the end of what is there: runs on one topic follow each other.
    origin = channel.watermarks(config.topic("samples"), 0)[0 if config.data.start == "earliest" else 1]
    seen: list[tuple[float, int]] = []
    while not seen or seen[-1][1] < batches:
        for value in channel.poll(0.05):
            match decode(value):
                case Join() as join:
                    channel.send_command(
                        0,
                        Welcome(
                            term=1, worker=0, process=join.process, session=1, origin=origin, next_batch=0,
                            fingerprint=mark,
                        ),
                    )  # fmt: skip
                case Announce() as announce:
                    channel.send_command(0, Durable(term=1, worker=0, until=announce.until))
                    seen.append((time.monotonic(), announce.until))
    channel.send_command(0, Stop(term=1, reason="measured"))
    channel.flush(5.0)
    channel.close()
    Path(out).write_text(json.dumps(seen), encoding="utf-8")


def produce_later(job_path: str, kafka: str, redis: str, run_folder: str, wait_s: float) -> int:
    """The job's own producer, once the worker had time to join."""
    from doll.run.roles import producer_role

    time.sleep(wait_s)
    return producer_role(job_path, kafka, redis, run_folder)
