"""`doll provision`: launches and terminates the machines of a job's workers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from doll.cli.groups import Commands
from doll.cli.options import JobOption, JobOptions, JsonOption, RunFolderOption, SetOption
from doll.cli.output import emit

if TYPE_CHECKING:
    from doll.process.signals import Interrupts
    from doll.provisioner.decision import Decision
    from doll.provisioner.main import ProvisionerProcess
    from doll.run.target import Target

provision_app = Commands(
    help="Provision machines for the workers: meet the deadline at the lowest cost.", no_args_is_help=False
)
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the decisions, but change nothing.")]
StandbyOption = Annotated[
    bool,
    typer.Option(
        "--standby", help="Wait until no other provisioner has renewed the lease for provision.lease_s; then take over."
    ),
]


@provision_app.callback(invoke_without_command=True)
def provision(
    context: typer.Context,
    job_option: JobOption = None,
    overrides: SetOption = None,
    run_folder: RunFolderOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Launch machines for a job's workers, replace failed machines, choose spot or on-demand, terminate all at the end.

    Without a subcommand, the command does the same as: doll provision run

    Example: doll provision --job my.yaml --dry-run
    """
    if context.invoked_subcommand is None:
        run(JobOptions(job_option=job_option, overrides=overrides), run_folder, dry_run)
    elif job_option is not None or overrides or run_folder is not None or dry_run:
        raise typer.BadParameter(
            f"expected options after the sub-command, as in: doll provision {context.invoked_subcommand} --job"
        )


@provision_app.command(short_help="Provision machines until the job has finished.")
def run(
    job: JobOptions,
    run_folder: RunFolderOption = None,
    dry_run: DryRunOption = False,
    standby: StandbyOption = False,
) -> None:
    """Provision until the job has finished, then terminate all machines. SIGTERM or Ctrl-C leaves all machines running.

    A restarted provisioner continues from the saved state, which is stored with the checkpoints. It takes over from a
    provisioner that is still running; with --standby it waits until the other one has ended. If two machines run it
    with --standby, provisioning continues after the loss of either machine. You can change deadline, budget and work in
    the job file while the provisioner runs.

    Example: doll provision run my.yaml
    """
    from doll.process.signals import Interrupts
    from doll.provisioner.lease import wait_for_lease
    from doll.run.local.provisioning import settings_of

    if standby and dry_run:
        raise typer.BadParameter("expected one of --standby and --dry-run: a dry run takes no lease")
    at = job.target(run_folder)
    if standby:
        settings_of(at.config)  # refuse an invalid job file now, not when the standby takes over
        with Interrupts() as waiting:
            waiting.graceful = True
            if not wait_for_lease(at.config, at.run.path, waiting.wait):
                return
        at = job.target(run_folder)  # the job file may have been edited in the meantime
    with _provisioner(at, job.overrides or [], dry_run=dry_run) as (provisioner, interrupts):
        decision = provisioner.run(lambda: interrupts.stop_requested)
        if decision is not None:
            _print(decision, as_json=False)
    if decision is not None and decision.phase == "failed":
        raise typer.Exit(2)  # a restart does not help
    raise typer.Exit(0 if decision is None or decision.finished else 1)


@provision_app.command(short_help="Run one iteration.")
def once(
    job: JobOptions, run_folder: RunFolderOption = None, dry_run: DryRunOption = False, as_json: JsonOption = False
) -> None:
    """Observe, decide and act once. With --dry-run nothing is changed.

    Example: doll provision once my.yaml --dry-run
    """
    at = job.target(run_folder)
    with _provisioner(at, job.overrides or [], dry_run=dry_run) as (provisioner, _):
        _print(provisioner.run_once(), as_json=as_json)


