"""`doll versions`: shows and marks the kept versions of a job, with their lineage, errors, aliases and pins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from doll.cli.groups import Commands
from doll.cli.options import JobOptions, JsonOption, RunFolderOption, SetOption, duration
from doll.cli.output import emit, emit_result, say

if TYPE_CHECKING:
    from doll.run.target import Target
    from doll.storage.version_marks import VersionMarks

versions_app = Commands(help="List the kept versions of a job, compare them, and give them names (aliases).")

ReasonOption = Annotated[str, typer.Option(help="Why; doll versions show names it.")]
VersionArgument = Annotated[str, typer.Argument(metavar="VERSION", help="latest, a number or an alias.")]


@dataclass(frozen=True, kw_only=True)
class KeptOptions:
    """The job of a `doll versions` command."""

    job: Annotated[Path, typer.Argument(metavar="JOB.yaml|RUN", help="Job file, or folder of a run.")]
    overrides: SetOption = None
    run_folder: RunFolderOption = None

    def target(self) -> Target:
        return JobOptions(job=self.job, overrides=self.overrides).target(self.run_folder)


@versions_app.command("list")
def list_(job: KeptOptions, as_json: JsonOption = False) -> None:
    """List the kept versions: samples, errors, cost, aliases and pins.

    checkpoint.keep, checkpoint.history_s, aliases and pins determine which versions are kept. The errors were measured
    by the evaluator and the workers. The column job is a checksum of the job file and the model.

    Example: doll versions list runs/digits-20260101-120000
    """
    from doll.monitor.views.versions import versions_table
    from doll.run.versions import list_versions
    from doll.storage.stores import checkpoint_location

    target = job.target()
    lines = list_versions(target)
    location = str(checkpoint_location(target.config, target.run.path))
    emit(as_json, [line.to_dict() for line in lines], versions_table(lines, location))


@versions_app.command("show")
def show(job: KeptOptions, version: VersionArgument, as_json: JsonOption = False) -> None:
    """Show one version: offsets by partition, samples, policy, recipe, errors, cost, fingerprint of code and job.

    Example: doll versions show runs/digits-20260101-120000 stable
    """
    from doll.monitor.views.versions import version_text
    from doll.run.versions import show_version

    line = show_version(job.target(), version)
    emit(as_json, line.to_dict(), version_text(line))


@versions_app.command("diff")
def diff(job: KeptOptions, a: VersionArgument, b: VersionArgument, as_json: JsonOption = False) -> None:
    """Compare two versions: offsets, samples, errors, settings, and the change of each tensor and of the table rows.

    Example: doll versions diff runs/digits-20260101-120000 stable latest
    """
    from doll.monitor.views.versions import diff_text
    from doll.run.versions import diff_versions

    between = diff_versions(job.target(), a, b)
    emit(as_json, between.to_dict(), diff_text(between))


@versions_app.command("compare")
def compare(
    job: KeptOptions,
    a: VersionArgument,
    b: VersionArgument,
    against: Annotated[
        Path | None, typer.Option(metavar="JOB.yaml|RUN", help="The second version is of this job [default: the same].")
    ] = None,
    metric: Annotated[str, typer.Option(help="loss, or a mean that Task.metrics returns.")] = "loss",
    error: Annotated[
        float, typer.Option(min=1e-9, max=0.5, help="Probability that the interval is ever wrong, over all looks.")
    ] = 0.05,
    seconds: Annotated[
        float | None, duration("Time limit [default: until one version is better].", "--duration")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure two versions on the records that come now, until one is better beyond the noise.

    Both versions compute the same new records of the samples topic, which neither has learned. The difference has an
    interval that one may look at each second. A challenger, with another recipe or model on the same stream, is a
    second job: --against.

    Example: doll versions compare my.yaml stable latest --metric accuracy
    """
    from doll.run.live_comparison import compare_live

    other = None if against is None else JobOptions(job=against).target()
    emit_result(
        as_json,
        compare_live(job.target(), a, b, against=other, metric=metric, error=error, seconds=seconds, say=say),
    )


