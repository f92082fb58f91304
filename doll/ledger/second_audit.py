"""A second audit of a job, by code that shares nothing with `doll.ledger.audit` except the reader of Kafka's records.

It reads the topics `updates`, `dead` and `samples`, and no checkpoint. Records are plain maps, and each offset has a
byte of its own: how many valid updates name it. The first audit computes with ranges, the checkpoint's counts and the
typed records. An error in one of them does not hide in the other; `compared` says where they differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from doll.config import JobConfig
from doll.errors import ConfigError
from doll.kafka.range_reader import RangeReader
from doll.ledger.balance import LedgerReport
from doll.services import Services

_DEAD, _HELD_OUT, _ABSENT, _SKIPPED, _PRESENT, _LETTER = (1 << bit for bit in range(6))
_NAMED: Final = 5
_LISTS: Final = {"dead": _DEAD, "gaps": _ABSENT, "lost": _ABSENT, "held_out": _HELD_OUT}  # in the order of `packed`


@dataclass(frozen=True, kw_only=True)
class SecondReport:
    """The result, in offsets. `problems`: one sentence each; none if each record is where it must be."""

    version: int
    updates: int
    applied: int
    dead: int
    held_out: int
    absent: int
    skipped: int
    missing: int
    twice: int
    pending: int
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems

    def text(self) -> str:
        numbers = ", ".join(
            f"{getattr(self, name)} {words}"
            for name, words in (
                ("applied", "applied exactly once"), ("missing", "missing"), ("twice", "twice"), ("dead", "dead"),
                ("held_out", "held out"), ("skipped", "skipped"), ("absent", "without a record"),
                ("pending", "not yet applied"),
            )
            if getattr(self, name) or name in ("applied", "missing", "twice")
        )  # fmt: skip
        lines = [f"independent audit: {self.updates} updates up to version {self.version}, {numbers}", *self.problems]
        return "\n  ".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


class _Start(NamedTuple):
    """The start of a server from version `resumed`. `kept`: the last version of lower terms that it has kept."""

    at: int
    term: int
    generation: int
    resumed: int
    kept: int
    origins: Sequence[int]


def audit_again(config: JobConfig, services: Services, first: LedgerReport) -> SecondReport:
    """Audit the job up to the durable version of the first audit, and compare the results.

    Raises:
        ConfigError: a command has made the newest checkpoint, and no server has begun with it yet.
        ServiceUnavailableError: Kafka does not answer.
    """
    samples = config.topic("samples")
    with RangeReader(config, services) as reader:
        updates, dead = (
            [value for _, value in reader.read(topic, 0, *reader.bounds(topic, 0))]
            for topic in (config.topic("updates"), config.topic("dead"))
        )
        if first.term > max((item.get("term", 0) for item in _maps(updates, [])), default=0):
            raise ConfigError(
                f"job {config.job}: doll rollback, regrid or forget has made version {first.version}; the topics do "
                "not know it until a server begins with it: start the job, then audit it with --independent"
            )
        letters = [(item["partition"], item["offset"]) for item in _maps(dead, []) if item.get("whole", True)]
        bounds = reader.bounds_of_partitions(samples, range(reader.num_partitions(samples)))

        def present(partition: int, lo: int, hi: int) -> Iterator[int]:
            return (message.offset() for message in reader.client_messages(samples, partition, lo, hi))

        report = balanced(updates, letters, list(bounds.values()), present, until=first.version)
    return compared(report, first)


def compared(second: SecondReport, first: LedgerReport) -> SecondReport:
    """Return the report of the second audit, with a problem for each number that differs from that of the first."""
    numbers = {
        "applied": first.applied + first.forgotten, "dead": first.dead, "held_out": first.held_out,
        "skipped": first.skipped, "absent": first.gaps + first.lost,
        "missing": sum(item.hi - item.lo for item in first.missing),
        "twice": sum(item.hi - item.lo for item in first.twice),
    }  # fmt: skip
    differences = [
        f"{name}: {getattr(second, name)} by this audit, {number} by the first one"
        for name, number in numbers.items()
        if getattr(second, name) != number
    ]
    return replace(second, problems=(*second.problems, *differences))


def balanced(
    updates: Sequence[bytes | None], letters: Iterable[tuple[int, int]], bounds: Sequence[tuple[int, int]],
    present: Any, *, until: int,
) -> SecondReport:  # fmt: skip
    """Count each offset. Pure.

    Args:
        updates: the values in topic `updates`, in order.
        letters: (partition, offset) of each record that was refused as a whole.
        bounds: for each partition, the first offset that the log holds, and the one after its last record.
        present: function (partition, first offset, offset after the last one) that yields the offsets of records.
        until: later versions do not count.
    """
    problems: list[str] = []
    starts, valid = _valid(updates, until, problems)
    origins = [
        next((start.origins[number] for start in starts if number < len(start.origins)), low)
        for number, (low, _) in enumerate(bounds)
    ]
    lengths = [max(0, end - origin) for (_, end), origin in zip(bounds, origins, strict=True)]
    counts = [np.zeros(length, np.uint8) for length in lengths]
    states = [np.zeros(length, np.uint8) for length in lengths]
    ends = list(origins)  # after the last offset that an update names
    waiting = [item for item in starts[1:] if not any(_voids(later, item.term, item.resumed) for later in starts)]
    for at, update in valid:
        while waiting and waiting[0].at < at:
            _skip(waiting.pop(0), ends, origins, states)
        for member in update["members"]:
            number = member["partition"]
            _count(member, counts[number], states[number], origins[number], problems)
            ends[number] = max(ends[number], member["hi"])
    for start in waiting:
        _skip(start, ends, origins, states)
    for partition, offset in letters:
        if partition < len(states) and 0 <= offset - origins[partition] < lengths[partition]:
            states[partition][offset - origins[partition]] |= _LETTER
    sums = dict.fromkeys(("applied", "dead", "held_out", "absent", "skipped", "missing", "twice", "pending"), 0)
    for number, (low, end) in enumerate(bounds):
        _sum_up(
            number, low, end, ends[number], origins[number], counts[number], states[number], present, sums, problems
        )
    problems += _broken_links((updates[at] or b"", update) for at, update in valid)
    versions = [update["version"] for _, update in valid]
    if any(later <= earlier for earlier, later in pairwise(versions)):
        problems.append("the valid updates are not in the order of their versions")
    return SecondReport(version=until, updates=len(valid), problems=tuple(problems), **sums)


def _voids(start: _Start, term: int, version: int) -> bool:
    return start.term > term and start.kept < version


def _maps(values: Iterable[bytes | None], problems: list[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the records as maps; an empty map if a value is no record."""
    for at, value in enumerate(values):
        try:
            if value is None or value[0] != 0xD0:
                raise ValueError("its first byte is not d0")
            yield msgspec.msgpack.decode(value[2:], type=dict[str, Any])
        except (ValueError, IndexError, msgspec.MsgspecError) as exc:
            problems.append(f"record {at} of the topic is not a record: {exc}")
            yield {}


