"""What pictures are made of."""

import math

import numpy as np
import pytest
from doll.monitor.views.plots import moving_mean, staleness_panel


def test_moving_mean_weighs_and_skips_the_unknown() -> None:
    values = np.array([1.0, math.nan, 4.0, 10.0])
    weights = np.array([1.0, 5.0, 3.0, 1.0])
    assert moving_mean(values, weights, 2).tolist() == [1.0, 1.0, 4.0, pytest.approx((12 + 10) / 4)]


def test_the_staleness_of_a_run_is_a_panel() -> None:
    (curve,) = staleness_panel({-2: 1, 3: 3}).curves
    assert (curve.x.tolist(), curve.y.tolist()) == ([-2.0, 3.0], [25.0, 75.0])
