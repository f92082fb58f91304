"""`doll dead`: lists dead letters and what the join refused, and sends dead records to the stream again."""

from __future__ import annotations

import datetime
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from doll.amounts import aligned
from doll.cli.groups import Commands
from doll.cli.options import JsonOption, RunFolderOption, RunOptions
from doll.cli.output import emit
from doll.records.bounded import printable

if TYPE_CHECKING:
    from doll.join.refusals import JoinRefusal
    from doll.ledger.dead_letters import DeadRecord, Replay, Selection
    from doll.run.target import Target
    from doll.services import Services

dead_app = Commands(help="List the records that workers rejected (dead letters), and send them to the stream again.")

_SHOWN_BYTES = 1024
_NONE = "no dead records"


@dataclass(frozen=True, kw_only=True)
class LetterOptions:
    """The options that select dead letters of a job."""

    offsets: Annotated[
        list[str] | None,
        typer.Option("--offset", metavar="PARTITION/OFFSET", help="Select only this record; may be repeated."),
    ] = None
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Select only records whose reason contains TEXT.")] = ""
    code: Annotated[
        Literal[
            "empty",
            "too_long",
            "unreadable",
            "not_packed",
            "undecodable",
            "harmful",
            "not_json",
            "no_key",
            "no_time",
            "no_label",
            "field_taken",
            "ahead",
            "orphan",
            "late",
            "early",
            "duplicate",
            "unused",
            "retracted",
            "too_many",
        ]
        | None,
        typer.Option(help="Select only records that were rejected with this code."),
    ] = None

    def selection(self) -> Selection:
        """Return the selection of the options.

        Raises:
            BadParameter: an offset does not have the form PARTITION/OFFSET.
        """
        from doll.ledger.dead_letters import Selection

        places = []
        for text in self.offsets or ():
            match = re.fullmatch(r"(\d{1,9})/(\d{1,18})", text)
            if match is None:
                raise typer.BadParameter(f"--offset: expected PARTITION/OFFSET, as in 0/1234, got {text!r}")
            places.append((int(match[1]), int(match[2])))
        return Selection(self.reason, self.code, places)


@dead_app.command("list")
def list_(
    job: RunOptions, letters: LetterOptions, run_folder: RunFolderOption = None, as_json: JsonOption = False
) -> None:
    """List the records that have a dead letter: partition/offset, size, time, state, code, reason.

    States: dead (in no update), replayed (sent to the stream again), superseded (learned when its batch was computed
    again), in part (the other samples of its packed record are learned), pending (its batch is not in a checkpoint
    yet).

    Codes: empty, too_long (longer than data.max_record_bytes), unreadable (the Kafka client cannot read the record
    batch), not_packed (not in the packed format), undecodable (decode of the task failed), harmful (its gradient would
    damage the model).

    Records that the join refused (data.join) have their topic before the partition, and the state refused. Their codes
    are in docs/records.md.

    Example: doll dead list my.yaml --reason "expected x of shape"
    """
    dead_records, refusals = _read_dead_records(job.target(run_folder), letters)
    content = [*map(_fields, dead_records), *map(_fields_of_refusal, refusals)]
    emit(as_json, content, _table(dead_records, refusals))


@dead_app.command("show")
def show(
    job: RunOptions, letters: LetterOptions, run_folder: RunFolderOption = None, as_json: JsonOption = False
) -> None:
    """Show the stored contents of dead records as text and in hexadecimal.

    The dead letter of a long record stores only its first bytes.

    Example: doll dead show my.yaml --offset 0/1234
    """
    dead_records, refusals = _read_dead_records(job.target(run_folder), letters)
    content = [{**_fields(dead), "payload_hex": dead.letter.payload.hex()} for dead in dead_records]
    content += [{**_fields_of_refusal(item), "payload_hex": item.payload.hex()} for item in refusals]
    texts = [*map(_details, dead_records), *map(_details_of_refusal, refusals)]
    emit(as_json, content, "\n\n".join(texts) or _NONE)


