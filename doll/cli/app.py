"""The commands of `doll`. A command imports what it runs when it is called, so that `doll --help` is fast."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from doll.cli import inspect, roles, runs
from doll.cli.backtest import backtest
from doll.cli.calibrate import calibrate
from doll.cli.compare import compare
from doll.cli.dashboard import dashboard
from doll.cli.dead import dead_app
from doll.cli.doctor import doctor
from doll.cli.groups import Commands
from doll.cli.job_files import config_app, example_app
from doll.cli.plan import plan
from doll.cli.profile import profile
from doll.cli.provision import provision_app
from doll.cli.serve import serve
from doll.cli.simulate import simulate
from doll.cli.spot import spot
from doll.cli.versions import versions_app

# typer prints a paragraph that begins with \b without wrapping it.
_HELP = """Online learning on Kafka streams with preemptible machines.

\b
  doll up digits                   run a whole job on this machine, here an example
  doll example list                list the examples that ship with DOLL
  doll config check my.yaml        check a job file
  doll audit my.yaml               verify that every sample is applied exactly once

\b
Exit codes: 0 done, 1 failed, 2 wrong usage or job file, 3 infeasible plan,
4 audit failed or records lost. Results go to standard output, progress and
logs to standard error. DOLL_DEBUG=1 shows tracebacks.
"""

app = Commands(
    help=_HELP,
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


# Titles of `doll --help`, and the commands in the order in which it shows them.
_START, _LOOK, _ROLES = "Start here", "Look", "Roles: one process of a job each"
_MONEY, _EXAMINE = "Money and machines", "Examine and repair"

app.command(short_help="Run a whole job on this machine.", rich_help_panel=_START)(runs.up)
app.command(short_help="Resume a run.", rich_help_panel=_START)(runs.resume)
app.command(short_help="Change the number of workers of a running job.", rich_help_panel=_START)(runs.scale)
app.command(short_help="Go on with another batch size or policy.", rich_help_panel=_START)(runs.regrid)
app.command(short_help="Let training go on from an earlier version.", rich_help_panel=_START)(runs.rollback)
app.add_typer(example_app, name="example", rich_help_panel=_START)
app.add_typer(config_app, name="config", rich_help_panel=_START)

app.command(short_help="Show a job's status.", rich_help_panel=_LOOK)(inspect.status)
app.command(short_help="Serve the live page of a job, or the page of a run.", rich_help_panel=_LOOK)(dashboard)
app.command(short_help="Verify that every sample is applied exactly once.", rich_help_panel=_LOOK)(inspect.audit)
app.command(short_help="Show or create a job's Kafka topics.", rich_help_panel=_LOOK)(inspect.topics)
app.add_typer(versions_app, name="versions", rich_help_panel=_LOOK)
app.command(short_help="Write the model as safetensors, ONNX or torch.export.", rich_help_panel=_LOOK)(runs.export)

app.command(short_help="Run the parameter server of a job.", rich_help_panel=_ROLES)(roles.ps)
app.command(short_help="Run worker n of a job.", rich_help_panel=_ROLES)(roles.worker)
app.command(short_help="Send a job's source to its topic.", rich_help_panel=_ROLES)(roles.produce)
app.command(short_help="Measure the held-out error of a job.", rich_help_panel=_ROLES)(roles.evaluate)
app.command(short_help="Answer requests with a job's model.", rich_help_panel=_ROLES)(serve)
app.command(short_help="Serve a job's metrics to Prometheus.", rich_help_panel=_ROLES)(roles.prometheus)
app.command(short_help="Query the health probe of a process.", rich_help_panel=_ROLES)(roles.health)

app.command(short_help="Plan spot and on-demand workers, cost and risk.", rich_help_panel=_MONEY)(plan)
app.command(short_help="Estimate what doll plan needs from a run.", rich_help_panel=_MONEY)(calibrate)
app.add_typer(
    provision_app, name="provision", short_help="Provision machines for a job's workers.", rich_help_panel=_MONEY
)
app.command(short_help="Run a whole job on a spot market on this machine.", rich_help_panel=_MONEY)(spot)
app.command(short_help="Backtest the planner on recorded markets.", rich_help_panel=_MONEY)(backtest)

app.command(short_help="Check what a job's roles must be able to do.", rich_help_panel=_EXAMINE)(doctor)
app.add_typer(dead_app, name="dead", rich_help_panel=_EXAMINE)
app.command(short_help="Inject faults into a job, then audit it.", rich_help_panel=_EXAMINE)(runs.drill)
app.command("replay", short_help="Make a version again from its event log.", rich_help_panel=_EXAMINE)(runs.replay_)
app.command(short_help="Run a job under several consistency policies.", rich_help_panel=_EXAMINE)(compare)
app.command(short_help="Simulate a whole job in virtual time.", rich_help_panel=_EXAMINE)(simulate)
app.command(short_help="Measure the layers of a model, for pipelines.", rich_help_panel=_EXAMINE)(profile)
