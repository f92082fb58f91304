"""Intake of one worker: topics filled fast, and a stand-in for the parameter server that only confirms.

What a worker announces is durable at once. With that, a real worker process shows how fast samples come through broker,
Faust, batcher and decoder, without gradients.
"""

from __future__ import annotations

import io
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from doll import FieldsTask
from doll.config import JobConfig
from doll.kafka.clients import make_producer
from doll.services import Services
from doll.task.fields_task import Columns

_FILL_RECORDS = 2000  # in one call of the client
_QUEUE_KBYTES = 262_144
_QUEUE_RECORDS = 1_000_000
AVRO_SCHEMA = {
    "type": "record",
    "name": "Event",
    "fields": [
        {"name": "age", "type": "double"},
        {"name": "visits", "type": "int"},
        {"name": "spend", "type": "double"},
        {"name": "tenure", "type": "double"},
        {"name": "left", "type": "boolean"},
    ],
}


class Event(msgspec.Struct):
    age: float
    visits: int
    spend: float
    tenure: float
    left: bool


class Events(FieldsTask):
    """Events of five fields, JSON or as `data.format` says: whether a customer leaves."""

    record = Event
    input_shape = (4,)
    num_classes = 2

    def build_model(self) -> Any:
        import torch

        return torch.nn.Linear(4, 2)

    def samples(self, columns: Columns) -> tuple[Any, Any]:
        numbers = [columns["age"] / 50, columns["visits"] / 10, np.log1p(columns["spend"]) / 5, columns["tenure"] / 5]
        return np.stack(numbers, axis=1), columns["left"]


def events(count: int) -> Iterator[dict[str, Any]]:
    """The fields of events."""
    rng = random.Random(0)
    for _ in range(count):
        yield {
            "age": round(rng.uniform(18, 80), 1), "visits": rng.randint(0, 30),
            "spend": round(rng.expovariate(1 / 80), 2), "tenure": rng.randint(0, 20), "left": rng.random() < 0.5,
        }  # fmt: skip


def event_records(count: int) -> list[bytes]:
    """Values of records for `Events`, about 80 bytes each."""
    return [json.dumps(event).encode() for event in events(count)]


def avro_records(count: int) -> list[bytes]:
    """As `event_records`, in Avro behind the header of a registry that has `AVRO_SCHEMA` as schema 1."""
    import fastavro

    schema, values = fastavro.parse_schema(AVRO_SCHEMA), []
    for event in events(count):
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, schema, event)
        values.append(b"\0\0\0\0\1" + stream.getvalue())
    return values


def protobuf_records(count: int) -> list[bytes]:
    """As `event_records`, as Protobuf messages behind the header of a registry."""
    from benchmarks.event_messages import Event as Message

    return [b"\0\0\0\0\1\0" + Message(**event).SerializeToString() for event in events(count)]


def csv_records(count: int) -> list[bytes]:
    """As `event_records`, as lines of CSV."""
    return [",".join(str(value).lower() for value in event.values()).encode() for event in events(count)]


@contextmanager
def schema_server() -> Iterator[str]:
    """The URL of a registry that has `AVRO_SCHEMA` as each of its schemas."""
    body = json.dumps({"schema": json.dumps(AVRO_SCHEMA)}).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def fill_topic(config: JobConfig, services: Services, values: Sequence[bytes], records: int) -> None:
    """Append so many records to each partition of the job's samples, `values` again and again.

    Raises:
        RuntimeError: Kafka did not take all of them.
    """
    producer = make_producer(
        config, services, delivery_report_only_error=True, linger_ms=20, batch_size=1_000_000,
        queue_buffering_max_kbytes=_QUEUE_KBYTES, queue_buffering_max_messages=_QUEUE_RECORDS,
    )  # fmt: skip
    refused: list[str] = []
    largest = max(map(len, values))
    room = min(_QUEUE_RECORDS, _QUEUE_KBYTES * 1024 // (largest + 100)) - _FILL_RECORDS  # records that may wait
    messages = [{"value": value} for value in values]
    sent = 0
    while sent < records:
        at = sent % len(messages)
        chunk = messages[at : at + min(_FILL_RECORDS, records - sent)]
        for partition in range(config.data.workers):
            while len(producer) > room:
                producer.poll(0.05)
            producer.produce_batch(
                config.topic("samples"), chunk, partition=partition, on_delivery=lambda err, _: refused.append(str(err))
            )
        producer.poll(0)
        sent += len(chunk)
    left = producer.flush(120.0)
    if refused or left:
        raise RuntimeError(f"{len(refused)} records were refused ({refused[:1]}), {left} are not delivered")


def confirm_all(job_path: str, kafka: str, redis: str, out: str, batches: int) -> None:
    """Welcome worker 0, confirm `batches` batches, write [monotonic time, batches so far] pairs to `out`, say Stop."""
    from doll.config import load
    from doll.kafka import topics
    from doll.model.flat_model import build, fingerprint
    from doll.ps.channels.kafka_channel import KafkaChannel
    from doll.records.control import Announce, Durable, Join, Served, Stop, Welcome, decode
    from doll.services import Services
    from doll.task.base import load_task

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
                            term=1, worker=0, process=join.process, session=1, fingerprint=mark,
                            served=(Served(partition=0, origin=origin, next_batch=0),),
                        ),
                    )  # fmt: skip
                case Announce(runs=runs):
                    channel.send_command(
                        0, Durable(term=1, worker=0, until={0: runs[-1].until}, batches=runs[-1].until)
                    )
                    seen.append((time.monotonic(), runs[-1].until))
    channel.send_command(0, Stop(term=1, reason="measured"))
    channel.flush(5.0)
    channel.close()
    Path(out).write_text(json.dumps(seen), encoding="utf-8")


def produce_later(job_path: str, kafka: str, redis: str, run_folder: str, wait_s: float) -> int:
    """The job's own producer, once the worker had time to join."""
    from doll.run.local.roles import producer_role

    time.sleep(wait_s)
    return producer_role(job_path, kafka, redis, run_folder)
