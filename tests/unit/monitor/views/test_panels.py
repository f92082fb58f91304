"""What charts are made of."""

import math

import numpy as np
import pytest
from doll.monitor.views.panels import line, moving_mean, panel, staleness_panel


def test_moving_mean_weighs_and_skips_the_unknown() -> None:
    values = np.array([1.0, math.nan, 4.0, 10.0])
    weights = np.array([1.0, 5.0, 3.0, 1.0])
    assert moving_mean(values, weights, 2).tolist() == [1.0, 1.0, 4.0, pytest.approx((12 + 10) / 4)]


def test_a_line_is_thinned_out_and_has_no_unknown_points() -> None:
    values = np.arange(10_000.0)
    values[:5] = math.nan
    curve = line("loss", np.arange(10_000) / 3, values)
    assert len(curve["x"]) == len(curve["y"]) <= 2_000
    assert (curve["x"][0], curve["y"][0]) == (1.66667, 5.0)


def test_the_staleness_of_a_run_is_a_panel() -> None:
    (curve,) = staleness_panel({"reads": {-2: 1, 3: 3}}, bars=True)["lines"]
    assert curve == {"label": "reads", "x": [-2.0, 3.0], "y": [25.0, 75.0], "style": "bars"}


def test_panels_are_plain_values() -> None:
    assert panel("Spent", "hours", "USD") == {"title": "Spent", "x_label": "hours", "y_label": "USD", "lines": []}
