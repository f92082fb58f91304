"""`doll calibrate`: J(ε) with its interval, rates, service time and noise constants, from a run that was made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from doll.cli.options import JsonOption
from doll.cli.output import emit

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.monitor.calibration import Calibration, Measure


def calibrate(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|JOB.yaml", help="Folder of a run, or a job file: then its newest run.", show_default=False
        ),
    ],
    target_error: Annotated[
        float | None, typer.Option(help="Error to reach [default: the job's plan or stop section].", show_default=False)
    ] = None,
    measure: Annotated[
        str | None, typer.Option(help="error_rate (1 - accuracy) or loss [default: plan.measure].", show_default=False)
    ] = None,
    runs_folder: Annotated[Path, typer.Option(help="Where runs of a job file are looked for.")] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Estimate what `doll plan` needs to know: J, the updates to the error target, and a gradient's time.

    Fits beta * rho^J + gamma (Eq. 10) to the held-out error of a run that has at least a dozen evaluations.

    Example: doll calibrate runs/digits-20260101-120000 --target-error 0.03
    """
    from doll.cli.errors import usage

    if measure not in (None, "error_rate", "loss"):
        raise usage(f"--measure: expected error_rate or loss, got {measure!r}")
    folder = run if run.is_dir() else _newest(run, runs_folder)
    found = calibrate_run(folder, measure, target_error)  # type: ignore[arg-type]  # checked above
    emit(as_json, {"run": str(folder), **found.to_dict()}, text(found, folder))


def calibrate_run(folder: Path, measure: Measure | None, target_error: float | None) -> Calibration:
    """Constants of the run in `folder`.

    Args:
        measure: None for what the job says.
        target_error: None for what the job says, if it does.

    Raises:
        ConfigError: no run is there, or it left no updates.
        InfeasiblePlanError: the fitted noise floor is above the target and the run did not reach it.
    """
    import numpy as np

    from doll.errors import ConfigError
    from doll.monitor.calibration import calibrate as estimate
    from doll.monitor.csv_file import read_rows
    from doll.run.target import open_target

    config = open_target(folder, []).config
    try:
        updates, evaluations = (read_rows(folder / f"{name}.csv") for name in ("updates", "evaluations"))
    except OSError as error:
        raise ConfigError(
            f"{folder}: expected the folder of a run with updates.csv and evaluations.csv: {error}"
        ) from error
    if not updates:
        raise ConfigError(f"{folder / 'updates.csv'}: no updates in it: let the pilot run longer")
    chosen = measure or _measure(config)
    return estimate(
        updates,
        evaluations,
        group_size=config.group_size,
        batch_size=config.data.batch_size,
        measure=chosen,
        target_error=target_error if target_error is not None else _target(config, chosen),
        step_size=_step_size(config),
        # The same run gives the same interval.
        rng=np.random.default_rng(config.seed),
    )


def text(found: Calibration, folder: Path) -> str:
    """The constants for people."""
    lines = [f"{folder}"]
    fit = found.fit
    if found.updates_to_target is not None:
        updates_to_target = found.updates_to_target
        how = f"reached at update {found.reached_at:g}" if found.reached_at is not None else "extrapolated from the fit"
        lines.append(
            f"J        {updates_to_target.point:g} updates to {found.measure} {found.target_error:g} "
            f"(90 % interval {updates_to_target.low:g} .. {updates_to_target.high:g}); {how}"
        )
        if fit is not None and found.reached_at is None and updates_to_target.point > 2 * fit.last_update:
            lines.append(
                f"         beyond twice the run's {fit.last_update:g} updates: a longer pilot would tell better"
            )
    elif found.target_error is None:
        lines.append("J        give --target-error to learn the updates that it takes")
    if fit is not None:
        lines += [
            f"curve    {fit.curve.beta:.4g} * {fit.curve.rho:.6g}^J + {fit.curve.gamma:.4g} from update "
            f"{fit.first_update:g} on ({fit.num_points} evaluations, relative error {fit.relative_rmse:.1%})",
            f"         rho {fit.rho.low:.6g} .. {fit.rho.high:.6g}, "
            f"noise floor {fit.gamma.low:.4g} .. {fit.gamma.high:.4g}",
        ]
    else:
        lines.append(f"curve    none: {found.no_fit_reason}")
    lines += [
        f"service  {found.service_s:.4g} +- {found.service_sd_s:.2g} s for one batch's gradient (plan.service_s)",
        f"rates    {found.update_rate_per_s:.4g} updates/s, {found.total_rate_per_s:.5g} samples/s of all streams",
    ]
    if found.stability is not None:
        lines.append(
            f"margin   {found.stability.sufficient:.3g} (sufficient form), {found.stability.necessary:.3g} "
            f"(necessary form): {found.stability.verdict}"
        )
    if found.noise is not None:
        lines.append(
            f"noise    c = {found.noise.convexity:.4g}, L B = {found.noise.smoothness_times_variance:.4g}, "
            f"at most {found.noise.smoothness_times_variance_high:.4g} (of the fitted curve)"
        )
    lines.append("The interval is that of this run's curve; another seed, stream or model needs its own pilot.")
    return "\n".join(lines)


def _newest(job: Path, runs_folder: Path) -> Path:
    """The newest run of the job file."""
    from doll.errors import ConfigError
    from doll.run.target import open_target

    name = open_target(job, []).config.job
    found = [path.parent for path in runs_folder.glob(f"{name}-*/updates.csv")]
    if not found:
        raise ConfigError(f"no run of {name} in {runs_folder}: make a pilot run with: doll up {job}")
    return max(found, key=lambda path: path.name)


def _measure(config: JobConfig) -> Measure:
    if config.plan.target_error is None and config.stop.accuracy is None and config.stop.loss is not None:
        return "loss"
    return config.plan.measure


def _target(config: JobConfig, measure: Measure) -> float | None:
    if config.plan.target_error is not None and config.plan.measure == measure:
        return config.plan.target_error
    if measure == "error_rate":
        accuracy = config.stop.accuracy
        return None if accuracy is None or accuracy >= 1 else 1 - accuracy
    return config.stop.loss


def _step_size(config: JobConfig) -> float | None:
    optimizer = config.training.optimizer
    if optimizer.name != "sgd" or config.training.reduction != "mean":
        return None
    return optimizer.lr / (1 - optimizer.momentum)
