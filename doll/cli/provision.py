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
    help="Provision machines for the workers: meet the deadline at the least cost.", no_args_is_help=False
)
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print decisions without acting on them.")]
StandbyOption = Annotated[
    bool,
    typer.Option(
        "--standby", help="Wait until no other provisioner has renewed its lease for provision.lease_s, then take over."
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
    """Launch machines for a job's workers, replace failed machines, choose their market, and terminate them at its end.

    Without a sub-command the same as: doll provision run

    Example: doll provision --job my.yaml --dry-run
    """
    if context.invoked_subcommand is None:
        run(JobOptions(job_option=job_option, overrides=overrides), run_folder, dry_run)
    elif job_option is not None or overrides or run_folder is not None or dry_run:
        raise typer.BadParameter(
            f"expected options after the sub-command, as in: doll provision {context.invoked_subcommand} --job"
        )


@provision_app.command(short_help="Provision until the job has finished.")
def run(
    job: JobOptions,
    run_folder: RunFolderOption = None,
    dry_run: DryRunOption = False,
    standby: StandbyOption = False,
) -> None:
    """Provision until the job has finished, then terminate all machines. SIGTERM or Ctrl-C leaves all machines running.

    A restarted provisioner continues from the saved state, which lies beside the checkpoints, and takes over from one
    that still runs; with --standby it waits for the end of the other instead. Start one with --standby on two machines:
    the job survives the loss of either. Deadline, budget and work may be changed in the job file meanwhile.

    Example: doll provision run my.yaml
    """
    from doll.process.signals import Interrupts
    from doll.provisioner.lease import wait_for_lease
    from doll.run.local.provisioning import settings_of

    if standby and dry_run:
        raise typer.BadParameter("expected one of --standby and --dry-run: a dry run takes no lease")
    at = job.target(run_folder)
    if standby:
        settings_of(at.config)  # a wrong job file is refused now, and not when the standby is needed
        with Interrupts() as waiting:
            waiting.graceful = True
            if not wait_for_lease(at.config, at.run.path, waiting.wait):
                return
        at = job.target(run_folder)  # it may have been edited meanwhile
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
    """Terminate all machines of the job and wait until they are gone; this stops a provisioner that runs.

    Workers finish their batches or return them to the job. The job itself can continue: doll provision run launches
    machines again. Drain before `terraform destroy`, which does not know these machines. Neither Kafka nor Redis is
    needed.

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
    nowhere = Services(kafka="", redis="")  # workers are started with them, and none is
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


@provision_app.command(short_help="Let a job go on that could not advance and was stopped.")
def clear(job: JobOptions, run_folder: RunFolderOption = None) -> None:
    """Let a job go on that could not advance, so that all machines or those of some slots were ended for good.

    Correct the cause first, which doll provision status shows. Each slot that was given up gets one more machine. A
    restart alone changes nothing: supervisors restart what has ended. Neither Kafka nor Redis is needed.

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
    """Show what the provisioner last decided and why, from its journal, or from its state if it runs on another
    machine. It changes nothing, and needs neither Kafka nor Redis.

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
    """A provisioner that has read what was before it. Interrupts end the process until then, later only the loop."""
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
