"""`doll forget`: removes records from a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from doll.cli.options import JsonOption, RunFolderOption, RunOptions
from doll.cli.output import emit_result, say


def forget(
    job: RunOptions,
    keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the keys of the records, one per line.")
    ] = None,
    field: Annotated[
        str,
        typer.Option(metavar="NAME", help="The keys are values of this field of JSON records [default: Kafka's key]."),
    ] = "",
    offsets: Annotated[
        list[str] | None,
        typer.Option("--offset", metavar="PLACE", help="PARTITION/OFFSET or PARTITION/FIRST-LAST; may be repeated."),
    ] = None,
    offsets_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with one such place per line.")
    ] = None,
    purge: Annotated[
        bool, typer.Option("--purge", help="Delete the earlier versions, their aliases and the event logs of the run.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only look for the records, compute nothing.")] = False,
    run_folder: RunFolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove records from the newest version of a job, as if they had been dead letters.

    The updates since the newest kept version without these records are computed again, from the records in Kafka. First
    a part of them is computed with all records and compared with a kept version, to the bit. The result is the next
    version; its certificate is in forgotten/ of the run folder, and says what else still holds the records. Optimizer
    state and rows of tables are computed again, too. doll audit counts the records as removed, and no doll rollback
    brings them back.

    No process of the job may run: end it first. Then continue with doll resume RUN, or start the roles again.

    Example: doll forget runs/my-20260101-120000 --keys erased-users.txt --field user
    """
    from doll.run.forgetting.forget import forget
    from doll.run.forgetting.selection import Selection

    selection = Selection.parse(keys, field, offsets or (), offsets_file)
    emit_result(as_json, forget(job.target(run_folder), selection, purge=purge, dry_run=dry_run, say=say))
