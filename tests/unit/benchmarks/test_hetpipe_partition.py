"""The script of the partition: a partitioner that is wrong or slow fails a check."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.paper import hetpipe_partition
from benchmarks.paper.harness import Check
from benchmarks.paper.hetpipe_partition import Answers


def failed(checks: list[Check]) -> list[str]:
    return [check.what for check in checks if not check.is_expected]


def test_a_partitioner_that_is_wrong_or_slow_fails_a_check() -> None:
    right = [Answers(2.0, 2.0, 2.0 + 1e-9, 3.0, 4, 2), Answers(None, None, None, None, 4, 2)]
    times = [[0.3, 0.2, 1.2]] * 4
    assert failed(hetpipe_partition.checks_of(right, times)) == []
    assert len(failed(hetpipe_partition.checks_of(right, [[0.3, 1.2, 1.2], *times[1:]]))) == 1
    for wrong in (
        replace(right[0], ours=2.1), replace(right[0], programme=1.9), replace(right[0], ours=None),
        replace(right[1], ours=2.0), replace(right[1], programme=2.0),
    ):  # fmt: skip
        assert failed(hetpipe_partition.checks_of([*right, wrong], times))
    assert failed(hetpipe_partition.checks_of([replace(right[0], furthest=2.0), right[1]], times)) == [
        "control: each stage as many layers as it can, wrong in"
    ]
