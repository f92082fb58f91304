"""`doll compare`: runs one job under several policies."""

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
            help="Policies to compare; options follow a name after colons [default: all registered policies].",
        ),
    ] = None,
    loss: Annotated[
        float | None,
        typer.Option(
            help="Target loss: a run ends when its held-out loss reaches it [default: stop.loss of the job, otherwise "
            "the lowest loss that every policy reached]."
        ),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Simulate in virtual time: no services, no loss (needs doll-lab).")
    ] = False,
    seeds: Annotated[
        int,
        typer.Option(
            min=1, max=20, help="Runs of each policy, with the job's seed and the next ones: 3 tell noise apart."
        ),
    ] = 1,
    service: options.ServiceOption = None,
    runs_folder: options.RunsFolderOption = Path("runs"),
    page: options.PageOption = True,
    as_json: options.JsonOption = False,
) -> None:
    """Run one job under several consistency policies, one after the other, and compare the runs.

    Each policy is a complete run of doll up, with the same samples at the same times and the same seed. For each
    policy, a table shows the time and the number of samples to the target loss, the bytes sent, the staleness of the
    weights, the time for which workers were blocked, and the cost (plan.on_demand_usd_per_h). The command prints the
    folder that contains comparison.html, comparison.json and the run folder of each policy. It also prints the address
    of a page that shows the runs side by side; afterwards doll dashboard FOLDER serves this page.

    Write the options of a policy after its name, as in --policies doll:group_size=8,bsp,asp. The policy of the job file
    keeps the options of the job file. Set stop.samples, so that all policies learn the same part of the stream.

    Staleness is the number of the newest batch of another worker in the weights, minus the number of the batch that is
    computed with these weights: -1 under bsp; a smaller number means staler weights. In 99 % of the reads the weights
    are not staler than p99. The share says how many of the reads count: 100 %, unless some were of versions that are
    too old to be compared. Blocked is the share of the workers' time in which they had a complete batch, were idle, and
    had no grant.

    The last sentence says which policy was best by accuracy (by loss if the task has no accuracy), by time, by bytes
    and by cost. With --seeds 3, each policy runs with seeds s, s + 1 and s + 2 (s is the job's seed), the table shows
    means and their standard errors, and a difference is called more than noise if the mean of the differences, seed by
    seed, is beyond t of its standard errors (Student's t at 5 %; 4.3 for 3 seeds). With one seed, noise is not known.

    Ctrl-C ends the current run in order, and the command shows the completed runs. Exit code 0: every run ended by its
    stop rule and passed its audit. Otherwise, the exit code of the first run that did not.

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
            rates_per_s=options.StreamOptions().rates_per_s, repetitions=seeds,
        )  # fmt: skip
    else:
        comparison, code = compare_live(
            job_file, overrides, choices, runs_folder, loss=loss, say=_say, page=page, repetitions=seeds
        )  # fmt: skip
    emit(as_json, comparison.to_dict(), comparison.text())
    raise typer.Exit(code)


def _say(line: str) -> None:
    sys.stderr.write(f"compare: {line}\n")
    sys.stderr.flush()
