"""The commands of `doll`. Each imports what it needs when it runs, so that help and checks answer at once."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from doll.cli.backtest import backtest
from doll.cli.calibrate import calibrate
from doll.cli.dead import dead_app
from doll.cli.errors import DollCommand, DollGroup, usage
from doll.cli.examples import example_app
from doll.cli.options import (
    FRESH_HELP,
    FreshOption,
    JobArgument,
    JobOption,
    JsonOption,
    RunFolderOption,
    RunsFolderOption,
    SeedOption,
    SetOption,
    TargetArgument,
    target,
)
from doll.cli.output import emit
from doll.cli.plan import plan
from doll.cli.probes import health, prometheus
from doll.cli.provision import provision_app
from doll.cli.simulate import simulate
from doll.cli.spot import spot

if TYPE_CHECKING:
    from doll.run.target import Target
    from doll.services import Services

# A paragraph that begins with \b is printed as it stands.
_HELP = """Online learning on live Kafka streams, on machines that can vanish.

\b
  doll up digits                   run everything on this machine, for an example
  doll example list                the examples, and how to copy one
  doll config check my.yaml        is the job file right?
  doll audit my.yaml               was every sample counted exactly once?

\b
Exit codes: 0 done, 1 failed, 2 wrong usage or job file, 3 infeasible plan,
4 audit failed or records lost. Results go to standard output, progress and
logs to standard error. DOLL_DEBUG=1 shows tracebacks.
"""

app = typer.Typer(
    cls=DollGroup,
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
config_app = typer.Typer(cls=DollGroup, help="Show or check a job file.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")
app.add_typer(dead_app, name="dead")
app.add_typer(example_app, name="example")
app.add_typer(provision_app, name="provision")


def _version(wanted: bool) -> None:
    if wanted:
        from doll import __version__

        sys.stdout.write(f"doll {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    pass


@app.command(short_help="Run a whole job on this machine.")
def up(
    job: JobArgument = None,
    job_option: JobOption = None,
    overrides: SetOption = None,
    runs_folder: RunsFolderOption = Path("runs"),
    fresh: FreshOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a whole job on this machine: broker, workers, parameter server, evaluator, producer.

    It ends by the job's stop rule or Ctrl-C, then audits the ledger, exports the model and writes report.json.

    Example: doll up digits --set stop.updates=100
    """
    from doll.monitor.run_report import summary
    from doll.run.job import run_up

    report = run_up(target(job, job_option, overrides).config, runs_folder, fresh=fresh)
    emit(as_json, report, summary(report))
    raise typer.Exit(report["exit_code"])


