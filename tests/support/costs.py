"""The cost of each test: wall-clock time, and CPU time of its process and of all processes that this one has started.

`pytest --costs=FILE` appends a line for each test; `python tests/support/costs.py FILE` prints the sums by module.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="FILE", default="", help="append wall-clock and CPU time of each test to FILE")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    path = item.config.getoption("costs")
    if not path:
        return (yield)
    wall_s, cpu_s = time.monotonic(), _tree_cpu_s(os.getpid())
    result = yield
    cost = {
        "test": item.nodeid,
        "wall_s": round(time.monotonic() - wall_s, 3),
        "cpu_s": round(max(0.0, _tree_cpu_s(os.getpid()) - cpu_s), 3),
        "slow": item.get_closest_marker("slow") is not None,
    }
    with open(path, "a", encoding="utf-8") as file:  # one write for each line: other test processes append as well
        file.write(json.dumps(cost) + "\n")
    return result


def _tree_cpu_s(root: int) -> float:
    """CPU seconds of a process, of those below it that live, and of those that they have waited for."""
    children: dict[int, list[int]] = defaultdict(list)
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        pid = int(stat.parent.name)
        children[int(fields[1])].append(pid)
        ticks[pid] = sum(int(field) for field in fields[11:15])  # utime, stime, cutime, cstime
    total, below = 0, [root]
    while below:
        pid = below.pop()
        total += ticks.get(pid, 0)
        below += children[pid]
    return total / _TICKS_PER_S


def table(lines: list[str]) -> str:
    """The sums by module, those with most CPU time first."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for line in lines:
        cost = json.loads(line)
        row = sums[cost["test"].partition("::")[0]]
        for place, value in enumerate((1, cost["cpu_s"], cost["wall_s"])):
            row[place] += value
    rows = sorted(sums.items(), key=lambda item: -item[1][1])
    rows.append(("all", [sum(row[place] for _, row in rows) for place in range(3)]))
    return "\n".join(
        ["| module | tests | CPU (s) | wall (s) |", "|---|---|---|---|"]
        + [f"| {module} | {count:.0f} | {cpu_s:.1f} | {wall_s:.1f} |" for module, (count, cpu_s, wall_s) in rows]
    )


if __name__ == "__main__":
    sys.stdout.write(table(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()) + "\n")