def _valid(
    values: Sequence[bytes | None], until: int, problems: list[str]
) -> tuple[list[_Start], list[tuple[int, Mapping[str, Any]]]]:
    """Return the starts of servers of the newest generation, and the updates that no later server made void, each with
    its place in the topic.

    An update of a term is void if a server of a higher term had begun before it in the topic, or kept a lower version.
    """
    records = list(enumerate(_maps(values, problems)))
    starts = [
        _Start(
            at, item["term"], item.get("generation", 0), item["resumed_version"],
            item["resumed_version"] if item.get("rolled_back_to", -1) < 0 else item["rolled_back_to"], item["origins"],
        )
        for at, item in records if item.get("type") == "termstarted"
    ]  # fmt: skip
    generation = max((start.generation for start in starts), default=0)
    starts = [start for start in starts if start.term >= generation]
    fenced = [start for start in starts if any(each.term > start.term and each.at < start.at for each in starts)]
    starts = [start for start in starts if start not in fenced]
    updates = [
        (at, item) for at, item in records
        if item.get("type") == "update" and item["term"] >= generation and item["version"] <= until
        and not any(
            _voids(start, item["term"], item["version"]) or (start.term > item["term"] and start.at < at)
            for start in starts
        )
    ]  # fmt: skip
    return starts, updates


