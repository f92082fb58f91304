"""Which records `doll forget` removes: those of keys, or those at offsets."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from doll.config import JobConfig
from doll.consumers.intake.decoding import RawRecords
from doll.errors import ConfigError
from doll.kafka.range_reader import RangeReader
from doll.ledger import offset_ranges
from doll.ledger.balance import Ledger
from doll.ledger.offset_ranges import Span
from doll.process.files import unwritable

_PLACE: Final = re.compile(r"(\d{1,9})/(\d{1,18})(?:-(\d{1,18}))?")
_CHUNK_RECORDS: Final = 4096
MAX_KEYS: Final = 10_000_000


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The records to remove.

    Attributes:
        keys: the keys of their Kafka records, or the values of `field`.
        field: name of a field of JSON records; "": the key of the Kafka record.
        spans: by partition, ranges of offsets.
    """

    keys: frozenset[bytes] = frozenset()
    field: str = ""
    spans: Mapping[int, Sequence[Span]]

    @classmethod
    def parse(cls, keys_file: Path | None, field: str, offsets: Iterable[str], offsets_file: Path | None) -> Selection:
        """Return the selection of a command line.

        Args:
            keys_file: one key per line, as UTF-8.
            offsets: places in the form PARTITION/OFFSET or PARTITION/FIRST-LAST.
            offsets_file: one such place per line.

        Raises:
            ConfigError: nothing is selected, a file cannot be read, or a place is malformed.
        """
        keys = frozenset(_lines(keys_file)) if keys_file is not None else frozenset()
        if len(keys) > MAX_KEYS:
            raise ConfigError(f"{keys_file}: expected at most {MAX_KEYS:,} keys, got {len(keys):,}")
        if field and keys_file is None:
            raise ConfigError("--field: expected --keys too, the file with the values of this field")
        places = [*offsets]
        if offsets_file is not None:
            places += [line.decode("utf-8", "replace") for line in _lines(offsets_file)]
        spans: dict[int, list[Span]] = {}
        for place in places:
            match = _PLACE.fullmatch(place.strip())
            if match is None:
                raise ConfigError(
                    f"expected PARTITION/OFFSET or PARTITION/FIRST-LAST, as in 0/1234, got {place[:60]!r}"
                )
            lo = int(match[2])
            hi = int(match[3] or lo) + 1
            if hi <= lo:
                raise ConfigError(f"expected a first offset that is not above the last one, got {place!r}")
            spans.setdefault(int(match[1]), []).append((lo, hi))
        if not keys and not spans:
            raise ConfigError(
                "expected records to remove: --keys FILE, --offset PARTITION/OFFSET, or --offsets-file FILE"
            )
        return cls(keys=keys, field=field, spans={at: offset_ranges.union(each) for at, each in spans.items()})


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            for line in file:
                if text := line.rstrip(b"\r\n"):
                    yield text
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror or unwritable(exc)}") from exc


@dataclass(frozen=True)
class Found:
    """The selected records, by partition as disjoint, ascending ranges of offsets.

    Attributes:
        learned: those that the model has learned.
        later: those after the end of the model, which it will learn unless the stream loses them.
        others: number of those that it has not learned: dead, held out, skipped, or removed before.
    """

    learned: dict[int, list[Span]]
    later: dict[int, list[Span]]
    others: int


def find(config: JobConfig, reader: RangeReader, ledger: Ledger, selection: Selection) -> Found:
    """Look for the selected records in the samples topic, and for their states in the ledger.

    Raises:
        ConfigError: a partition does not exist.
        ServiceUnavailableError: Kafka does not answer.
    """
    topic, origins = config.topic("samples"), ledger.origins
    if wrong := sorted(at for at in selection.spans if at >= len(origins)):
        raise ConfigError(f"expected a partition from 0 to {len(origins) - 1}, got {wrong[0]}")
    bounds = reader.bounds_of_partitions(topic, range(len(origins)))
    learned, later, others = dict[int, list[Span]](), dict[int, list[Span]](), 0
    for partition, (low, end) in bounds.items():
        wanted = list(selection.spans.get(partition, ()))
        if selection.keys:
            wanted += _of_keys(reader, topic, partition, (max(low, origins[partition]), end), selection)
        inside = offset_ranges.intersect(
            offset_ranges.union(wanted), [(origins[partition], max(end, origins[partition]))]
        )
        states = [(offset, ledger.offset_state(partition, offset)) for lo, hi in inside for offset in range(lo, hi)]
        if here := [offset for offset, state in states if state in ("applied", "partly")]:
            learned[partition] = offset_ranges.points(here)
        if after := [offset for offset, state in states if state == "pending"]:
            later[partition] = offset_ranges.points(after)
        others += len(states) - len(here) - len(after)
    return Found(learned, later, others)


def _of_keys(
    reader: RangeReader, topic: str, partition: int, bounds: tuple[int, int], selection: Selection
) -> Iterator[Span]:
    field: Any = msgspec.defstruct("Fields", [("key", str | int)], rename={"key": selection.field})
    decode = msgspec.json.Decoder(field).decode
    for message in reader.client_messages(topic, partition, *bounds):
        key: bytes | None = None
        with contextlib.suppress(Exception):  # bytes from outside, which may be no JSON
            key = str(decode(message.value() or b"").key).encode() if selection.field else message.key()
        if key in selection.keys:
            yield int(message.offset()), int(message.offset()) + 1


class SampleReader:
    """Reads batches of the samples topic. Each is read once, and in each partition almost in the order of offsets."""

    def __init__(self, config: JobConfig, reader: RangeReader) -> None:
        self._topic, self._reader = config.topic("samples"), reader
        self._read_until: dict[int, int] = {}
        self._waiting: dict[int, dict[int, Any]] = {}  # messages that were read ahead, by partition and offset

    def read(self, partition: int, lo: int, hi: int) -> RawRecords:
        """Return the records at offsets [lo, hi) that the log holds, with their envelopes. Raises
        ServiceUnavailableError if Kafka does not answer."""
        waiting = self._waiting.setdefault(partition, {})
        begin = self._read_until.get(partition, lo)
        if lo < begin and not any(offset in waiting for offset in range(lo, min(hi, begin))):
            begin = lo  # it was not read ahead
        if hi > begin:
            until = max(hi, begin + _CHUNK_RECORDS)
            for message in self._reader.client_messages(self._topic, partition, begin, until):
                waiting[message.offset()] = message
            self._read_until[partition] = until
        messages = [waiting.pop(offset) for offset in range(lo, hi) if offset in waiting]
        return RawRecords(
            [message.offset() for message in messages], [message.value() for message in messages], partition, messages
        )
