"""The rows and the claims of the policies' runs, from runs that are given."""

from __future__ import annotations

import math

import pytest
from benchmarks.live.essp_factors import claims
from benchmarks.live.policies import Run, of_seeds, policy_section, read_run, table
from doll.config import load
from paths import EXAMPLES


def run_of(policy: str, seed: int, loss: float) -> Run:
    return Run(policy, seed, loss, 10, 320, {"-1": 99, "-4": 1}, -1.03, 1.0, 0.25, 1000, 2000)


@pytest.mark.parametrize("label", ["ssp", "essp:staleness=31", "essp:staleness=31:under_way=4"])
def test_a_label_is_a_section_of_the_job_file(label: str) -> None:
    policy = load(EXAMPLES / "digits" / "job.yaml", [f"training.policy={policy_section(label)}"]).training.policy
    name, *options = label.split(":")
    assert policy.name == name
    for key, value in (option.split("=") for option in options):
        assert getattr(policy, key) == int(value)


def test_the_spread_leaves_out_runs_that_have_diverged_and_names_them() -> None:
    assert of_seeds([1.0, 3.0, math.inf], 1) == "2.0 ± 1.4, 1 of 3 diverged"
    assert of_seeds([math.inf, math.inf], 1) == "2 of 2 diverged"
    (row,) = table("Rows", [run_of("ssp", seed, 0.5) for seed in range(2)]).rows
    assert row == ["ssp", "0.500 ± 0.000", "10", "320", "-1.03 ± 0.00", "-4", "100 %", "25 %", "1.0 kB", "2.0 kB"]


@pytest.mark.parametrize(
    ("diverged", "error", "samples", "loss"),
    [("", None, 320, 0.5), ("rose", "rose", 100, math.inf), ("", None, 100, None), ("", "no Kafka", 320, None)],
)
def test_a_run_that_ended_early_is_no_result(
    diverged: str, error: str | None, samples: int, loss: float | None
) -> None:
    staleness = {"histogram": {"-1": 3}, "mean": -1.0, "counted_share": 1.0}
    report = {
        "diverged": diverged, "error": error, "samples": samples, "updates": 10, "loss": None, "reason": "stopped",
        "stop": {"samples": 320}, "prequential": {"window_loss": 0.5 if not diverged else 1e30},
        "measures": {"staleness": staleness, "blocked_share": 0.2, "bytes": {"gradients": 1, "weights": 2}},
    }  # fmt: skip
    if loss is None:
        with pytest.raises(RuntimeError, match="ended early"):
            read_run("ssp", 0, report)
    else:
        assert read_run("ssp", 0, report).loss == loss


@pytest.mark.parametrize(
    ("ssp_high", "essp_high", "verdicts"),
    [
        (math.inf, 0.0105, ["reproduced", "reproduced", "reproduced"]),
        (0.06, 0.0112, ["reproduced", "reproduced", "not reproduced"]),
        (0.02, 0.0105, ["not reproduced", "reproduced", "reproduced"]),
        (0.0104, 0.0105, ["not reproduced", "not reproduced", "reproduced"]),
    ],
)
def test_a_claim_must_hold_for_each_seed(ssp_high: float, essp_high: float, verdicts: list[str]) -> None:
    losses = {"ssp": 0.01, "ssp:staleness=31": math.inf, "essp": 0.01, "essp:staleness=31": 0.01}
    last = losses | {"ssp:staleness=31": ssp_high, "essp:staleness=31": essp_high}
    runs = [run_of(policy, seed, loss) for seed in range(2) for policy, loss in (losses if seed else last).items()]
    assert [claim.verdict for claim in claims(runs)] == verdicts
    assert claims(runs[:2]) == [], "not all policies were run"