@dead_app.command("replay")
def replay_(
    job: RunOptions,
    letters: LetterOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the records, send nothing.")] = False,
    include_replayed: Annotated[
        bool, typer.Option("--include-replayed", help="Include records that were already replayed.")
    ] = False,
    run_folder: RunFolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send dead records to the stream again, each as a new record at the end of its partition.

    First correct the task and restart its workers; otherwise the records are rejected again. The bytes are read from
    the samples topic, or from the dead letter if the topic does not have them any more. Records that the model has
    learned in the meantime, or may still learn, are skipped. So are records that the join refused: they are in topics
    of others.

    Example: doll dead replay my.yaml --reason JSONDecodeError --dry-run
    """
    from doll.ledger.dead_letters import replay
    from doll.run.status import reachable_kafka

    job_target = job.target(run_folder)
    job_target, services = reachable_kafka(job_target)
    selected = _dead_records(job_target, services, letters)
    refusals = _join_refusals(job_target, services, letters)
    replays = replay(job_target.config, services, selected, dry_run=dry_run, again=include_replayed)
    content = [_replay_fields(item, dry_run) for item in replays]
    content += [{**_place(item), "skip_reason": _not_ours(item), "dry_run": dry_run} for item in refusals]
    emit(as_json, content, _replay_text(replays, refusals, dry_run))


def _read_dead_records(
    job_target: Target, letters: LetterOptions
) -> tuple[list[DeadRecord], list[JoinRefusal]]:  # fmt: skip
    """Read the dead records from the topic, or from the run folder if the run has ended and its broker is gone; and
    what the join refused, from its journal."""
    from doll.errors import ServiceUnavailableError
    from doll.ledger.dead_letters import MAX_SAVED, saved_dead_records
    from doll.run.status import reachable_kafka

    try:
        job_target, services = reachable_kafka(job_target)
    except ServiceUnavailableError:
        if not (job_target.is_run_folder and job_target.run.dead.exists()):
            raise
        sys.stderr.write(
            f"doll: the broker of this run is gone: these are the first {MAX_SAVED:,} of {job_target.run.dead}\n"
        )
        return saved_dead_records(job_target.run.dead, letters.selection()), []
    return _dead_records(job_target, services, letters), _join_refusals(job_target, services, letters)


def _dead_records(job_target: Target, services: Services, letters: LetterOptions) -> list[DeadRecord]:
    from doll.ledger.dead_letters import dead_records
    from doll.storage.stores import open_store

    store = open_store(job_target.config, job_target.run.path)
    return dead_records(job_target.config, services, store, letters.selection())


def _join_refusals(job_target: Target, services: Services, letters: LetterOptions) -> list[JoinRefusal]:
    if (join := job_target.config.data.join) is None:
        return []
    from doll.join.refusals import join_refusals

    return join_refusals(job_target.config, services, join, letters.selection())


def _place(item: JoinRefusal) -> dict[str, Any]:
    return {"topic": item.topic, "partition": item.record.partition, "offset": item.record.offset}


def _not_ours(item: JoinRefusal) -> str:
    return f"the join refused it, and topic {item.topic} belongs to somebody else: send it there again"


def _fields_of_refusal(item: JoinRefusal) -> dict[str, Any]:
    return {
        **_place(item),
        "state": "refused",
        "code": item.record.code,
        "reason": item.record.reason,
        "key": _text(item.record.key),
        "kept_bytes": len(item.payload),
        "time_s": item.time_s,
        "event_time_s": item.event_time_s,
    }


def _fields(dead: DeadRecord) -> dict[str, Any]:
    letter = dead.letter
    return {
        "partition": letter.partition,
        "offset": letter.offset,
        "state": dead.state,
        "code": letter.code,
        "reason": letter.reason,
        "bytes": letter.payload_bytes,
        "kept_bytes": len(letter.payload),
        "samples": letter.samples,
        "whole": letter.whole,
        "time_s": letter.time_s,
        "replayed_as": list(dead.replayed_as),
    }


def _table(dead_records: list[DeadRecord], refusals: list[JoinRefusal]) -> str:
    if not dead_records and not refusals:
        return _NONE
    rows = [("at", "bytes", "time", "state", "code", "reason"), *map(_cells, dead_records)]
    return "\n".join(aligned([*rows, *map(_cells_of_refusal, refusals)], ">><"))


def _cells_of_refusal(item: JoinRefusal) -> tuple[str, ...]:
    partition, offset = item.at
    return (
        f"{item.topic} {partition}/{offset}", f"{len(item.payload)}{'+' * item.is_cut}", _time(item.time_s), "refused",
        item.record.code, printable(item.record.reason),
    )  # fmt: skip


def _cells(dead: DeadRecord) -> tuple[str, ...]:
    letter = dead.letter
    part = "" if letter.whole else f"{letter.samples} of its samples: "
    again = f" (replayed as offset {', '.join(map(str, dead.replayed_as))})" if dead.replayed_as else ""
    return (
        f"{letter.partition}/{letter.offset}", str(letter.payload_bytes), _time(letter.time_s), dead.state, letter.code,
        f"{part}{printable(letter.reason)}{again}",
    )  # fmt: skip


def _details(dead: DeadRecord) -> str:
    return "\n".join(["  ".join(_cells(dead)), *_content(dead.letter.payload, str(dead.letter.payload_bytes))])


def _details_of_refusal(item: JoinRefusal) -> str:
    event_time_s = item.event_time_s
    lines = ["  ".join(_cells_of_refusal(item)), f"  key: {_text(item.record.key)}"]
    if event_time_s is not None:
        lines.append(f"  event time: {_time(event_time_s)}")
    num_bytes = f"more than {len(item.payload)}" if item.is_cut else str(len(item.payload))
    return "\n".join([*lines, *_content(item.payload, num_bytes)])


def _content(kept: bytes, num_bytes: str) -> list[str]:
    """Return the first bytes as text and in hexadecimal. `num_bytes`: how many the record has."""
    shown = kept[:_SHOWN_BYTES]
    lines = []
    if str(len(shown)) != num_bytes:
        more = " (--json has all kept bytes)" if len(shown) < len(kept) else ""
        lines.append(f"  the first {len(shown)} of {num_bytes} bytes{more}")
    lines.append(f"  text: {_text(shown)}")
    return lines + [f"  {at:08x}  {shown[at : at + 32].hex(' ', -4)}" for at in range(0, len(shown), 32)]


def _text(content: bytes) -> str:
    return printable(content.decode("utf-8", "backslashreplace"))


def _time(time_s: float) -> str:
    try:
        return f"{datetime.datetime.fromtimestamp(time_s):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return f"{time_s:g}"


def _replay_fields(item: Replay, dry_run: bool) -> dict[str, Any]:
    partition, offset = item.dead.at
    return {
        "partition": partition,
        "offset": offset,
        "source": item.source,
        "new_offset": item.offset,
        "bytes": None if item.value is None else len(item.value),
        "skip_reason": item.skip_reason or None,
        "dry_run": dry_run,
    }


def _replay_text(replays: list[Replay], refusals: list[JoinRefusal], dry_run: bool) -> str:
    if not replays and not refusals:
        return _NONE
    lines = []
    for item in replays:
        partition, offset = item.dead.at
        if item.value is None:
            lines.append(f"{partition}/{offset}: not replayed: {item.skip_reason}")
            continue
        source = "the samples topic" if item.source == "topic" else "its dead letter"
        what = f"{len(item.value)} bytes from {source}"
        to = "would be replayed" if dry_run else f"replayed as {partition}/{item.offset}"
        lines.append(f"{partition}/{offset}: {to}: {what}")
    lines += [f"{item.topic} {item.at[0]}/{item.at[1]}: not replayed: {_not_ours(item)}" for item in refusals]
    count = sum(item.value is not None for item in replays)
    lines.append(f"{count} of {len(replays) + len(refusals)} {'would be replayed' if dry_run else 'replayed'}")
    return "\n".join(lines)
