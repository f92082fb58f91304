"""Fills a topic as its owner would: clicks in Avro, each after the id that a schema registry gave its schema.

python fill.py train.txt                          # lines in Criteo's format, plain or .gz
python task.py 20000 | python fill.py -           # or lines of standard input

The first 5,000 records (`--change-at`) are written with `click-1.avsc`, the following ones with `click-2.avsc`, which
has one more field, because schemas change while a job runs.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import io
import json
import os
import struct
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fastavro
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

COUNTS, CATEGORIES = 13, 26
FIRST_IMPRESSION = 2**53 + 1  # no float64 holds it


class Schema(NamedTuple):
    """A registered schema."""

    number: int
    parsed: Any


def register(registry: str, subject: str, file: Path) -> Schema:
    """Register a schema, or find its id if it is already registered."""
    text = file.read_text(encoding="utf-8")
    headers = {"Content-Type": "application/vnd.schemaregistry.v1+json"}
    if token := os.environ.get("DOLL_REGISTRY_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    elif user := os.environ.get("DOLL_REGISTRY_USERNAME"):
        pair = f"{user}:{os.environ.get('DOLL_REGISTRY_PASSWORD', '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    url = f"{registry.rstrip('/')}/subjects/{subject}/versions"
    request = urllib.request.Request(url, json.dumps({"schema": text}).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return Schema(int(json.load(response)["id"]), fastavro.parse_schema(json.loads(text)))
    except urllib.error.HTTPError as exc:
        sys.exit(f"the registry at {registry} refuses {file.name}: HTTP {exc.code} {exc.read(500).decode()}")
    except OSError as exc:
        sys.exit(f"no schema registry answers at {registry}: {exc}; --registry URL, or DOLL_REGISTRY")


def clicks(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield a click for each line: label, 13 counts, 26 categories in hex, separated by tabs; a cell may be empty."""
    for number, line in enumerate(lines):
        label, *cells = line.rstrip("\n").split("\t")
        if len(cells) != COUNTS + CATEGORIES:
            sys.exit(f"line {number + 1}: expected {1 + COUNTS + CATEGORIES} cells, got {1 + len(cells)}")
        yield {
            "impression": FIRST_IMPRESSION + number,
            "clicked": label == "1",
            "counts": [int(cell) if cell else None for cell in cells[:COUNTS]],
            "categories": [cell or None for cell in cells[COUNTS:]],
        }


def encode(schema: Schema, click: dict[str, Any]) -> bytes:
    """Encode a click as the serializers of registries do: a byte 0, the id in 4 bytes, the record."""
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, schema.parsed, click)
    return struct.pack(">bI", 0, schema.number) + stream.getvalue()


def create(address: str, topic: str, partitions: int) -> None:
    """Create the topic, if it does not exist."""
    admin = AdminClient({"bootstrap.servers": address})  # must stay referenced until the answer arrives
    try:
        admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result()
    except KafkaException as exc:
        if exc.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise


def main() -> None:
    """Register both schemas, create the topic and send all clicks."""
    parser = argparse.ArgumentParser(description="Fill a topic with clicks in Avro.")
    parser.add_argument("file", help="lines in Criteo's format, plain or .gz; -: standard input")
    parser.add_argument("--kafka", default=os.environ.get("DOLL_KAFKA", "localhost:9092"), help="host:port")
    parser.add_argument("--registry", default=os.environ.get("DOLL_REGISTRY", "http://localhost:8081"), help="URL")
    parser.add_argument("--topic", default="clicks")
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--change-at", type=int, default=5000, help="how many are written with the first schema")
    options = parser.parse_args()
    here, subject = Path(__file__).parent, f"{options.topic}-value"
    first, second = (register(options.registry, subject, here / f"click-{n}.avsc") for n in (1, 2))
    create(options.kafka, options.topic, options.partitions)
    producer, failures, sent = Producer({"bootstrap.servers": options.kafka, "enable.idempotence": True}), [], 0

    def delivered(error: KafkaError | None, message: object) -> None:
        if error is not None:
            failures.append(error)

    open_file = gzip.open if options.file.endswith(".gz") else open
    with open_file(options.file, "rt", encoding="utf-8") if options.file != "-" else sys.stdin as file:
        for sent, click in enumerate(clicks(file), 1):
            value = encode(first if sent <= options.change_at else second, click)
            producer.produce(options.topic, value, str(click["impression"]), on_delivery=delivered)
            producer.poll(0 if sent % 10_000 else 1)
    producer.flush()
    if failures:
        sys.exit(f"{len(failures)} clicks were not sent: {failures[0]}")
    sys.stdout.write(f"{sent} clicks in topic {options.topic} at {options.kafka}\n")


if __name__ == "__main__":
    main()
