"""`doll dead`: lists dead letters, and sends their records to the stream again."""

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
    from doll.ledger.dead_letters import DeadRecord, Replay
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
        Literal["empty", "too_long", "unreadable", "not_packed", "undecodable", "harmful"] | None,
        typer.Option(help="Select only records that were rejected with this code."),
    ] = None

    def filters(self) -> dict[str, Any]:
        """Return the filter arguments of `dead_records`.

        Raises:
            BadParameter: an offset does not have the form PARTITION/OFFSET.
        """
        places = []
        for text in self.offsets or ():
            match = re.fullmatch(r"(\d{1,9})/(\d{1,18})", text)
            if match is None:
                raise typer.BadParameter(f"--offset: expected PARTITION/OFFSET, as in 0/1234, got {text!r}")
            places.append((int(match[1]), int(match[2])))
        return {"reason": self.reason, "code": self.code, "at": places}


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

    Example: doll dead list my.yaml --reason "expected x of shape"
    """
    dead_records = _read_dead_records(job.target(run_folder), letters)
    emit(as_json, [_fields(dead) for dead in dead_records], _table(dead_records))


@dead_app.command("show")
def show(
    job: RunOptions, letters: LetterOptions, run_folder: RunFolderOption = None, as_json: JsonOption = False
) -> None:
    """Show the stored contents of dead records as text and in hexadecimal.

    The dead letter of a long record stores only its first bytes.

    Example: doll dead show my.yaml --offset 0/1234
    """
    dead_records = _read_dead_records(job.target(run_folder), letters)
    content = [{**_fields(dead), "payload_hex": dead.letter.payload.hex()} for dead in dead_records]
    emit(as_json, content, "\n\n".join(_details(dead) for dead in dead_records) or _NONE)


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
    learned in the meantime, or may still learn, are skipped.

    Example: doll dead replay my.yaml --reason JSONDecodeError --dry-run
    """
    from doll.ledger.dead_letters import replay
    from doll.run.status import reachable_kafka

    job_target = job.target(run_folder)
    job_target, services = reachable_kafka(job_target)
    selected = _dead_records(job_target, services, letters)
    replays = replay(job_target.config, services, selected, dry_run=dry_run, again=include_replayed)
    emit(as_json, [_replay_fields(item, dry_run) for item in replays], _replay_text(replays, dry_run))


def _read_dead_records(job_target: Target, letters: LetterOptions) -> list[DeadRecord]:
    """Read the dead records from the topic, or from the run folder if the run has ended and its broker is gone."""
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
        return saved_dead_records(job_target.run.dead, **letters.filters())
    return _dead_records(job_target, services, letters)


def _dead_records(job_target: Target, services: Services, letters: LetterOptions) -> list[DeadRecord]:
    from doll.ledger.dead_letters import dead_records
    from doll.storage.stores import open_store

    store = open_store(job_target.config, job_target.run.path)
    return dead_records(job_target.config, services, store, **letters.filters())


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


def _table(dead_records: list[DeadRecord]) -> str:
    if not dead_records:
        return _NONE
    rows = [("at", "bytes", "time", "state", "code", "reason"), *map(_cells, dead_records)]
    return "\n".join(aligned(rows, ">><"))


def _cells(dead: DeadRecord) -> tuple[str, ...]:
    letter = dead.letter
    part = "" if letter.whole else f"{letter.samples} of its samples: "
    again = f" (replayed as offset {', '.join(map(str, dead.replayed_as))})" if dead.replayed_as else ""
    return (
        f"{letter.partition}/{letter.offset}", str(letter.payload_bytes), _time(letter.time_s), dead.state, letter.code,
        f"{part}{printable(letter.reason)}{again}",
    )  # fmt: skip


def _details(dead: DeadRecord) -> str:
    letter = dead.letter
    kept = letter.payload
    shown = kept[:_SHOWN_BYTES]
    lines = ["  ".join(_cells(dead))]
    if len(shown) < letter.payload_bytes:
        lines.append(
            f"  the first {len(shown)} of {letter.payload_bytes} bytes"
            + (" (--json has all kept bytes)" if len(shown) < len(kept) else "")
        )
    lines.append(f"  text: {printable(shown.decode('utf-8', 'backslashreplace'))}")
    for at in range(0, len(shown), 32):
        lines.append(f"  {at:08x}  {shown[at : at + 32].hex(' ', -4)}")
    return "\n".join(lines)


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


def _replay_text(replays: list[Replay], dry_run: bool) -> str:
    if not replays:
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
    count = sum(item.value is not None for item in replays)
    lines.append(f"{count} of {len(replays)} {'would be replayed' if dry_run else 'replayed'}")
    return "\n".join(lines)