def _broken_links(updates: Iterable[tuple[bytes, Mapping[str, Any]]]) -> Iterator[str]:
    """Yield the first update whose hash does not fit its content and the update before it (`doll.records.chain`).
    `updates`: each record and its fields. The hash is its last field, and empty while the hash is computed."""
    before = b""
    for record, update in updates:
        given = update.get("chain", b"")
        if not given and not before:  # of an earlier release
            continue
        content, _, end = record.rpartition(b"\xa5chain\xc4\x10")
        if given != end or given != blake2b(content + b"\xa5chain\xc4\0", digest_size=16, key=before).digest():
            yield f"update {update['version']}: its hash does not fit its content and the update before it"
            return
        before = given


def _skip(start: _Start, ends: list[int], origins: list[int], states: list[npt.NDArray[np.uint8]]) -> None:
    """Mark what a server has skipped: it begins after the end of what was learned."""
    for number, origin in enumerate(start.origins):
        if origin > ends[number]:
            states[number][ends[number] - origins[number] : origin - origins[number]] |= _SKIPPED
            ends[number] = origin


def _count(
    member: Mapping[str, Any], count: npt.NDArray[np.uint8], state: npt.NDArray[np.uint8], origin: int,
    problems: list[str],
) -> None:  # fmt: skip
    lo, hi = member["lo"] - origin, member["hi"] - origin
    if not 0 <= lo < hi <= len(count):
        problems.append(f"an update names offsets {member['lo']} to {member['hi'] - 1}, outside of the log")
        return
    count[lo:hi] += count[lo:hi] < 255
    for name, bit in _LISTS.items():
        for item in member.get(name, ()):
            first, after = (item, item + 1) if isinstance(item, int) else item
            state[first - origin : after - origin] |= bit
    for bits, bit in zip(member.get("packed", ()), _LISTS.values(), strict=False):
        if bits:
            base = int.from_bytes(bits[:8], "little") - origin
            is_set = np.unpackbits(np.frombuffer(bits, np.uint8, offset=8), bitorder="little").astype(bool)
            at = base + np.flatnonzero(is_set)
            state[at] |= bit


def _sum_up(
    number: int, low: int, end: int, until: int, origin: int, count: npt.NDArray[np.uint8],
    state: npt.NDArray[np.uint8], present: Any, sums: dict[str, int], problems: list[str],
) -> None:  # fmt: skip
    """Add the counts of one partition, and compare them with the records that its log holds."""
    first = max(low, origin)
    for offset in present(number, first, end):
        state[offset - origin] |= _PRESENT
    is_there = (state & _PRESENT) > 0
    is_there[: first - origin] = (state[: first - origin] & _ABSENT) == 0  # deleted since: the updates count
    here, named = slice(0, max(0, until - origin)), count > 0
    skipped = (state & _SKIPPED) > 0
    dead, held_out, absent = (((state & bit) > 0) & named & ~skipped for bit in (_DEAD, _HELD_OUT, _ABSENT))
    groups = {
        "skipped": skipped[here],
        "twice": (count > 1)[here],
        "missing": (is_there & ~named & ~skipped)[here],
        "absent": absent[here],
        "dead": (dead & ~absent)[here],
        "held_out": (held_out & ~absent & ~dead)[here],
        "applied": ((count == 1) & ~dead & ~held_out & ~absent & ~skipped)[here],
        "pending": is_there[here.stop :],
    }
    for name, mask in groups.items():
        sums[name] += int(mask.sum())
    filled = ((state & _PRESENT) > 0) & absent
    for mask, what in (
        (groups["missing"], "are in no update"),
        (groups["twice"], "are in more than one update"),
        (filled, "have no record by an update, but the log holds one"),
        ((groups["applied"] & ~is_there[here]), "were applied, but the log holds no record"),
        (groups["dead"] & ((state & _LETTER) == 0)[here], "are dead and have no dead letter"),
    ):
        if mask.any():
            places = np.flatnonzero(mask)[:_NAMED] + origin
            problems.append(f"partition {number}: {int(mask.sum())} offsets {what}, from {', '.join(map(str, places))}")
