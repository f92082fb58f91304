"""The audit of a source of kind history: each row of the table, and each record of the topic, is one sample."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from doll.config import HistorySource, JobConfig
from doll.errors import ConfigError
from doll.kafka.range_reader import RangeReader
from doll.producers.handover import ORIGIN
from doll.producers.history import read_snapshot, read_state
from doll.services import Services


@dataclass(slots=True)
class HistoryReport:
    """The result. `problems`: one sentence each; none if the audit holds."""

    rows: int = 0
    total_rows: int = 0
    forwarded: int = 0
    in_history: int = 0
    refused: int = 0
    deleted: int = 0  # samples that retention has deleted: of them nothing is said
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def text(self) -> str:
        line = (
            f"history: {self.rows} rows of {self.total_rows} sent; topic: {self.forwarded} records sent, "
            f"{self.in_history} in the history, {self.refused} refused; {self.deleted} samples deleted since"
        )
        return "\n".join([line, *(f"PROBLEM: {problem}" for problem in self.problems)])


def audit_history(config: JobConfig, services: Services) -> HistoryReport:
    """Audit the history of a job from its topics. Reads only; needs a byte for each row and record.

    Raises:
        ConfigError: the job has sent nothing yet.
        ServiceUnavailableError: Kafka does not answer.
    """
    assert isinstance(config.source, HistorySource)
    topic, samples = config.source.topic, config.topic("samples")
    with RangeReader(config, services) as reader:
        if (snapshot := read_snapshot(config, reader)) is None:
            raise ConfigError(f"job {config.job} has sent nothing of its history yet")
        state = read_state(config, reader)  # before the samples, which may go further
        bounds = [reader.bounds(topic, partition) for partition in range(len(state.offsets))]
        begin = [*snapshot.begin, *[0] * (len(bounds) - len(snapshot.begin))]
        rows = np.zeros(snapshot.rows, np.uint8)
        records = [np.zeros(max(0, high - first), np.uint8) for first, (_, high) in zip(begin, bounds, strict=True)]
        report = HistoryReport(state.rows, snapshot.rows, state.forwarded, state.in_history, state.refused)
        for stream in range(config.data.num_partitions):
            low, high = reader.bounds(samples, stream)
            report.deleted += low
            for message in reader.messages(samples, stream, low, high):
                # A sample that `doll dead replay` has written again has no origin.
                for value in (value for name, value in message.headers if name == ORIGIN and value):
                    try:
                        *place, at = map(int, value.split())
                        if not place:
                            rows[at] += rows[at] < 2
                        elif place[0] < len(records) and (index := at - begin[place[0]]) < len(records[place[0]]):
                            records[place[0]][index] += records[place[0]][index] < 2
                    except (ValueError, IndexError):
                        report.problems.append(f"{samples}/{stream}, offset {message.offset}: no origin: {value!r:.60}")
        missing = int((rows[: state.rows] == 0).sum())
        twice = int((rows > 1).sum()) + sum(int((of > 1).sum()) for of in records)
        absent, unknown = 0, False
        for partition, (first, until, of) in enumerate(zip(begin, state.offsets, records, strict=True)):
            unknown = unknown or bounds[partition][0] > first
            for offset, _ in reader.read(topic, partition, max(first, bounds[partition][0]), until):
                absent += not of[offset - first]
    if twice:
        report.problems.append(f"{twice} rows or records are in more than one sample")
    unexplained = absent - state.in_history - state.refused
    if missing + max(0, unexplained) > report.deleted or (unexplained < 0 and not unknown):
        report.problems.append(f"{missing} rows and {unexplained} records of topic {topic} are in no sample")
    return report
