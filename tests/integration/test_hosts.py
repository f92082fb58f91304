"""A job whose server, worker, Kafka and Redis are on hosts of their own, 20 ms apart with losses, heals from a cut."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.hosts.faults import make_plan
from benchmarks.hosts.network import why_not
from doll.local import kafka_jars

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=f"no hosts: {why_not()}"),
    pytest.mark.skipif(kafka_jars.unavailable_reason() is not None, reason=str(kafka_jars.unavailable_reason())),
]

SEED = 3


def test_a_job_on_five_hosts_heals_from_a_cut(tmp_path: Path) -> None:
    (fault,) = make_plan(1, SEED, ("server", "worker-0"))
    assert fault.services
    assert fault.hold_s > 2
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.hosts", "--policies", "doll", "--workers", "1", "--batch-s", "0.02"),
            *("--links", "20 ms, 0.1 %", "--faults", "1", "--seed", str(SEED), "--json", str(figures)),
            *("--keep", str(tmp_path / "run")),
        ],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(figures.read_text())
    assert result["audit"]["ok"]
    assert ", 0 missing, 0 twice, 0 dead-lettered" in result["audit"]["summary"]
    assert int(result["audit"]["summary"].split(" offsets produced, ")[1].split(" ")[0]) > 0
    (line,) = result["faults"]
    assert line["recovery_s"] < 60