@app.command(short_help="Break a job on purpose, again and again, then audit it.")
def drill(
    job: JobArgument = None,
    job_option: JobOption = None,
    overrides: SetOption = None,
    faults: Annotated[int, typer.Option("--faults", min=1, help="How many faults.")] = 50,
    seed: SeedOption = 0,
    standby: Annotated[
        bool, typer.Option("--standby", help="Two parameter servers: one stands by, and takes over from the other.")
    ] = False,
    brokers: Annotated[
        int, typer.Option("--brokers", min=1, max=5, help="Brokers of a local cluster; of several, one dies at a time.")
    ] = 1,
    runs_folder: RunsFolderOption = Path("runs"),
    fresh: FreshOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a whole job on this machine as doll up does, and kill, freeze, cut off and preempt its processes meanwhile.

    The job's stop rule is set aside: it ends when all faults are recovered from. Then its ledger is audited, and a
    table says how long each kind of fault held the job up, and how many samples were lost or counted twice.

    Example: doll drill digits --faults 200 --seed 7
    """
    from doll.drill.main import run_drill
    from doll.errors import AuditError
    from doll.monitor.run_report import summary

    report, failure = run_drill(
        target(job, job_option, overrides).config,
        runs_folder,
        faults=faults,
        seed=seed,
        standby=standby,
        brokers=brokers,
        fresh=fresh,
    )
    emit(as_json, report, summary(report))
    if failure is not None:
        raise AuditError(failure)
    raise typer.Exit(report["exit_code"])


@app.command(short_help="Go on with a run that has ended or was killed.")
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of the run.", show_default=False)],
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go on with a run of doll up from its checkpoints, on the same topics; its report then covers all of it.

    A local broker is started again on the data in the run folder. The workers, the batch size and the task cannot
    change, since batches are known by their numbers; rates, stop rules and the like can, with --set.

    Example: doll resume runs/digits-20260101-120000 --set stop.updates=2000
    """
    from doll.monitor.run_report import summary
    from doll.run.resume import run_resume

    report = run_resume(run, overrides or [])
    emit(as_json, report, summary(report))
    raise typer.Exit(report["exit_code"])


@app.command(short_help="Send the job's source to its topic.")
def produce(
    job: JobArgument = None,
    job_option: JobOption = None,
    overrides: SetOption = None,
    stdin: Annotated[bool, typer.Option("--stdin", help="Send the lines of standard input.")] = False,
    until_finished: Annotated[
        bool, typer.Option("--until-finished", help="End when the job has finished; default: when the source ends.")
    ] = False,
    run_folder: RunFolderOption = None,
) -> None:
    """Send the job's source to its samples topic.

    Example: cat events.jsonl | doll produce --job my.yaml --stdin
    """
    from doll.config import StdinSource
    from doll.producers.main import run_producer

    at = target(job, job_option, overrides, run_folder)
    config = at.config
    if stdin:
        config = config.model_copy(update={"source": StdinSource(kind="stdin")})
    elif config.source is None:
        if until_finished:  # one of a job's standing processes, and this job has no use for it
            sys.stderr.write("doll: the job file names no source, so there is nothing to send: somebody else does\n")
            raise typer.Exit(0)
        raise usage("the job file names no source: add one, or send lines with --stdin")
    services = _ready(at, "producer")
    raise typer.Exit(run_producer(config, services, at.run.path, until_finished=until_finished))


@app.command(short_help="Be worker n of a job.")
def worker(
    job: JobArgument = None,
    job_option: JobOption = None,
    number: Annotated[
        int | None,
        typer.Option(
            "--worker",
            envvar="DOLL_WORKER",
            min=0,
            help="The slot n, 0 .. data.workers - 1 [default: 0].",
            show_default=False,
        ),
    ] = None,
    any_slot: Annotated[
        bool, typer.Option("--any", help="Where no slot is named: take one that no other worker with --any holds.")
    ] = False,
    from_imds: Annotated[
        bool, typer.Option("--from-imds", help="Take the slot from this EC2 machine's tags, and leave on spot notices.")
    ] = False,
    overrides: SetOption = None,
    run_folder: RunFolderOption = None,
) -> None:
    """Be worker n: batch the samples of partition n and compute gradients of granted batches.

    It ends with exit code 0 where the job has ended, it got SIGTERM, or another process has taken its place.

    With --any workers can be started alike. One more than there are slots waits, and takes over when another ends.

    Example: doll worker --job my.yaml --worker 3
    """
    at = target(job, job_option, overrides, run_folder)
    if from_imds:
        if any_slot:
            raise usage("expected --from-imds or --any, got both")
        number = slot_of_this_machine(number)
    if number is not None and number >= at.config.data.workers:
        raise usage(f"--worker: expected 0 .. {at.config.data.workers - 1} (data.workers), got {number}")
    from doll.kafka import topics

    if number is None and any_slot:
        from doll.consumers.any_slot import run_any_worker

        services = _ready(at, "worker")
        topics.check(at.config, services)
        raise typer.Exit(run_any_worker(at.config, services, at.run.path))
    number = number or 0
    services = _ready(at, f"worker-{number}")
    topics.check(at.config, services)
    from doll.consumers.main import run_worker  # imports torch, for seconds: not before it is known to be of use

    raise typer.Exit(run_worker(at.config, services, number, at.run.path))


@app.command(short_help="Be the parameter server of a job.")
def ps(
    job: JobArgument = None,
    job_option: JobOption = None,
    overrides: SetOption = None,
    run_folder: RunFolderOption = None,
    standby: Annotated[
        bool, typer.Option("--standby", help="Wait until nothing is heard of another one for ps.lease_s.")
    ] = False,
    takeover: Annotated[
        bool, typer.Option("--takeover", help="Do not look whether another one leads: replace it if it does.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", envvar="DOLL_FRESH", help=FRESH_HELP)] = False,
) -> None:
    """Be the parameter server: form groups, apply updates, write checkpoints.

    It ends with exit code 2 where the topics hold an earlier run and there are no checkpoints of it: --fresh then
    begins anew; where checkpoints are there, it goes on from them with --fresh too.

    It ends with exit code 1 where another one leads. With --standby it waits for the other's end instead; both must
    reach the same checkpoints (checkpoint.folder) then.

    Example: doll ps --job my.yaml --run-folder /var/lib/doll/my
    """
    at = target(job, job_option, overrides, run_folder)
    from doll.kafka import topics

    services = _ready(at, "ps")
    topics.ensure(at.config, services)
    from doll.ledger.admission import ANY_TERM
    from doll.ps.standby import LeaderCheck

    with LeaderCheck(at.config, services) if not (standby or takeover) else contextlib.nullcontext() as leader_check:
        from doll.ps.main import run_ps  # imports torch, for seconds: not before it is known to be of use

        after_term = ANY_TERM if fresh else 0
        code = run_ps(
            at.config, services, at.run.path, standby=standby, leader_check=leader_check, after_term=after_term
        )
    raise typer.Exit(code)


@app.command(short_help="Measure held-out error while a job runs.")
def evaluate(
    job: JobArgument = None,
    job_option: JobOption = None,
    overrides: SetOption = None,
    run_folder: RunFolderOption = None,
) -> None:
    """Measure published weights on held-out samples until the job ends; writes evaluations.csv and updates.csv.

    Example: doll evaluate --job my.yaml
    """
    at = target(job, job_option, overrides, run_folder)
    from doll.evaluation.main import run_evaluator
    from doll.kafka import topics

    services = _ready(at, "evaluator")
    topics.check(at.config, services)
    raise typer.Exit(run_evaluator(at.config, services, at.run.path))


@app.command(short_help="Prove that no sample is lost or counted twice.")
def audit(
    job: TargetArgument = None,
    job_option: JobOption = None,
    overrides: SetOption = None,
    run_folder: RunFolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prove from the checkpoint, the updates and the offsets that no sample is lost or counted twice. Exit 4 if not.

    Example: doll audit my.yaml
    """
    from doll.cli.inspect import audit_target

    report = audit_target(target(job, job_option, overrides, run_folder))
    details = [*report.violations(), *(report.losses() if report.loss_allowed else ())]
    emit(as_json, report.to_dict(), "\n  ".join([report.summary(), *details]))
    if not report.ok:
        raise typer.Exit(4)


@app.command(short_help="Show or create a job's topics.")
def topics(
    job: TargetArgument = None,
    job_option: JobOption = None,
    overrides: SetOption = None,
    create: Annotated[bool, typer.Option("--create", help="Create the topics that are missing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the job's topics, or create them.

    Example: doll topics my.yaml --create
    """
    from doll.cli.inspect import topics_of

    output = topics_of(target(job, job_option, overrides), create=create)
    emit(as_json, output.content, output.text)


@app.command(short_help="Show where a job stands.")
def status(
    job: TargetArgument = None,
    job_option: JobOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show where a job stands: updates, error, rates, workers. For a run that has ended: its report.

    Example: doll status runs/digits-20260101-120000
    """
    from doll.cli.inspect import status_of

    output = status_of(target(job, job_option, overrides))
    emit(as_json, output.content, output.text)


@app.command(short_help="Write the model as safetensors.")
def export(
    job: TargetArgument = None,
    job_option: JobOption = None,
    overrides: SetOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder to write to [default: model/ in the run folder].")
    ] = None,
    run_folder: RunFolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the newest checkpoint as model.safetensors and model.json.

    Example: doll export runs/digits-20260101-120000 --out model
    """
    at = target(job, job_option, overrides, run_folder)
    from doll.run.export import export_model

    folder = out or at.run.model
    about = export_model(at.config, at.run.path, folder)
    emit(as_json, about, f"version {about['version']} of {about['job']}: {folder / 'model.safetensors'}")


app.command(short_help="Is the process on this machine healthy?")(health)
app.command(short_help="Serve a job's measurements to Prometheus.")(prometheus)
app.command(cls=DollCommand, short_help="Feasible? How many on spot, which, at what cost?")(plan)
app.command(short_help="Measure what plan needs from a run.")(calibrate)
app.command(cls=DollCommand, short_help="Run a whole job on a spot market on this machine.")(spot)
app.command(cls=DollCommand, short_help="Simulate a whole job in virtual time.")(simulate)
app.command(cls=DollCommand, short_help="Replay planner and baselines on recorded markets.")(backtest)


@config_app.command("show")
def config_show(
    job: TargetArgument = None, job_option: JobOption = None, overrides: SetOption = None, as_json: JsonOption = False
) -> None:
    """Print the job file with all defaults and overrides.

    Example: doll config show my.yaml --set data.workers=8
    """
    from doll.config import dump

    config = target(job, job_option, overrides).config
    emit(as_json, config.model_dump(mode="json", by_alias=True, exclude_none=True), dump(config))


@config_app.command("check")
def config_check(
    job: TargetArgument = None,
    job_option: JobOption = None,
    overrides: SetOption = None,
    load: Annotated[
        bool, typer.Option("--load", help="Also import the task and build its model; takes seconds.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a job file: keys, values, the files and the task class that it names. Exit 2 if it is wrong.

    Example: doll config check my.yaml
    """
    from doll.run.preflight import check_files, check_task

    config = target(job, job_option, overrides).config
    check_files(config)
    check_task(config)
    facts: dict[str, object] = {
        "job": config.job,
        "workers": config.data.workers,
        "batch_size": config.data.batch_size,
        "group_size": config.group_size,
    }
    text = (
        f"{config.job}: fine. {config.data.workers} workers, batches of {config.data.batch_size}, "
        f"{config.group_size} batches per update"
    )
    if load:
        from doll.model import build
        from doll.task import load_task

        facts["parameters"] = build(config, load_task(config)).num_parameters
        text += f", {facts['parameters']} parameters"
    emit(as_json, facts, text)


def slot_of_this_machine(number: int | None) -> int:
    """The slot in this EC2 machine's tags, or `number`; the environment then says the rest of its identity.

    Raises:
        ConfigError: there are no such tags, or they name no slot.
        ServiceUnavailableError: this is no EC2 machine, or its metadata service is off.
    """
    import os

    from doll.consumers.spot_notices import Imds, set_identity_from_tags
    from doll.errors import ConfigError

    if number is not None:
        os.environ["DOLL_WORKER"] = str(number)
    set_identity_from_tags(Imds())
    slot = os.environ["DOLL_WORKER"]
    if not slot.isdecimal():
        raise ConfigError(f"tag doll:worker: expected a slot, 0 or more, got {slot!r}")
    return int(slot)


def _ready(at: Target, process: str) -> Services:
    """Logging set up and the services answering, for a process of the job."""
    from doll import telemetry
    from doll.service_checks import require_services

    telemetry.configure(process=process)
    services = at.services()
    require_services(at.config, services)
    return services
