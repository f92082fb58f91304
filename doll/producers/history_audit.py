"""The audit of a source of kind history: each row of the table, and each record of the topic, is one sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from doll.errors import ConfigError
from doll.kafka.range_reader import RangeReader
from doll.producers.handover import ORIGIN
from doll.producers.history import read_snapshot, read_state
from doll.services import Services

if TYPE_CHECKING:
    from doll.config import JobConfig


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
    """Audit the history of a job from its topics. Reads only; keeps a byte for each row and record.

    Raises:
        ConfigError: the job has not begun.
        ServiceUnavailableError: Kafka does not answer.
    """
    samples = config.topic("samples")
    with RangeReader(config, services) as reader:
        if (snapshot := read_snapshot(config, reader)) is None:
            raise ConfigError(f"job {config.job} has not sent anything of its history")
        # The samples first: the state is not older than they are.
        counts = {-1: np.zeros(snapshot.rows, np.uint8)}
        deleted = 0
        found: list[tuple[int, int]] = []
        for stream in range(config.data.num_partitions):
            low, high = reader.bounds(samples, stream)
            deleted += low
            for message in reader.messages(samples, stream, low, high):
                for name, value in message.headers:
                    if name == ORIGIN and value:
                        numbers = [int(number) for number in value.split()]
                        found.append((numbers[0], numbers[1]) if len(numbers) == 2 else (-1, numbers[0]))
        state = read_state(config, reader)
    return HistoryReport()
