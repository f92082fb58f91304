"""Functions beside machines: what they cost, and up to which run time they cost less."""

from __future__ import annotations

import math

import pytest
from doll.cli.app import app
from doll.provisioner.planning.functions import wins_until_s
from typer.testing import CliRunner


@pytest.mark.parametrize("function_usd_per_h", [0.05, 0.1, 0.104, 0.12, 0.3])
@pytest.mark.parametrize("start_s", [1.0, 10.0, 30.0])
@pytest.mark.parametrize("boot_s", [0.0, 60.0, 600.0])
def test_the_limit_is_where_the_costs_cross(function_usd_per_h: float, start_s: float, boot_s: float) -> None:
    """By comparison with the costs of many run times."""
    machine_usd_per_h, limit_s = 0.1, 900.0

    def wins(run_s: float) -> bool:
        invocations = max(1, math.ceil(run_s / (limit_s - start_s)))
        return function_usd_per_h * (run_s + invocations * start_s) < machine_usd_per_h * (run_s + boot_s)

    until_s = wins_until_s(function_usd_per_h, machine_usd_per_h, start_s=start_s, limit_s=limit_s, boot_s=boot_s)
    runs = [1.0 + 7.0 * number for number in range(20_000)]
    first_loss_s = next((run_s for run_s in runs if not wins(run_s)), math.inf)
    if until_s > runs[-1]:
        assert math.isinf(first_loss_s)
    else:
        assert until_s - 1e-6 <= first_loss_s <= until_s + 8.0


def test_a_plan_says_what_functions_cost() -> None:
    options = (
        "-N 4 --rate 125 -K 4 -b 32 -J 700 --alpha 0.9 --spot-price 0.03 --on-demand-price 0.1 --functions-mb 1769"
    )
    result = CliRunner().invoke(app, ["plan", *options.split(), "--functions-mb", "1769"])
    assert result.exit_code == 0, result.output
    assert "In functions of 1769 MB at 0.1037 USD/h" in result.output
    assert "they cost less than on-demand for runs of up to" in result.output
