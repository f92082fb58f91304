"""`doll compare`: one job under several policies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from doll import extensions
from doll.cli import options
from doll.cli.output import emit


def compare(
    job: options.JobOptions,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE...][,...]",
            help="Policies, each with its options after colons [default: every registered policy].",
        ),
    ] = None,
    loss: Annotated[
        float | None,
        typer.Option(
            help="Loss to reach; a run ends when its held-out loss has [default: stop.loss of the job; else the best "
            "that every policy reached]."
        ),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="In virtual time, without services and a loss; takes seconds (doll-lab).")
    ] = False,
    service: options.ServiceOption = None,
    runs_folder: options.RunsFolderOption = Path("runs"),
    page: options.PageOption = True,
    as_json: options.JsonOption = False,
) -> None:
    """Run one job under several consistency policies, in turn on the same stream, and compare them.

    Each policy is a whole doll up: the same samples, at the same times, from the same seed. A table shows for each
    how long and how many samples it took to the loss, the bytes that it sent, how stale its weights were, how long
    workers were blocked, and what it cost (plan.on_demand_usd_per_h). comparison.html and comparison.json are in the
    folder that it prints, with the run folder of each policy. It also prints the address of a page that shows the
    runs side by side; later doll dashboard FOLDER does.

    Options of a policy follow its name, as in --policies doll:group_size=8,bsp,asp. The policy that the job file names
    keeps its options there. Give the job a limit in samples, so that all learn from the same part of the stream.

    Staleness is the newest batch of another worker in the weights, minus the number of the batch that is computed on
    them: -1 under bsp, less is staler. 99 % of the reads are not staler than p99. Blocked: the share of the
    workers' time for which they had a complete batch, were idle and had no grant.

    Ctrl-C ends the run under way in order, and shows what has run. Exit code 0: every run ended by its stop rule, with
    a good audit; else that of the first that did not.

    Example: doll compare digits --policies doll,bsp,asp --set stop.samples=20000
    """
    from doll.run.local.compare import compare_live
    from doll.run.policy_choice import parse_choices

    job_file = job.target().path
    overrides = job.overrides or []
    choices = parse_choices(policies or [])
    if simulate:
        compare_simulated = extensions.need(extensions.SIMULATIONS, "comparison", "doll compare --simulate")
        comparison, code = compare_simulated(
            job_file, overrides, choices, service_s=service, say=_say,
            rates_per_s=options.StreamOptions().rates_per_s,
        )  # fmt: skip
    else:
        comparison, code = compare_live(
            job_file, overrides, choices, runs_folder, loss=loss, say=_say, page=page
        )  # fmt: skip
    emit(as_json, comparison.to_dict(), comparison.text())
    raise typer.Exit(code)


def _say(line: str) -> None:
    sys.stderr.write(f"compare: {line}\n")
    sys.stderr.flush()
