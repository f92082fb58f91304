"""doll plan and doll calibrate: answers, exit codes, and how long a plan takes to import."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from doll.cli.app import app
from doll.theory.fitting import Decay
from typer.testing import CliRunner

PAPER = ["plan", "-N", "64", "--rate", "125", "-K", "20", "-b", "256", "-J", "10000", "--alpha", "0.9",
         "--cycle", "1000", "--spot-price", "0.158", "--on-demand-price", "0.286"]  # fmt: skip
JOB = """\
job: pilot
task: {class: "examples.synthetic.task:Synthetic"}
data: {workers: 4, batch_size: 32}
arrivals: {rate_per_s: [50, 100, 150, 200]}
training: {policy: {group_size: 4}, optimizer: {name: sgd, lr: 0.1, momentum: 0.9}}
plan: {spot_usd_per_h: 0.1, on_demand_usd_per_h: 0.3}
"""


def run(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(args))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def run_json(*args: str) -> tuple[int, dict[str, object]]:
    code, out, _ = run(*args, "--json")
    return code, json.loads(out)


def test_the_papers_job() -> None:
    code, content = run_json(*PAPER, "--deadline", "112m")
    assert code == 0
    assert (content["feasible"], content["binding"], content["num_spot"]) == (True, "deadline", 30)
    assert content["savings"] == pytest.approx(1 - 0.8019, abs=5e-5)
    assert content["cost_ratio_bounds"][0] == pytest.approx(0.7986, abs=5e-5)  # type: ignore[index]
    assert content["static"]["miss_prob"] == pytest.approx(0.42, abs=0.05)  # type: ignore[index]
    assert content["adaptive"]["miss_prob"] < 1e-6  # type: ignore[index]


def test_an_example_is_planned_without_prices_by_hand() -> None:
    """From the shipped table, and with what runs beside the workers."""
    code, out, _ = run("plan", "digits")
    assert code == 0
    assert "c7g.large in us-east-1, prices of early 2026 from the table that ships with DOLL" in out
    assert re.search(r"Kafka on three machines +0\.0094 USD +0\.17 USD/h, table", out)
    assert re.search(r"sum +[\d.]+ USD, without egress and storage", out)
    code, content = run_json("plan", "digits", "--instance", "c7g.large", "--region", "eu-west-1", "--stack", "msk")
    assert code == 0
    assert content["worker_prices"] == {"spot_usd_per_h": 0.0407, "on_demand_usd_per_h": 0.0775}
    assert content["stack"]["kind"] == "msk"  # type: ignore[index]
    assert "Costs for" not in run("plan", "digits", "--stack", "none")[1]
    assert "Costs for" not in run("plan", "market")[1], "nothing of a replayed market runs on AWS"


def test_a_machine_without_a_price_and_prices_from_two_places_are_refused() -> None:
    code, _, err = run("plan", "digits", "--instance", "m9.huge")
    assert code == 2
    assert "expected one of c5.xlarge, c7g.2xlarge, c7g.large" in err
    code, _, err = run("plan", "digits", "--region", "eu-west-1", "--spot-price", "0.1")
    assert code == 2
    assert "got some of both" in err


def test_people_read_digits_that_mean_something_and_programs_all() -> None:
    _, out, _ = run(*PAPER, "--deadline", "112m")
    assert "  cost    26.09 +- 0.04 USD, 19.8% saved of 32.54 USD on-demand" in out
    assert "  finish  1:51:55 +- 0:00:29 h, deadline 1:52:00 h" in out
    _, content = run_json(*PAPER, "--deadline", "112m")
    assert content["static"]["expected_cost_usd"] == pytest.approx(26.0943, abs=5e-5)  # type: ignore[index]


def test_text_names_streams_reasons_and_margin() -> None:
    code, out, _ = run("plan", "--rate", "10,400,20,30", "-K", "4", "-b", "32", "-J", "1000", "--deadline", "295",
                       "--spot-price", "0.1", "--on-demand-price", "0.3", "--service", "50ms")  # fmt: skip
    assert code == 0
    assert "spot: streams 0, 2-3 (10 .. 30 samples/s); among the slowest" in out
    assert "on-demand: streams 1 (400 samples/s); its outages would make" in out
    assert "P(late)" in out
    assert "Stability: stable" in out


def test_infeasible_deadline_exits_3_and_says_what_would_do() -> None:
    code, content = run_json(*PAPER, "--deadline", "6000")
    assert code == 3
    assert (content["feasible"], content["binding"], content["num_spot"]) == (False, "deadline", 0)
    assert content["nearest"]["deadline_s"] == pytest.approx(6400)  # type: ignore[index]
    assert content["adaptive"] is None


def test_infeasible_budget_names_a_deadline_that_would_do() -> None:
    code, content = run_json(*PAPER, "--deadline", "6720", "--budget", "22")
    assert code == 3
    assert content["binding"] == "budget"
    later = content["nearest"]["deadline_s"]  # type: ignore[index]
    code, content = run_json(*PAPER, "--deadline", str(later), "--budget", "22")
    assert code == 0


def test_risk_takes_workers_off_spot() -> None:
    _, content = run_json(*PAPER, "--deadline", "6720", "--risk", "0.05")
    assert (content["num_spot"], content["binding"]) == (26, "risk")


def test_unstable_system_gets_advice() -> None:
    _, content = run_json(*PAPER, "--deadline", "6720", "--service", "0.2")
    assert content["stability"]["verdict"] == "unstable"  # type: ignore[index]
    assert "raise b to at least 1601" in " ".join(content["advice"])  # type: ignore[arg-type]


def test_plot(tmp_path: Path) -> None:
    code, _, _ = run(*PAPER, "--deadline", "6720", "--plot", str(tmp_path / "plan.html"))
    assert code == 0
    text = (tmp_path / "plan.html").read_text()
    assert "64 workers, J = 10000, availability 0.9, deadline 6720 s" in text
    assert text.count('"y_label"') == 2, "cost and risk"
    code, _, err = run(*PAPER, "--plot", str(tmp_path / "plan.html" / "plan.html"))
    assert code == 2
    assert "cannot write" in err
    code, _, err = run(*PAPER, "--plot", str(tmp_path / "plan.png"))
    assert (code, "expected a name that ends with .html, got plan.png" in err) == (2, True)


def test_without_j_it_says_how_to_measure_it(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    code, _, err = run("plan", str(job))
    assert code == 2
    assert "doll calibrate" in err
    code, out, _ = run("plan", str(job), "-J", "100", "--set", "plan.deadline_s=200")
    assert code == 0
    assert "spot 4 of 4" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["plan", "-J", "10"], "--rate"),
        (["plan", "--rate", "1,x"], "--rate: expected numbers"),
        (["plan", "--rate", "1,2", "-N", "3"], "one for each of 3 workers"),
        (["plan", "--rate", "1", "-J", "10"], "--group-size"),
        ([*PAPER, "--deadline", "soon"], "expected a time such as 5400, 90m, 1.5h or 1h30m, got 'soon'"),
        ([*PAPER, "--risk", "0.9"], "plan.risk"),
        ([*PAPER, "--set", "a=b"], "--set: expected a job file"),
    ],
)
def test_wrong_usage_is_named(args: list[str], message: str) -> None:
    code, _, err = run(*args)
    assert code == 2
    assert message in " ".join(err.replace("│", " ").split())


def test_plan_imports_no_torch_and_no_scipy() -> None:
    code = (
        "import sys; from doll.cli import main; sys.argv[0] = 'doll'\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'scipy', 'sklearn', 'faust', 'matplotlib') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code, *PAPER], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


def pilot(folder: Path, updates: int = 300, noise: float = 0.05) -> Path:
    """A run folder as `doll up` leaves it, with a known error curve."""
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text(JOB)
    rng = np.random.default_rng(0)
    curve = Decay(0.985, 0.85, 0.01)
    lines = ["time_s,term,version,n_samples,samples_total,batches,mean_service_s,void"]
    lines += [
        f"{1000 + j * 0.256:.3f},1,{j},128,{128 * j},4,{0.02 + 0.002 * rng.normal():.6f},0" for j in range(1, updates)
    ]
    lines.insert(2, "1000.1,1,1,128,128,4,99.0,1")  # taken back by a restart: not to be counted
    (folder / "updates.csv").write_text("\n".join(lines) + "\n")
    lines = ["time_s,term,version,loss,accuracy,void"]
    lines += [
        f"{1000 + j * 0.256:.3f},1,{j},1.0,{1 - float(curve.error(j)) * np.exp(noise * rng.normal()):.6f},0"
        for j in range(5, updates, 5)
    ]
    (folder / "evaluations.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_calibrate_finds_the_constants(tmp_path: Path) -> None:
    run_folder = pilot(tmp_path / "pilot-20260101-000000")
    true = Decay(0.985, 0.85, 0.01).updates_to(0.03)
    code, content = run_json("calibrate", str(run_folder), "--target-error", "0.03")
    assert code == 0
    wanted = content["updates_to_target"]
    assert wanted["point"] == pytest.approx(true, rel=0.1)  # type: ignore[index]
    assert wanted["low"] <= true <= wanted["high"]  # type: ignore[index]
    assert content["service_s"] == pytest.approx(0.02, rel=0.05)
    assert content["total_rate_per_s"] == pytest.approx(500, rel=0.01)
    # η = 0.1 / (1 - 0.9) = 1, so c = 1 - ρ.
    assert content["noise"]["convexity"] == pytest.approx(0.015, rel=0.2)  # type: ignore[index]
    code, out, _ = run("calibrate", str(tmp_path / "pilot-20260101-000000"))
    assert "give --target-error" in out


def test_plan_takes_j_from_a_pilot(tmp_path: Path) -> None:
    folder = pilot(tmp_path / "runs" / "pilot-20260101-000000")
    code, content = run_json("plan", str(folder), "--pilot", str(folder), "--target-error", "0.03", "--deadline", "100")
    assert code == 0
    assert content["updates"] == pytest.approx(Decay(0.985, 0.85, 0.01).updates_to(0.03), rel=0.1)
    assert content["stability"]["sufficient"] == pytest.approx(32 / 500 / 0.02, rel=0.05)  # type: ignore[index]
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    code, named = run_json("calibrate", str(job), "--parent-folder", str(tmp_path / "runs"), "--target-error", "0.03")
    assert code == 0
    assert named["run"].endswith("pilot-20260101-000000")  # type: ignore[attr-defined]


def test_calibrate_says_when_the_pilot_is_too_short_or_the_target_too_low(tmp_path: Path) -> None:
    short = pilot(tmp_path / "short", updates=40)
    code, out, _ = run("calibrate", str(short))
    assert code == 0
    assert "12 are needed" in out
    long = pilot(tmp_path / "long", updates=800, noise=0.01)
    code, _, err = run("calibrate", str(long), "--target-error", "0.001")
    assert code == 3
    assert "noise floor" in err
    code, _, err = run("calibrate", str(tmp_path / "nothing.yaml"))
    assert code == 2
