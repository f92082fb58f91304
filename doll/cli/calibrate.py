"""`doll calibrate`: J(ε) with its interval, rates, service time and noise constants, from a run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from doll.cli.options import JsonOption
from doll.cli.output import emit


def calibrate(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|JOB.yaml", help="Folder of a run, or a job file: then its newest run.", show_default=False
        ),
    ],
    target_error: Annotated[
        float | None, typer.Option(help="Error target [default: the job's plan or stop section].", show_default=False)
    ] = None,
    measure: Annotated[
        str | None, typer.Option(help="error_rate (1 - accuracy) or loss [default: plan.measure].", show_default=False)
    ] = None,
    runs_folder: Annotated[Path, typer.Option("--parent-folder", help="Where to look for runs of a job file.")] = Path(
        "runs"
    ),
    as_json: JsonOption = False,
) -> None:
    """Estimate the inputs of `doll plan` from a run: J, the updates to the error target, and the service time.

    Fits beta * rho^J + gamma (Eq. 10) to the held-out error of a run that has at least a dozen evaluations.

    Example: doll calibrate runs/digits-20260101-120000 --target-error 0.03
    """
    from doll.monitor.state.pilot_run import calibrate_run

    if measure not in (None, "error_rate", "loss"):
        raise typer.BadParameter(f"--measure: expected error_rate or loss, got {measure!r}")
    folder = run if run.is_dir() else _newest(run, runs_folder)
    calibration = calibrate_run(folder, measure, target_error)  # type: ignore[arg-type]  # checked above
    emit(as_json, {"run": str(folder), **calibration.to_dict()}, f"{folder}\n{calibration.text()}")


def _newest(job: Path, runs_folder: Path) -> Path:
    """The newest run of the job file."""
    from doll.errors import ConfigError
    from doll.run.target import open_target

    name = open_target(job, []).config.job
    runs = [path.parent for path in runs_folder.glob(f"{name}-*/updates.csv")]
    if not runs:
        raise ConfigError(f"no run of {name} in {runs_folder}: make a pilot run with: doll up {job}")
    return max(runs, key=lambda path: path.name)