@versions_app.command("value")
def value(
    job: KeptOptions,
    version: Annotated[
        list[str], typer.Option("--version", metavar="VERSION", help="latest, a number or an alias; repeatable.")
    ],
    reward: Annotated[str, typer.Option(metavar="FIELD", help="Field of a record that has the reward.")],
    most: Annotated[int, typer.Option("--records", min=1, help="Number of records, the newest ones.")] = 100_000,
    as_json: JsonOption = False,
) -> None:
    """Estimate what the mean reward would have been if a version had chosen the actions.

    For a task with Task.choose, and a samples topic whose records doll serve --log-records has written, with the reward
    added by data.join or by your program. Three estimators: ips (inverse propensity), snips (self-normalised), and dr
    (doubly robust) if the task has Task.action_values. The intervals are of 95 %.

    Example: doll versions value my.yaml --version stable --version latest --reward clicked
    """
    from doll.run.off_policy import value_of_versions

    emit_result(as_json, value_of_versions(job.target(), version, reward=reward, most=most))


@versions_app.command("pin")
def pin_(job: KeptOptions, version: VersionArgument, as_json: JsonOption = False) -> None:
    """Keep a version until it is unpinned, regardless of the number of newer versions.

    Example: doll versions pin runs/digits-20260101-120000 latest
    """
    _pin(job.target(), version, True, as_json)


@versions_app.command("unpin")
def unpin(job: KeptOptions, version: VersionArgument, as_json: JsonOption = False) -> None:
    """Remove the pin of a version; it is then kept as long as other versions. A version with an alias is still kept.

    Example: doll versions unpin runs/digits-20260101-120000 120
    """
    _pin(job.target(), version, False, as_json)


@versions_app.command("alias")
def alias_(
    job: KeptOptions,
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="The alias, such as stable.")],
    version: Annotated[str | None, typer.Argument(metavar="[VERSION]", help="latest, a number or an alias.")] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the alias.")] = False,
    reason: ReasonOption = "",
    as_json: JsonOption = False,
) -> None:
    """Give a version an alias (a name), or move the alias to another version. A version with an alias is kept.

    To serve an earlier version, move the alias to that version. To continue training from an earlier version: doll
    rollback.

    Example: doll versions alias runs/digits-20260101-120000 stable 120
    """
    from doll.run.versions import set_alias

    if delete == (version is not None):
        raise typer.BadParameter("expected a version that gets the alias, or --delete")
    marks = set_alias(job.target(), alias, version, reason)
    text = f"{alias} is deleted" if delete else f"{alias} is version {marks.aliases[alias]}"
    emit(as_json, _content(marks), text)


@versions_app.command("freeze")
def freeze_(
    job: KeptOptions,
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="The alias, such as stable.")],
    reason: ReasonOption = "",
    end: Annotated[bool, typer.Option("--end", help="Let the gates move the alias again.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make the gates (versions.gates) leave an alias where it is. People can still move it.

    Example: doll versions freeze runs/digits-20260101-120000 stable --reason "sale on Friday"
    """
    from doll.run.versions import freeze

    marks = freeze(job.target(), alias, None if end else reason)
    text = f"gates may move {alias} again" if end else f"gates leave {alias} at version {marks.aliases.get(alias, '-')}"
    emit(as_json, _content(marks), text)


def _pin(target: Target, name: str, pinned: bool, as_json: bool) -> None:
    from doll.run.versions import pin

    version, marks = pin(target, name, pinned=pinned)
    emit(as_json, _content(marks), f"version {version} is {'kept' if pinned else 'not pinned any more'}")


def _content(marks: VersionMarks) -> dict[str, object]:
    return {"aliases": marks.aliases, "pins": marks.pins, "frozen": marks.frozen, "reasons": marks.reasons}