@provision_app.command(short_help="Terminate all machines of the job.")
def drain(job: JobOptions, run_folder: RunFolderOption = None, as_json: JsonOption = False) -> None:
    """Terminate all machines of the job and wait until they are terminated. A running provisioner is stopped, too.

    Workers finish their batches or return them to the job. The job can continue later: doll provision run launches
    machines again. Run this command before `terraform destroy`, because Terraform does not know these machines. The
    command needs neither Kafka nor Redis.

    Example: doll provision drain my.yaml
    """
    from doll.process.signals import Interrupts
    from doll.provisioner.lease import Lease, claims_of
    from doll.provisioner.main import drain as drain_fleet
    from doll.provisioner.main import publish_last
    from doll.provisioner.state_store import state_of
    from doll.run.local.provisioning import machines_of
    from doll.services import Services

    at = job.target(run_folder)
    nowhere = Services(kafka="", redis="")  # the addresses for new workers; no worker is started here
    with Interrupts() as interrupts, machines_of(at.config, nowhere, at.run.path) as machines:
        lease = Lease(claims_of(at.config, at.run.path), at.config.provision.lease_s)
        interrupts.graceful = True
        store = state_of(at.config, at.run.path, lease.number)
        store.take()
        decision = drain_fleet(at.config, machines, lease, store, interrupts.wait)
        if decision is not None:
            _print(decision, as_json=as_json)
            publish_last(at.config, at.services, decision)
    raise typer.Exit(0 if decision is not None else 1)


@provision_app.command(short_help="Allow a job that was stopped for lack of progress to continue.")
def clear(job: JobOptions, run_folder: RunFolderOption = None) -> None:
    """Allow a job to continue that was stopped, completely or in some slots, because it made no progress.

    First correct the cause, which doll provision status shows. The provisioner then launches one machine for each slot
    that was given up. A restart of the provisioner does not have this effect, because supervisors restart it
    automatically. The command needs neither Kafka nor Redis.

    Example: doll provision clear my.yaml
    """
    from doll.provisioner.state_store import clear_stops

    at = job.target(run_folder)
    stops = clear_stops(at.config, at.run.path)
    lines = [f"cleared: {stop}" for stop in stops] or ["nothing is stopped"]
    if stops:
        lines.append(f"to go on, if no supervisor starts it: doll provision run {at.path}")
    emit(False, {}, "\n".join(lines))


@provision_app.command(short_help="Show slots, markets, machines, cost and reasons.")
def status(job: JobOptions, run_folder: RunFolderOption = None, as_json: JsonOption = False) -> None:
    """Show the last decision of the provisioner and its reasons, from its journal or its saved state.

    The command changes nothing. It needs neither Kafka nor Redis, and also works on another machine than the
    provisioner.

    Example: doll provision status my.yaml
    """
    from doll.provisioner.state_store import state_of
    from doll.provisioner.status import last_decision, status_text

    at = job.target(run_folder)
    decision = last_decision(state_of(at.config, at.run.path), f"doll provision run {at.path}")
    emit(as_json, decision, status_text(decision, time.time()))


@contextmanager
def _provisioner(
    at: Target, overrides: list[str], *, dry_run: bool = False
) -> Iterator[tuple[ProvisionerProcess, Interrupts]]:
    """Yield a provisioner that has read its history. Before that, interrupts end the process; then, only its loop."""
    from doll.config import load
    from doll.process.signals import Interrupts
    from doll.provisioner.main import ProvisionerProcess, ProvisionerSetup
    from doll.run.local.provisioning import machines_of, pass_on, settings_of

    with Interrupts() as interrupts:
        setup = ProvisionerSetup(
            at.config, at.services, at.run.path, machines=machines_of, read_settings=settings_of,
            load=lambda: load(at.path, overrides), path=at.path, dry_run=dry_run,
            accept=lambda config: pass_on(config, at.run.path),
        )  # fmt: skip
        with ProvisionerProcess(setup) as provisioner:
            provisioner.read_history()
            interrupts.graceful = True
            yield provisioner, interrupts


def _print(decision: Decision, *, as_json: bool) -> None:
    from doll.provisioner.status import decision_text

    emit(as_json, {**decision.to_dict(), "bill": decision.bill.to_dict()}, decision_text(decision))
