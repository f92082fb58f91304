"""The stream of the example synthetic: classes that all streams share, and that drift."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from doll.errors import ConfigError
from doll.producers import sources
from examples.synthetic import source as synthetic
from job_files import job


def _take(stream: Iterator[bytes], count: int) -> list[bytes]:
    return list(itertools.islice(stream, count))


def test_synthetic_streams_share_the_classes_and_differ_in_draws() -> None:
    config = job(
        name="t",
        workers=3,
        text="source: {kind: python, of: examples.synthetic.source:gaussians, args: {features: 5, classes: 3}}",
    )
    rows = [
        np.frombuffer(b"".join(_take(stream, 6000)), "<f4").reshape(-1, 6)
        for stream in sources.open_streams(config, [0, 0, 0])
    ]
    means = [[part[part[:, -1] == c, :-1].mean(axis=0) for c in range(3)] for part in rows]
    np.testing.assert_allclose(means[0], means[1], atol=0.12)  # 2,000 samples a class: 0.022 a deviation
    np.testing.assert_allclose(np.linalg.norm(means[0], axis=1), synthetic.RADIUS, atol=0.12)
    assert not (rows[0] == rows[1]).any(axis=1).all()
    assert Counter(rows[0][:, -1].tolist()).keys() == {0.0, 1.0, 2.0}


def test_drift_moves_the_means_by_its_rate_at_a_constant_distance() -> None:
    planes = synthetic.class_planes(8, 2, np.random.default_rng(0))

    def mean_at(start: int) -> np.ndarray:
        records = _take(synthetic.samples(planes, 0.001, np.random.default_rng(1), start), 256)
        rows = np.frombuffer(b"".join(records), "<f4").reshape(-1, 9)
        return rows[rows[:, -1] == 0, :-1].mean(axis=0)

    # After 3,000 samples at 0.001 each, the mean has gone an arc of 3 = 1 radian: a chord of 2 x 3 x sin(1/2).
    assert np.linalg.norm(mean_at(3000) - mean_at(0)) == pytest.approx(2 * 3 * np.sin(0.5), abs=0.2)


def test_one_feature_can_drift_too() -> None:
    planes = synthetic.class_planes(1, 2, np.random.default_rng(0))
    rows = np.frombuffer(b"".join(_take(synthetic.samples(planes, 0.1, np.random.default_rng(1)), 512)), "<f4")
    assert np.isfinite(rows).all()


def test_arguments_out_of_range_are_refused() -> None:
    config = job(text="source: {kind: python, of: examples.synthetic.source:gaussians, args: {classes: 0}}")
    with pytest.raises(ConfigError, match=r"source.args: .* does not take .*features and classes above 0"):
        sources.open_streams(config, [0] * config.data.num_partitions)
