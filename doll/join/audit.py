"""The audit of `data.join`: what became of each record of the joined topics, from the topics alone.

Each record of features must be in one first sample, dropped, refused, or open; each record of labels in samples of one
key, refused, or open. The samples and the journal say what became of a record; the joined topics say which records
there are. A record that has been joined and of which nothing is said is open. It contradicts if its window has closed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from doll.join.extract import Bad, Extractor
from doll.kafka.joined_topics import JoinedTopic, joined_topics
from doll.kafka.range_reader import RangeReader
from doll.kafka.reader import Message
from doll.records.control import DeadLetter
from doll.records.join_log import FEATURES, Step, decode_step, parse_restart, partition_of
from doll.services import Services

if TYPE_CHECKING:
    from doll.config import JobConfig

_NAMED: Final = 8  # records that a problem names at most

Place = tuple[int, int, int]  # source, partition and offset


class _Sample(msgspec.Struct):
    doll_is_correction: bool
    doll_features: str
    doll_labels: list[str]


@dataclass(slots=True)
class TopicCounts:
    """The counts of the records of one joined topic, by what became of them.

    Attributes:
        read: records that were read. They are the sum of all others.
        used: in a first sample; of labels: in any sample.
        dropped: features whose window closed without a label.
        refused: by the code of the reason.
        open: wait for the other side, or for the end of their window.
        unread: behind the committed offset.
    """

    name: str
    read: int = 0
    used: int = 0
    dropped: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    open: int = 0
    unread: int = 0

    def text(self) -> str:
        refused = ", ".join(f"{count} {code}" for code, count in sorted(self.refused.items())) or "0"
        return (
            f"{self.name}: {self.read} read = {self.used} used + {self.dropped} dropped + refused ({refused}) + "
            f"{self.open} open; {self.unread} not read yet"
        )


@dataclass(slots=True)
class JoinReport:
    """The result. `problems`: one sentence each; none if the audit holds."""

    topics: list[TopicCounts]
    samples: int = 0
    corrections: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def text(self) -> str:
        lines = [counts.text() for counts in self.topics]
        lines.append(f"{self.samples} samples and {self.corrections} corrections written")
        return "\n".join([*lines, *(f"PROBLEM: {problem}" for problem in self.problems)])


def audit_join(config: JobConfig, services: Services) -> JoinReport:
    """Audit the join of a job. Reads only.

    Raises:
        ConfigError: a joined topic cannot be read.
        ServiceUnavailableError: Kafka does not answer.
    """
    inputs = joined_topics(config, services)
    with RangeReader(config, services) as reader:
        # The samples first: what a sample names has been read before, and the journal is written with it.
        used, report = _samples(config, reader, inputs)
        journal = _journal(config, reader)
        samples = config.topic("samples")
        journal.cut = frozenset(at for at in range(config.data.num_partitions) if reader.bounds(samples, at)[0] > 0)
        for topic in inputs:
            _balance(config, reader, topic, report, used, journal)
    return report


def _samples(
    config: JobConfig, reader: RangeReader, inputs: tuple[JoinedTopic, ...]
) -> tuple[dict[Place, int], JoinReport]:
    """Return how often each record is used: features by first samples, labels by the samples that name them."""
    assert config.data.join is not None
    sources = {label.name: source for source, label in enumerate(config.data.join.labels, start=1)}
    report = JoinReport([TopicCounts(topic.name) for topic in inputs])
    used: Counter[Place] = Counter()
    by_label: dict[Place, str] = {}
    decode = msgspec.json.Decoder(_Sample).decode
    # `doll dead replay` writes a sample again.
    letters = reader.records(config.topic("dead"), (DeadLetter,))
    replayed = {(letter.partition, letter.replayed_as) for letter in letters if letter.code == "replayed"}
    for partition, offset, value in _all(config, reader, "samples"):
        if (partition, offset) in replayed:
            continue
        where = f"{config.topic('samples')}/{partition}, offset {offset}"
        try:
            sample = decode(value or b"")
            features = (FEATURES, *_place(sample.doll_features))
            labels = [
                (sources[name], *_place(at)) for name, _, at in (item.rpartition(":") for item in sample.doll_labels)
            ]
        except (msgspec.MsgspecError, ValueError, KeyError) as exc:
            report.problems.append(f"{where}: not a record of the join: {exc}")
            continue
        if sample.doll_is_correction:
            report.corrections += 1
        else:
            report.samples += 1
            used[features] += 1
        for label in labels:
            if by_label.setdefault(label, sample.doll_features) != sample.doll_features:
                report.problems.append(f"{where}: a label of other features: {label}")
            used[label] = 1
    return used, report


@dataclass(slots=True)
class _Journal:
    """The content of the journal: records that were refused, with the codes, and dropped; the newest step of each
    partition of the log; and the partitions of the samples topic that have lost samples by retention (`cut`)."""

    refused: dict[Place, str] = field(default_factory=dict)
    dropped: set[Place] = field(default_factory=set)
    newest: dict[int, Step] = field(default_factory=dict)
    cut: frozenset[int] = frozenset()

    def until(self, source: int, partition: int, num_partitions: int) -> int:
        """Return the offset up to which an input has been joined, by all partitions of the log."""
        offsets = [0] * num_partitions
        for at, step in self.newest.items():
            marks = {(mark[0], mark[1]): mark[2] for mark in parse_restart(step.restart).marks}
            offsets[at] = marks.get((source, partition), 0)
        return min(offsets)


def _journal(config: JobConfig, reader: RangeReader) -> _Journal:
    journal = _Journal()
    for partition, _, value in _all(config, reader, "joins"):
        step = decode_step(value)
        journal.refused.update(((item.source, item.partition, item.offset), item.code) for item in step.refused)
        journal.dropped.update((FEATURES, *place) for place in step.dropped)
        if step.restart:
            journal.newest[partition] = step
    return journal


def _balance(
    config: JobConfig, reader: RangeReader, topic: JoinedTopic, report: JoinReport, used: dict[Place, int],
    journal: _Journal,
) -> None:  # fmt: skip
    """Count the records of one topic, and note what contradicts."""
    assert config.data.join is not None
    counts, refused, dropped = report.topics[topic.source], journal.refused, journal.dropped
    extractor = Extractor(config.data.join, topic.source, max_record_bytes=config.data.max_record_bytes)
    wrong: dict[str, list[str]] = {}
    said: dict[int, set[Place]] = {partition: set() for partition in range(topic.partitions)}
    for place in (*used, *refused, *dropped):
        if place[0] == topic.source:
            said[place[1]].add(place)
    for partition in range(topic.partitions):
        until = journal.until(topic.source, partition, config.data.num_partitions)
        low, high = reader.bounds(topic.name, partition)
        absent = {place for place in said[partition] if place[2] >= low}
        for message in reader.messages(topic.name, partition, low, high):
            place = topic.source, partition, message.offset
            absent.discard(place)
            times = used.get(place, 0) + (place in refused) + (place in dropped)
            if message.offset >= until and not times:
                counts.unread += 1
                continue
            counts.read += 1
            if times > 1:
                wrong.setdefault("count more than once", []).append(f"{partition}/{message.offset}")
            if place in refused:
                counts.refused[refused[place]] += 1
            elif place in dropped:
                counts.dropped += 1
            elif used.get(place):
                counts.used += 1
            else:
                counts.open += 1
                if _is_overdue(config, extractor, message, journal):
                    wrong.setdefault("are in no sample, and their windows have closed", []).append(
                        f"{partition}/{message.offset}"
                    )
        for place in absent:
            wrong.setdefault("are in samples or refused, and not in the topic", []).append(f"{partition}/{place[2]}")
    for what, places in wrong.items():
        report.problems.append(f"{topic.name}: {len(places)} records {what}: {', '.join(sorted(places)[:_NAMED])}")


def _is_overdue(config: JobConfig, extractor: Extractor, message: Message, journal: _Journal) -> bool:
    """Return whether the window of a record that is said to be open has closed."""
    join = config.data.join
    assert join is not None
    try:
        written = 1, round(1000 * message.written_s)
        key, time_ms, _ = extractor.read(message.value, message.key, written, message.headers)
    except Bad:
        return True  # it should be refused
    partition = partition_of(key, config.data.num_partitions)
    step = journal.newest.get(partition)
    if step is None or partition in journal.cut:  # its sample may have been deleted
        return False
    # A label may also wait for the end of the window of features that are younger.
    wait_s = join.window_s + join.lateness_s + (0.0 if extractor.source == FEATURES else join.window_s)
    return time_ms + 1000 * (wait_s + join.kept_late_s) < min(step.features_ms, step.labels_ms)


def _all(config: JobConfig, reader: RangeReader, kind: str) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield partition, offset and value of each committed record of a topic of the job."""
    topic = config.topic(kind)  # type: ignore[arg-type]
    for partition in range(config.data.num_partitions):
        for offset, value in reader.read(topic, partition, *reader.bounds(topic, partition)):
            yield partition, offset, value


def _place(text: str) -> tuple[int, int]:
    partition, _, offset = text.partition("@")
    return int(partition), int(offset)
