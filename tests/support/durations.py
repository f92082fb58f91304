"""Which tests take long, measured: `make test-durations` writes the list that `make test-fast` leaves out.

The list names test functions, with the seconds of all their cases together, as wall-clock time: a test that waits is as
slow as one that computes. It is measured on one machine and read on all of them, so that a loaded machine changes
nothing about which tests run.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from paths import ROOT

LIST = ROOT / "tests" / "slow_tests.txt"
SLOW_S = 0.5  # of all cases of a function together

HEADER = f"""\
# Test functions that took {SLOW_S} s or more, all cases together. `make test-fast` leaves them out.
# Written by `make test-durations`: run it on a quiet machine.
"""


@cache
def measured_s() -> dict[str, float]:
    """Test function, as `path::name` -> the seconds of all its cases."""
    lines = LIST.read_text(encoding="utf-8").splitlines() if LIST.exists() else []
    pairs = (line.split() for line in lines if line and not line.startswith("#"))
    return {name: float(seconds) for seconds, name in pairs}


def function_of(nodeid: str) -> str:
    """`path::name` of a test's id, without its parameters."""
    return nodeid.partition("[")[0]


class WriteSlowTests:
    """Adds up how long each test function takes, and writes the list at the end (`--write-slow-tests`)."""

    def __init__(self, path: Path = LIST) -> None:
        self._path = path
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[function_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        slow = sorted(name for name, seconds in self._seconds.items() if seconds >= SLOW_S)
        lines = (f"{self._seconds[name]:.1f} {name}\n" for name in slow)
        self._path.write_text(HEADER + "".join(lines), encoding="utf-8")
