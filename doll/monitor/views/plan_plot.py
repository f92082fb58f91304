"""A plot of expected cost and risk over the number of workers on spot."""

from __future__ import annotations

from pathlib import Path

from doll.process.files import refuse_unwritable
from doll.provisioner.planning.assessment import Assessment, risk_curve

_COST, _RISK, _CHOICE = "#4c78a8", "#e45756", "#333333"


def draw(assessment: Assessment, path: Path) -> None:
    """Write the plot to `path` as a PNG.

    Raises:
        ConfigError: it cannot be written.
    """
    from doll.process.figures import new_figure

    costs, misses = risk_curve(assessment.request)
    spot = range(len(costs))
    figure = new_figure(8, 4.5, dpi=120)
    cost_axes = figure.add_subplot()
    cost_axes.plot(spot, costs / assessment.all_on_demand_usd * 100, color=_COST, marker=".")
    cost_axes.set(xlabel="workers on spot, slowest streams first", ylabel="expected cost, % of all on-demand")
    cost_axes.yaxis.label.set_color(_COST)
    cost_axes.axvline(assessment.num_spot, color=_CHOICE, linestyle="--", linewidth=1)
    cost_axes.annotate(f" plan: {assessment.num_spot}", (assessment.num_spot, 0.02), xycoords=("data", "axes fraction"))
    if assessment.request.deadline_s is not None:
        risk_axes = cost_axes.twinx()
        risk_axes.plot(spot, misses, color=_RISK)
        risk_axes.set(ylabel="P(late), if the mix is kept", ylim=(-0.02, 1.02))
        risk_axes.yaxis.label.set_color(_RISK)
    request = assessment.request
    limit = f", deadline {request.deadline_s:g} s" if request.deadline_s else ""
    cost_axes.set_title(
        f"{request.num_workers} workers, J = {request.updates:g}, availability {request.alpha:g}{limit}"
    )
    with refuse_unwritable(path):
        figure.savefig(path, format="png")
