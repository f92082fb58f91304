"""What a fault costs, measured within its own run: a machine that becomes slower has lost nothing by faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.faults import kept_within, losses, table

pytestmark = pytest.mark.slow  # loads torch


def run(path: Path, dark_s: dict[int, float], *, slower: float = 0.0) -> tuple[Path, list[dict[str, object]]]:
    """Ten updates a second of 100 samples; after fault n the job is dark for `dark_s[n]` of its 20 s."""
    lines = ["time_s,n_samples,void"]
    for tenth in range(1, 1000):
        at_s = tenth / 10
        fault, since_s = divmod(at_s, 20)
        if since_s > dark_s.get(int(fault), 0.0):
            lines.append(f"{1000 + at_s},{100 * (1 - slower * fault):.0f},0")
            lines.append(f"{1000 + at_s},7,1")  # void
    path.write_text("\n".join(lines))
    roles = ["ps", "worker-0", "worker-3", "kafka", "ps"]
    return path, [{"time_s": 1000.0 + 20 * number, "role": role} for number, role in enumerate(roles)]


@pytest.mark.parametrize("slower", [0.0, 0.1])
def test_a_fault_costs_the_seconds_in_which_the_job_stood(tmp_path: Path, slower: float) -> None:
    lost = losses(*run(tmp_path / "updates.csv", {0: 4.0, 2: 1.0, 3: 8.0}, slower=slower))
    assert lost == {
        "ps": [pytest.approx(4.0, abs=0.3)],
        "worker": [pytest.approx(0.0, abs=0.3), pytest.approx(1.0, abs=0.3)],
        "kafka": [pytest.approx(8.0, abs=0.3)],
    }
    assert kept_within(lost, 20) == pytest.approx(1 - 13 / 80, abs=0.02)
    lines = table(lost, 20).splitlines()
    assert [line.split()[0] for line in lines] == ["kafka", "ps", "worker"]
    assert lines[0].endswith("kept  60.1%")
