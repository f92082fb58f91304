"""`doll.plan` and `doll.simulate` give what the commands of these names print."""

from __future__ import annotations

import json

import doll
import pytest
from doll.cli.app import app
from typer.testing import CliRunner


def test_a_plan_is_that_of_the_command() -> None:
    assessment = doll.plan("digits", deadline_s=240, instance="c7g.large", region="eu-west-1")
    arguments = ["plan", "digits", "--instance", "c7g.large", "--region", "eu-west-1", "--deadline", "4m", "--json"]
    printed = json.loads(CliRunner().invoke(app, arguments).stdout)
    figures = {key: value for key, value in assessment.to_dict().items() if isinstance(value, float | int)}
    assert {key: printed[key] for key in figures} == pytest.approx(figures, nan_ok=True)
    assert assessment.num_spot > 0


def test_a_simulation_is_repeated_by_its_seed_and_counts_its_updates() -> None:
    summaries = [doll.simulate("digits", updates=50, spot=2, seed=seed).to_dict() for seed in (1, 1, 2)]
    assert summaries[0] == summaries[1] != summaries[2]
    assert summaries[0]["updates"] == 50


def test_goals_that_are_none_and_spot_workers_that_are_not_there_are_refused() -> None:
    with pytest.raises(doll.ConfigError, match=r"expected keys of the plan section .* got \['deadline'\]"):
        doll.plan("digits", deadline=240)
    with pytest.raises(doll.ConfigError, match=r"spot: expected 0 to 4"):
        doll.simulate("digits", spot=5)
