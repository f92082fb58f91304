"""`doll dead`: look at the records that could not be learned, and put them into the stream again."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from doll.cli.errors import DollGroup, usage
from doll.cli.options import JobOption, JsonOption, RunFolderOption, SetOption, TargetArgument, target
from doll.cli.output import emit

if TYPE_CHECKING:
    from doll.ledger.dead_letter_replay import Replay
    from doll.ledger.dead_letters import DeadRecord

dead_app = typer.Typer(
    cls=DollGroup, help="Look at dead letters, and replay them.", no_args_is_help=True, rich_markup_mode=None
)

ReasonOption = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="Only those whose reason contains this.", show_default=False)
]
AtOption = Annotated[
    list[str] | None,
    typer.Option("--at", metavar="PARTITION/OFFSET", help="Only this one; may be repeated.", show_default=False),
]
CodeOption = Annotated[
    Literal["empty", "too_long", "not_packed", "undecodable", "harmful"] | None,
    typer.Option("--code", help="Only those refused for this.", show_default=False),
]
_SHOWN_BYTES = 1024


@dead_app.command("list")
def list_(
    job: TargetArgument = None,
    job_option: JobOption = None,
    overrides: SetOption = None,
    reason: ReasonOption = "",
    code: CodeOption = None,
    run_folder: RunFolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the records with a dead letter: partition/offset, size, time, state, code, reason.

    States: dead (it is in no update), replayed (put into the stream again), superseded (learned after all, when its
    batch was computed again), in part (the other samples of its packed record are learned), pending (its batch is not
    in a checkpoint yet).

    Codes: empty, too_long (above data.max_record_bytes), not_packed (not in the packed form), undecodable (the task's
    decode raised, or returned what does not fit), harmful (its gradient would have spoiled the model).

    Example: doll dead list my.yaml --reason "expected x of shape"
    """
    found = _dead(job, job_option, overrides, run_folder, reason, code, None)
    emit(as_json, [_facts(dead) for dead in found], _table(found))


