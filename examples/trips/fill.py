"""Fills a topic as its owner would: a JSON record for each trip, with the zone where it began as its key.

python fill.py green_tripdata_2024-01.csv         # from a CSV file of New York's TLC, plain or .gz
python task.py 20000 | python fill.py -           # or from JSON lines
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import sys
from collections.abc import Iterator
from typing import IO, Any

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

TEXTS, WHOLE = ("lpep_pickup_datetime",), ("PULocationID", "DOLocationID")
NUMBERS = ("trip_distance", "fare_amount")


def trips(file: IO[str], is_csv: bool) -> Iterator[dict[str, Any]]:
    """Yield the used columns of each trip; None for an empty cell."""
    if not is_csv:
        yield from map(json.loads, file)
        return
    for row in csv.DictReader(file):
        yield {
            **{name: row[name] for name in TEXTS},
            **{name: int(row[name]) if row[name] else None for name in WHOLE},
            **{name: float(row[name]) if row[name] else None for name in NUMBERS},
        }


def create(address: str, topic: str, partitions: int) -> None:
    """Create the topic, if it does not exist."""
    admin = AdminClient({"bootstrap.servers": address})  # must stay referenced until the answer arrives
    try:
        admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result()
    except KafkaException as exc:
        if exc.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise


def main() -> None:
    """Create the topic and send all trips."""
    parser = argparse.ArgumentParser(description="Fill a topic with taxi trips.")
    parser.add_argument("file", help="CSV file of TLC, plain or .gz; -: JSON lines of standard input")
    parser.add_argument("--kafka", default=os.environ.get("DOLL_KAFKA", "localhost:9092"), help="host:port")
    parser.add_argument("--topic", default="trips")
    parser.add_argument("--partitions", type=int, default=12)
    options = parser.parse_args()
    create(options.kafka, options.topic, options.partitions)
    producer, failures, count = Producer({"bootstrap.servers": options.kafka, "enable.idempotence": True}), [], 0

    def delivered(error: KafkaError | None, message: object) -> None:
        if error is not None:
            failures.append(error)

    is_csv = options.file != "-"
    open_file = gzip.open if options.file.endswith(".gz") else open
    with open_file(options.file, "rt", encoding="utf-8") if is_csv else sys.stdin as file:
        for count, trip in enumerate(trips(file, is_csv), 1):
            producer.produce(options.topic, json.dumps(trip), str(trip["PULocationID"]), on_delivery=delivered)
            producer.poll(0 if count % 10_000 else 1)
    producer.flush()
    if failures:
        sys.exit(f"{len(failures)} trips were not sent: {failures[0]}")
    sys.stdout.write(f"{count} trips in topic {options.topic} at {options.kafka}\n")


if __name__ == "__main__":
    main()
