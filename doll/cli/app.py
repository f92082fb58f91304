"""The commands of `doll`. A command imports its modules only when it is called, so that `doll --help` is fast."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer

from doll.cli.groups import Commands, LazyGroup, Listed

# typer prints a paragraph that begins with \b without wrapping it.
_HELP = """Online learning on Kafka streams with preemptible machines.

\b
  doll up digits                   run a whole job on this machine, here an example job
  doll example list                list the examples that ship with DOLL
  doll config check my.yaml        check a job file
  doll audit my.yaml               verify that every sample is applied exactly once

\b
Exit codes: 0 done, 1 failed, 2 wrong usage or job file, 3 infeasible plan,
4 audit failed or records lost. Results go to standard output, progress and
logs to standard error. DOLL_DEBUG=1 shows tracebacks.
"""

# Titles of `doll --help`, and the commands in the order in which it shows them.
_START, _LOOK, _ROLES = "Start here", "Look", "Roles: each command runs one process of a job"
_MONEY, _EXAMINE = "Money and machines", "Examine and repair"

_COMMANDS: Final = {
    "up": Listed(_START, "Run a whole job on this machine.", "runs:up"),
    "resume": Listed(_START, "Resume a run.", "runs:resume"),
    "scale": Listed(_START, "Change the number of workers of a running job.", "runs:scale"),
    "regrid": Listed(_START, "Continue with another batch size or policy.", "runs:regrid"),
    "rollback": Listed(_START, "Continue training from an earlier version.", "runs:rollback"),
    "example": Listed(_START, "List or copy the examples that ship with DOLL.", "job_files:example_app"),
    "config": Listed(_START, "Show or check a job file.", "job_files:config_app"),
    "status": Listed(_LOOK, "Show a job's status.", "inspect:status"),
    "dashboard": Listed(_LOOK, "Serve the live page of a job or a run.", "inspect:dashboard"),
    "audit": Listed(_LOOK, "Verify that every sample is applied exactly once.", "inspect:audit"),
    "topics": Listed(_LOOK, "Show or create a job's Kafka topics.", "inspect:topics"),
    "export": Listed(_LOOK, "Write the model as safetensors, ONNX or torch.export.", "runs:export"),
    "versions": Listed(_LOOK, "List, compare and name the versions of a job.", "versions:versions_app"),
    "ps": Listed(_ROLES, "Run the parameter server of a job.", "roles:ps"),
    "worker": Listed(_ROLES, "Run worker n of a job.", "roles:worker"),
    "stage": Listed(_ROLES, "Run a stage of a worker that is a pipeline.", "roles:stage"),
    "produce": Listed(_ROLES, "Send a job's source to its topic.", "roles:produce"),
    "join": Listed(_ROLES, "Join features and labels into a job's topic.", "roles:join"),
    "shard": Listed(_ROLES, "Hold a slice of a large model, for the parameter server.", "roles:shard"),
    "evaluate": Listed(_ROLES, "Measure the held-out error of a job.", "roles:evaluate"),
    "serve": Listed(_ROLES, "Answer requests with a job's model.", "serve:serve"),
    "prometheus": Listed(_ROLES, "Serve a job's metrics to Prometheus.", "roles:prometheus"),
    "notify": Listed(_ROLES, "Send a job's events to a webhook.", "roles:notify"),
    "otel": Listed(_ROLES, "Send traces and metrics to OpenTelemetry.", "roles:otel"),
    "lineage": Listed(_ROLES, "Send a job's runs to OpenLineage.", "roles:lineage"),
    "health": Listed(_ROLES, "Query the health probe of a process.", "roles:health"),
    "plan": Listed(_MONEY, "Plan spot and on-demand workers, cost and risk.", "plan:plan"),
    "bill": Listed(_MONEY, "Show what a job has cost; compare with AWS's bill.", "bill:bill"),
    "calibrate": Listed(_MONEY, "Estimate the inputs of doll plan from a run.", "plan:calibrate"),
    "spot": Listed(_MONEY, "Run a whole job on a spot market on this machine."),
    "backtest": Listed(_MONEY, "Backtest the planner on recorded markets."),
    "provision": Listed(_MONEY, "Provision machines for a job's workers.", "provision:provision_app"),
    "doctor": Listed(_EXAMINE, "Check services, access rights and this machine.", "inspect:doctor"),
    "drill": Listed(_EXAMINE, "Inject faults into a job, then audit it."),
    "replay": Listed(_EXAMINE, "Rebuild a version from its event log.", "runs:replay_"),
    "forget": Listed(_EXAMINE, "Remove records from a model.", "forget:forget"),
    "compare": Listed(_EXAMINE, "Run a job under several consistency policies.", "compare:compare"),
    "simulate": Listed(_EXAMINE, "Simulate a whole job in virtual time."),
    "profile": Listed(_EXAMINE, "Measure the layers of a model, for pipelines.", "profile:profile"),
    "dead": Listed(_EXAMINE, "List rejected records and send them again.", "dead:dead_app"),
}


class _RootGroup(LazyGroup):
    listed = _COMMANDS


app = Commands(
    help=_HELP,
    cls=_RootGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(requested: bool) -> None:
    if requested:
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