@dead_app.command("show")
def show(
    job: TargetArgument = None,
    job_option: JobOption = None,
    overrides: SetOption = None,
    at: AtOption = None,
    reason: ReasonOption = "",
    code: CodeOption = None,
    run_folder: RunFolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show dead records with what their letters kept of them, as text and as hex.

    Example: doll dead show my.yaml --at 0/1234
    """
    found = _dead(job, job_option, overrides, run_folder, reason, code, at)
    content = [{**_facts(dead), "payload_hex": dead.letter.payload.hex()} for dead in found]
    emit(as_json, content, "\n\n".join(_details(dead) for dead in found) or _NONE)


@dead_app.command("replay")
def replay_(
    job: TargetArgument = None,
    job_option: JobOption = None,
    overrides: SetOption = None,
    at: AtOption = None,
    reason: ReasonOption = "",
    code: CodeOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; send nothing.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Also those that were replayed before.")] = False,
    run_folder: RunFolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put dead records into the stream again, each as a new record at the end of its partition.

    Correct the task and restart its workers first, or the records will be refused again. Bytes come from the samples
    topic, else from the letter. Records that the model has learned since, or may still learn, are left out.

    Example: doll dead replay my.yaml --reason JSONDecodeError --dry-run
    """
    from doll.ledger.dead_letter_replay import replay
    from doll.ledger.dead_letters import dead_records
    from doll.service_checks import require_services
    from doll.storage.stores import open_store

    found_at = target(job, job_option, overrides, run_folder)
    services = found_at.services()
    require_services(found_at.config, services)
    store = open_store(found_at.config, found_at.run.path)
    chosen = dead_records(found_at.config, services, store, reason=reason, code=code, at=_places(at))
    done = replay(found_at.config, services, chosen, dry_run=dry_run, again=again)
    emit(as_json, [_replay_facts(item, dry_run) for item in done], _replay_text(done, dry_run))


_NONE = "no dead records"


def _dead(
    job: Any, job_option: Any, overrides: Any, run_folder: Any, reason: str, code: Any, at: list[str] | None
) -> list[DeadRecord]:
    from doll.ledger.dead_letters import dead_records
    from doll.service_checks import require_services
    from doll.storage.stores import open_store

    found = target(job, job_option, overrides, run_folder)
    services = found.services()
    require_services(found.config, services)
    store = open_store(found.config, found.run.path)
    return dead_records(found.config, services, store, reason=reason, code=code, at=_places(at))


def _places(texts: list[str] | None) -> list[tuple[int, int]]:
    places = []
    for text in texts or ():
        match = re.fullmatch(r"(\d{1,9})/(\d{1,18})", text)
        if match is None:
            raise usage(f"--at: expected PARTITION/OFFSET, as in 0/1234, got {text!r}")
        places.append((int(match[1]), int(match[2])))
    return places


def _facts(dead: DeadRecord) -> dict[str, Any]:
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


def _table(found: list[DeadRecord]) -> str:
    if not found:
        return _NONE
    lines = [f"{'at':>14}  {'bytes':>8}  {'time':<19}  {'state':<10}  {'code':<11}  reason"]
    for dead in found:
        letter = dead.letter
        part = "" if letter.whole else f"{letter.samples} of its samples: "
        again = f" (replayed as offset {', '.join(map(str, dead.replayed_as))})" if dead.replayed_as else ""
        at = f"{letter.partition}/{letter.offset}"
        lines.append(
            f"{at:>14}  {letter.payload_bytes:>8}  {_time(letter.time_s)}  {dead.state:<10}  "
            f"{letter.code:<11}  {part}{printable(letter.reason)}{again}"
        )
    return "\n".join(lines)


def _details(dead: DeadRecord) -> str:
    letter = dead.letter
    kept = letter.payload
    shown = kept[:_SHOWN_BYTES]
    lines = [_table([dead]).splitlines()[1].strip()]
    if len(shown) < letter.payload_bytes:
        lines.append(
            f"  the first {len(shown)} of {letter.payload_bytes} bytes"
            + (" (--json has all that the letter kept)" if len(shown) < len(kept) else "")
        )
    lines.append(f"  text: {printable(shown.decode('utf-8', 'backslashreplace'))}")
    for at in range(0, len(shown), 32):
        lines.append(f"  {at:08x}  {shown[at : at + 32].hex(' ', -4)}")
    return "\n".join(lines)


def printable(text: str) -> str:
    """`text` with everything that could steer a terminal written out: it comes from whoever fills the topic."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _time(time_s: float) -> str:
    import datetime

    try:
        return f"{datetime.datetime.fromtimestamp(time_s):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return f"{time_s:<19g}"


def _replay_facts(item: Replay, dry_run: bool) -> dict[str, Any]:
    partition, offset = item.dead.at
    return {
        "partition": partition, "offset": offset, "source": item.source, "new_offset": item.offset,
        "bytes": None if item.value is None else len(item.value), "skip_reason": item.skip_reason or None,
        "dry_run": dry_run,
    }  # fmt: skip


def _replay_text(done: list[Replay], dry_run: bool) -> str:
    if not done:
        return _NONE
    lines = []
    for item in done:
        partition, offset = item.dead.at
        if item.value is None:
            lines.append(f"{partition}/{offset}: not replayed: {item.skip_reason}")
            continue
        source = "the samples topic" if item.source == "topic" else "its letter"
        what = f"{len(item.value)} bytes from {source}"
        to = "would be replayed" if dry_run else f"replayed as {partition}/{item.offset}"
        lines.append(f"{partition}/{offset}: {to}: {what}")
    count = sum(item.value is not None for item in done)
    lines.append(f"{count} of {len(done)} {'would be replayed' if dry_run else 'replayed'}")
    return "\n".join(lines)
