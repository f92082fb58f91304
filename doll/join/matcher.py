"""The join of one partition of the join log. Pure: what is written follows from the packs alone, in their order.

A key begins with its features, or with a label that came first. A sample is written when its label is known, after a
short time if the job asks for early samples, or when the window of the key has closed. Windows close by event time:
when all label partitions have been read up to the end of the window. A joiner moves the event time of a partition that
it has read to its end to the time of its clock, so windows also close if no label comes any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import msgspec

from doll.join.entries import Entries, Entry, State
from doll.join.watermarks import Watermarks
from doll.records.join_log import FEATURES, Kept, Pack, Restart, Routed

if TYPE_CHECKING:
    from doll.config.join import JoinConfig, LabelConfig

MAX_LABELS: Final = 1_000  # of one key
_SAMPLE: Final = (
    b'%b%b,"doll_label_age_s":%.3f,"doll_is_correction":%b,"doll_replaced_label":%b,"doll_features":"%d@%d",'
    b'"doll_labels":[%b]}'
)
_SEGMENTS: Final = 500  # parts of the log in the time of a window: a restart reads at most one more than it needs
_MIN_SEGMENT_MS: Final = 200
_MAX_SEGMENT_MS: Final = 60_000


class Refused(NamedTuple):
    """A record that is in no sample, with the reason."""

    record: Routed
    code: str
    reason: str


class Sample(msgspec.Struct, frozen=True, gc=False):
    """A sample to write. `labels`: the records of labels that this sample is the first to contain."""

    value: bytes
    features: Routed
    labels: tuple[Routed, ...]
    is_correction: bool


@dataclass(slots=True)
class Decisions:
    """What follows from some packs.

    Attributes:
        dropped: features whose window has closed without a label, if these are dropped.
        settled: serials of records of which no open key has need any more.
        kept: entries that have changed their state and stay.
    """

    samples: list[Sample] = field(default_factory=list)
    corrections: int = 0  # among the samples
    dropped: list[Routed] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    settled: list[int] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)


@dataclass(slots=True)
class _Segment:
    """A part of the log, from an offset and a serial on. `journal`: an offset of the journal before which nothing is
    said of its records."""

    offset: int
    serial: int
    journal: int
    began_ms: int
    live: int = 0  # entries that began in it


class Matcher:
    """The join of one partition of the log. The serial of a record is its number in the log.

    Args:
        partitions: number of partitions of each source.
        entries: empty.
    """

    def __init__(self, config: JoinConfig, partitions: Mapping[int, int], entries: Entries) -> None:
        self.watermarks = Watermarks(partitions)
        self._entries = entries
        self._labels = [(label.name.encode(), label.take, _absent(config, label)) for label in config.labels]
        self._window_ms = round(1000 * config.window_s)
        self._open_ms = self._window_ms + round(1000 * config.lateness_s)
        early_s = config.early_after_s
        self._first_wait_ms = self._open_ms if early_s is None else round(1000 * early_s)  # of features
        self._late_ms = round(1000 * config.kept_late_s)
        self._drops = config.on_close == "drop"
        self._confirms = config.confirm
        self._ends_early = all(label.take == "first" for label in config.labels)
        self._keeps_sent = self._late_ms > 0 or any(label.retract for label in config.labels)
        self._pairs = len(self._labels) == 1 and self._ends_early and not self._keeps_sent
        name = self._labels[0][0].replace(b"%", b"%%")
        self._pair_format = (
            b'%b"' + name + b'":%b,"doll_label_age_s":%.3f,"doll_is_correction":false,"doll_replaced_label":null,'
            b'"doll_features":"%d@%d","doll_labels":["' + name + b':%d@%d"]}'
        )
        self._serial = 0
        self._segments: deque[_Segment] = deque()
        self._first_segment = 0
        self._segment_ms = min(max(self._open_ms // _SEGMENTS, _MIN_SEGMENT_MS), _MAX_SEGMENT_MS)
        self._out = Decisions()

    def __len__(self) -> int:
        """Return the number of open keys."""
        return len(self._entries)

    def close(self) -> None:
        self._entries.close()

    # --- restart ------------------------------------------------------------------------------------------------------

    def restart(self, offset: int, journal: int) -> Restart:
        """Return how a later matcher continues, if this one has joined the log up to `offset`, and the next record of
        the journal gets the offset `journal`."""
        while self._segments and not self._segments[0].live:
            self._segments.popleft()
            self._first_segment += 1
        begin = self._segments[0] if self._segments else _Segment(offset, self._serial, journal, 0)
        return Restart(begin.offset, begin.serial, begin.journal, self._serial, self.watermarks.state())

    def restore(self, restart: Restart, packs: Iterable[tuple[int, Pack]], journal: Iterable[Decisions]) -> None:
        """Take over the state of a matcher. Call it before `feed`.

        Args:
            packs: the log from `restart.offset` until the committed offset.
            journal: what was decided since `restart.journal`: `settled` and `kept`.
        """
        settled = bytearray(restart.until - restart.serial)
        kept: dict[int, Kept] = {}
        for step in journal:
            for serial in step.settled:
                if serial >= restart.serial:
                    settled[serial - restart.serial] = 1
            kept.update((item.serial, item) for item in step.kept)
        self.watermarks.restore(restart.marks)
        self._serial, entries = restart.serial, self._entries
        for offset, pack in packs:
            self._segment(offset, restart.journal, pack.now_ms)
            until = self._serial + len(pack.records)
            marks = settled[self._serial - restart.serial : until - restart.serial]
            live = [item for item, mark in zip(enumerate(pack.records, self._serial), marks, strict=False) if not mark]
            if entries.spilled:
                # Features that are not settled are the only ones of their key: only a label may be before them.
                also = entries.spilled_waiting > 0
                entries.fetch(record.key for _, record in live if also or record.source != FEATURES)
            for source, run in groupby(live, key=lambda item: item[1].source):
                if source == FEATURES:
                    self._adopt(list(run), kept)
                else:
                    for self._serial, record in run:
                        self._adopt_label(record)
            self._serial = until
            entries.tidy()
        if (got := self._serial - restart.serial) != len(settled):
            raise ValueError(f"expected {len(settled)} records of the join log from {restart.offset}, got {got}")

    def _adopt(self, features: list[tuple[int, Routed]], kept: Mapping[int, Kept]) -> None:
        """Begin the entries of features, which have their serials."""
        segment, wait_ms = self._first_segment + len(self._segments) - 1, self._first_wait_ms
        entries = [
            Entry(record.key, "open", record.time_ms + wait_ms, serial, segment, record, [], [])
            for serial, record in features
        ]
        self._segments[-1].live += len(entries)
        for entry in entries if kept else ():
            if (item := kept.get(entry.number)) is not None and entry.features is not None:
                entry.state, entry.shown = cast(State, item.state), item.shown
                late_ms = self._late_ms if item.state == "closed" else 0
                entry.deadline_ms = entry.features.time_ms + self._open_ms + late_ms
        for entry in entries:
            if (waiting := self._entries.get(entry.key)) is not None:
                self._entries.remove(waiting)
                self._segments[-1].live -= 1
                entry.segment, entry.labels, entry.serials = waiting.segment, waiting.labels, waiting.serials
        self._entries.add_all(entries)

    def _adopt_label(self, label: Routed) -> None:
        """Add a label to the entry of its key."""
        entry = self._entries.get(label.key)
        if entry is None:
            self._begin(label, self._serial)
        else:
            entry.labels.append(label)
            entry.serials.append(self._serial)
            self._entries.grew(1, entry)

    def _segment(self, offset: int, journal: int, now_ms: int) -> None:
        """Begin a segment at this pack if the last one is long enough, or has another joiner's clock."""
        if not self._segments or not 0 <= now_ms - self._segments[-1].began_ms < self._segment_ms:
            self._segments.append(_Segment(offset, self._serial, journal, now_ms))

    # --- packs --------------------------------------------------------------------------------------------------------

    def feed(self, pack: Pack, offset: int, journal: int, out: Decisions) -> None:
        """Join the records of the pack at this offset of the log, close the windows that have ended, and add what
        follows to `out`. `journal`: an offset of the journal that the decisions do not come before."""
        self._out = out
        self._segment(offset, journal, pack.now_ms)
        entries = self._entries
        if entries.spilled:
            entries.fetch(record.key for record in pack.records)
        pairs, get, add, serial = self._pairs, entries.get, entries.add, self._serial
        features_ms, labels_ms = self._first_wait_ms, self._open_ms
        segment = self._first_segment + len(self._segments) - 1
        for record in pack.records:
            entry = get(record.key)
            if entry is None:
                self._segments[-1].live += 1
                if record.source == FEATURES:
                    add(Entry(record.key, "open", record.time_ms + features_ms, serial, segment, record, [], []))
                else:
                    add(
                        Entry(
                            record.key, "waiting", record.time_ms + labels_ms, serial, segment, None, [record], [serial]
                        )
                    )
            elif not (pairs and self._pair(entry, record, serial)):
                self._serial = serial
                if record.source == FEATURES:
                    self._add_features(entry, record)
                else:
                    self._add_label(record, serial)
            serial += 1
        self._serial = serial
        for progress in pack.progress:
            self.watermarks.advance(progress)
        if (now_ms := self.watermarks.labels_ms()) is not None:
            for entry in entries.due(False, now_ms):
                self._pass(entry)
        if (now_ms := self.watermarks.features_ms()) is not None:
            for entry in entries.due(True, now_ms):
                for label in entry.labels:
                    self._refuse(label, "orphan", "no features with its key within the window, or it had closed")
                self._remove(entry)
        entries.tidy()

    def _pair(self, entry: Entry, record: Routed, serial: int) -> bool:
        """Write the sample of the usual case, features and their first label in either order. Return False for others.

        Only for a single label of which the first counts, and which nothing corrects.
        """
        if record.source != FEATURES:
            if entry.features is None or entry.labels or entry.state != "open":
                return False
            features, label, number = entry.features, record, entry.number
        else:
            if entry.features is not None or len(entry.labels) != 1:
                return False
            features, label, number = record, entry.labels[0], entry.number
        delay_ms = label.time_ms - features.time_ms
        if not label.value or not -self._window_ms <= delay_ms <= self._window_ms:
            return False
        value = self._pair_format % (
            features.value, label.value, delay_ms / 1000, features.partition, features.offset, label.partition,
            label.offset,
        )  # fmt: skip
        self._out.samples.append(Sample(value, features, (label,), False))
        self._out.settled += (number, serial)
        self._entries.remove(entry)
        self._segments[entry.segment - self._first_segment].live -= 1
        return True

    def _add_features(self, waiting: Entry, record: Routed) -> None:
        """Add features to a key that is open."""
        if waiting.features is not None:
            partition, offset = waiting.features.partition, waiting.features.offset
            reason = f"the features of partition {partition}, offset {offset} have its key"
            self._settle(record, self._serial, "duplicate", reason)
            return
        entry: Entry | None = waiting
        labels, serials = waiting.labels, waiting.serials
        waiting.state, waiting.features, waiting.number = "open", record, self._serial
        waiting.labels, waiting.serials = [], []
        waiting.deadline_ms = record.time_ms + self._first_wait_ms
        self._entries.complete(waiting)
        self._entries.grew(-len(labels), waiting)
        for label, serial in zip(labels, serials, strict=True):
            if entry is None:
                self._add_label(label, serial, waiting.segment)
            else:
                entry = self._match(entry, label, serial)
        if entry is not None and entry.state == "open":
            self._entries.rearm(entry)

    def _begin(self, label: Routed, serial: int, segment: int | None = None) -> None:
        """Begin an entry with a label. `segment`: that of its first record; None: the present one."""
        if segment is None:
            segment = self._first_segment + len(self._segments) - 1
        self._segments[segment - self._first_segment].live += 1
        deadline_ms = label.time_ms + self._open_ms
        self._entries.add(Entry(label.key, "waiting", deadline_ms, serial, segment, None, [label], [serial]))

    def _add_label(self, label: Routed, serial: int, segment: int | None = None) -> None:
        entry = self._entries.get(label.key)
        if entry is None:
            self._begin(label, serial, segment)
        elif entry.features is not None:
            self._match(entry, label, serial)
        elif len(entry.labels) >= MAX_LABELS:
            self._settle(label, serial, "too_many", f"{MAX_LABELS} labels of its key wait for features")
        else:
            entry.labels.append(label)
            entry.serials.append(serial)
            self._entries.grew(1, entry)

    def _match(self, entry: Entry, label: Routed, serial: int) -> Entry | None:
        """Add a label to its features, and return the entry; None: the sample is complete, and the entry removed."""
        assert entry.features is not None
        delay_ms = label.time_ms - entry.features.time_ms
        if len(entry.labels) >= MAX_LABELS:
            self._settle(label, serial, "too_many", f"its key has {MAX_LABELS} labels")
            return entry
        if delay_ms < -self._window_ms:
            self._settle(label, serial, "early", f"it is {-delay_ms / 1000:g} s older than the features of its key")
            return entry
        if delay_ms > self._window_ms + self._late_ms:
            self._settle(label, serial, "late", f"it came {delay_ms / 1000:g} s after the features of its key")
            return entry
        was = b"" if entry.state == "open" else self._shown(entry)
        entry.labels.append(label)
        entry.serials.append(serial)
        self._entries.grew(1, entry)
        if entry.state == "open":
            if self._ends_early and self._is_complete(entry):
                return self._send(entry, label.time_ms)
        elif self._shown(entry) != was:
            self._write(entry, label.time_ms, is_correction=True)
            self._note(entry)
        else:
            entry.labels.pop()
            entry.serials.pop()
            self._entries.grew(-1, entry)
            self._settle(label, serial, "unused", "the sample of its key has this label already")
        return entry

    def _is_complete(self, entry: Entry) -> bool:
        if len(self._labels) == len(entry.labels) == 1:
            return entry.labels[0].value != b""
        return all(self._value(entry, at) is not None for at in range(len(self._labels)))

    def _send(self, entry: Entry, time_ms: int) -> Entry | None:
        """Write the first sample of an entry. Return the entry if later labels may correct the sample."""
        self._write(entry, time_ms, is_correction=False)
        if not self._keeps_sent:
            self._remove(entry)
            return None
        assert entry.features is not None
        self._keep(entry, "sent", entry.features.time_ms + self._open_ms)
        return entry

    def _pass(self, entry: Entry) -> None:
        """Change the state of an entry whose deadline has come."""
        assert entry.features is not None
        close_ms = entry.features.time_ms + self._open_ms
        if entry.state == "open" and entry.deadline_ms < close_ms:
            self._write(entry, entry.deadline_ms, is_correction=False)
            self._keep(entry, "early", close_ms)
            return
        if entry.state == "open":
            if self._drops and all(self._value(entry, at) is None for at in range(len(self._labels))):
                self._out.dropped.append(entry.features)
                for label in entry.labels:
                    self._refuse(label, "retracted", "it was retracted, and features without a label are dropped")
                self._remove(entry)
                return
            self._write(entry, entry.features.time_ms + self._window_ms, is_correction=False)
        if entry.state == "early" and self._confirms and not entry.labels:
            self._write(entry, entry.features.time_ms + self._window_ms, is_correction=True)
        if entry.state == "closed" or not self._late_ms:
            self._remove(entry)
        else:
            self._keep(entry, "closed", close_ms + self._late_ms)

    def _keep(self, entry: Entry, state: State, deadline_ms: int) -> None:
        entry.state, entry.deadline_ms = state, deadline_ms
        self._note(entry)
        self._entries.rearm(entry)

    def _note(self, entry: Entry) -> None:
        """Add to the decisions what a later matcher must know of an entry that stays."""
        assert entry.shown is not None
        self._out.kept.append(Kept(entry.number, entry.state, entry.shown))

    def _remove(self, entry: Entry) -> None:
        """Remove an entry, whose records are settled."""
        self._entries.remove(entry)
        self._segments[entry.segment - self._first_segment].live -= 1
        self._out.settled += entry.serials
        if entry.features is not None:
            self._out.settled.append(entry.number)

    def _settle(self, record: Routed, serial: int, code: str, reason: str) -> None:
        self._refuse(record, code, reason)
        self._out.settled.append(serial)

    def _refuse(self, record: Routed, code: str, reason: str) -> None:
        self._out.refused.append(Refused(record, code, reason))

    # --- samples ------------------------------------------------------------------------------------------------------

    def _value(self, entry: Entry, at: int) -> bytes | None:
        """Return a label of an entry as JSON; None: there is none, or it was retracted."""
        take, value, total = self._labels[at][1], None, 0.0
        several: list[bytes] = []
        for label in entry.labels:
            if label.source != at + 1:
                continue
            if not label.value:
                value, total = None, 0.0
                several.clear()
            elif take == "sum":
                total += float(label.value)
                value = msgspec.json.encode(total)
            elif take == "list":
                several.append(label.value)
                value = b"[" + b",".join(several) + b"]"
            elif take == "last" or value is None:
                value = label.value
        return value

    def _shown(self, entry: Entry) -> bytes:
        """Return the labels of an entry as they are written: a JSON value, or an object if there are several labels."""
        values = [self._value(entry, at) or absent for at, (_, _, absent) in enumerate(self._labels)]
        if len(values) == 1:
            return values[0]
        names = (name for name, _, _ in self._labels)
        return b"{" + b",".join(b'"%b":%b' % pair for pair in zip(names, values, strict=True)) + b"}"

    def _write(self, entry: Entry, time_ms: int, *, is_correction: bool) -> None:
        features, labels = entry.features, entry.labels
        assert features is not None
        if len(self._labels) == len(labels) == 1 and labels[0].value:
            label = labels[0]
            shown, newest_ms = label.value, label.time_ms
            named = b'"%b":%b' % (self._labels[0][0], shown)
            places = b'"%b:%d@%d"' % (self._labels[0][0], label.partition, label.offset)
        else:
            shown = self._shown(entry)
            named = shown[1:-1] if len(self._labels) > 1 else b'"%b":%b' % (self._labels[0][0], shown)
            newest_ms = max((label.time_ms for label in labels), default=time_ms)
            places = b",".join(
                b'"%b:%d@%d"' % (self._labels[label.source - 1][0], label.partition, label.offset) for label in labels
            )
        value = _SAMPLE % (
            features.value, named, (newest_ms - features.time_ms) / 1000, b"true" if is_correction else b"false",
            entry.shown or b"null", features.partition, features.offset, places,
        )  # fmt: skip
        entry.shown = shown
        new = labels[-1:] if is_correction else labels
        self._out.samples.append(Sample(value, features, tuple(new), is_correction))
        self._out.corrections += is_correction


def _absent(config: JoinConfig, label: LabelConfig) -> bytes:
    """Return the label of features without one, as JSON."""
    if label.take == "list":
        return b"[]"
    if not isinstance(config.on_close, str):
        return msgspec.json.encode(config.on_close.value)
    return b"false" if label.value is True else b"0"
