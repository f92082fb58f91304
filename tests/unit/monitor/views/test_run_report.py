"""The report: its keys are a contract, its numbers come from the records."""

import json

import pytest
from doll.config import StopConfig, parse
from doll.ledger.balance import LedgerReport, Range
from doll.monitor.state.progress import ProgressModel
from doll.monitor.views.run_report import RunOutcome, build_report, summary
from doll.monitor.views.text import one_line
from doll.records.control import Member, Metric, TermStarted, Update
from statuses import server_status

JOB = """
job: digits
task: {class: 'examples.digits.task:Digits'}
data: {workers: 2, batch_size: 8}
source: {kind: python, of: examples.digits.task:samples}
arrivals: {process: poisson, rate_per_s: 40}
training: {policy: {name: doll, group_size: 2}}
stop: {updates: 40}
"""


def ledger(**changes: object) -> LedgerReport:
    empty: dict[str, object] = {
        "version": 40, "term": 1, "updates": 40, "unsaved": 0, "voided": 0, "produced": 700, "applied": 636,
        "pending": 60, "dead": 4, "gaps": 0, "missing": (), "twice": (), "gap_ranges": (), "partly_dead_samples": 0,
        "partitions": (), "problems": (),
    }  # fmt: skip
    return LedgerReport(**{**empty, **changes})  # type: ignore[arg-type]


@pytest.fixture
def model() -> ProgressModel:
    model = ProgressModel(parse(JOB), started_s=0.0)
    model.feed(TermStarted(term=1, resumed_version=0, origins=(0, 0), records_per_batch=8, time_s=0.0))
    for version in range(1, 41):
        members = tuple(
            Member(
                worker=n, partition=n, batch=version, lo=0, hi=8, n_samples=8, base_version=version - 1, compute_s=0.01
            )
            for n in range(2)
        )
        model.feed(
            Update(
                term=1,
                version=version,
                members=members,
                n_samples=16,
                loss=2.0,
                metrics={"accuracy": 0.5},
                samples_total=16 * version,
                time_s=100.0 + 0.2 * version,
            )
        )
    values = {"version": 40.0, "term": 1.0, "loss": 0.2, "accuracy": 0.97, "ndcg": 0.85, "evaluate_s": 0.1}
    model.feed(Metric(source="evaluator", values=values, time_s=108.5))
    return model


def test_the_report_has_the_keys_that_tools_read(model: ProgressModel) -> None:
    outcome = RunOutcome("updates", 0, 12.3456, restarts={"worker-1": 2, "ps": 1}, kafka_kind="local")
    report = json.loads(json.dumps(build_report(model, outcome, ledger()), allow_nan=False))
    assert (report["job"], report["reason"], report["seconds"], report["exit_code"]) == ("digits", "updates", 12.346, 0)
    assert (report["updates"], report["version"], report["samples"]) == (40, 40, 640)
    assert (report["accuracy"], report["loss"], report["evaluated_version"]) == (0.97, 0.2, 40)
    assert report["metrics"] == {"ndcg": 0.85}
    assert report["update_rate_measured_per_s"] == pytest.approx(5.0)
    assert report["update_rate_predicted_per_s"] == pytest.approx(5.0)
    assert report["proposition_1"]["margin"] == pytest.approx(8 / 80 / 0.01)
    assert report["prequential"]["loss"] == 2.0
    assert report["prequential"]["accuracy"] == 0.5
    assert (report["restarts"], report["restarts_by_role"]) == (3, {"ps": 1, "worker-1": 2})
    assert report["kafka_kind"] == "local"
    audit = report["audit"]
    assert {key: audit[key] for key in ("produced", "applied", "pending", "missing", "duplicate", "dead")} == {
        "produced": 700, "applied": 636, "pending": 60, "missing": 0, "duplicate": 0, "dead": 4,
    }  # fmt: skip


def test_missing_and_duplicate_count_offsets(model: ProgressModel) -> None:
    broken = ledger(missing=(Range(0, 8, 16), Range(1, 3, 4)), twice=(Range(0, 0, 2),))
    report = build_report(model, RunOutcome("updates", 4, 1.0), broken)
    assert (report["audit"]["ok"], report["audit"]["missing"], report["audit"]["duplicate"]) == (False, 9, 2)
    text = summary(report)
    assert "missing" in text
    assert "8-15" in text


def test_the_report_says_what_the_run_would_have_cost_on_ec2(model: ProgressModel) -> None:
    report = build_report(model, RunOutcome("updates", 0, 3600.0), ledger())
    estimate = report["ec2_estimate"]
    workers = report["workers"]
    assert estimate["on_demand_usd"] == pytest.approx(workers * 0.0725)
    shown = summary(report)
    assert f"would have cost {workers * 0.0725:.2f} USD on-demand, {estimate['spot_usd']:.2f} USD on spot" in shown
    assert f"{workers} x c7g.large for 1:00:00 in us-east-1, prices of early 2026" in shown
    assert "Kafka, cache and control host 0.45 USD" in shown


def test_a_run_that_never_learned_reports_unknown_numbers_as_null() -> None:
    report = build_report(ProgressModel(parse(JOB), 0.0), RunOutcome("failed", 1, 0.5, error="no broker"), None)
    text = json.dumps(report, allow_nan=False)
    assert json.loads(text)["update_rate_measured_per_s"] is None
    assert report["audit"] is None
    assert report["accuracy"] is None
    assert "audit: none" in summary(report)
    assert "failed: no broker" in summary(report)


def test_the_summary_says_what_people_ask(model: ProgressModel) -> None:
    files = {"model": "runs/x/model/model.safetensors", "report": "runs/x/report.json"}
    text = summary(build_report(model, RunOutcome("updates", 0, 65.0, files=files), ledger()))
    assert text.splitlines()[0] == "digits: 40 updates, 640 samples in 1:05 (updates)"
    assert "held-out accuracy 0.9700, held-out ndcg 0.8500, held-out loss 0.2000" in text
    assert "update rate 5/s, by theory Nλ/(Kb) 5/s; Proposition 1 margin 10" in text
    assert "audit: 700 offsets produced, 636 applied exactly once" in text
    assert "model: runs/x/model/model.safetensors" in text


def test_a_run_that_has_lost_what_it_had_learned_says_so(model: ProgressModel) -> None:
    report = build_report(model, RunOutcome("updates", 0, 1.0), None)
    assert report["loss_worsened"] is False
    assert "warning" not in summary(report)

    def learned(first: int, loss: float) -> None:
        for version in range(first, first + 19):
            model.feed(
                Update(term=1, version=version, members=(), n_samples=16, loss=loss, samples_total=0, time_s=200.0)
            )

    learned(41, 60.0)
    report = json.loads(json.dumps(build_report(model, RunOutcome("updates", 0, 1.0), None), allow_nan=False))
    assert report["loss_worsened"] is True
    assert (report["prequential"]["best_window_loss"], report["prequential"]["best_window_version"]) == (2.0, 10)
    assert "warning: the loss ended far above its best (prequential loss 2 at version 10" in summary(report)
    learned(60, 1e36)
    report = build_report(model, RunOutcome("updates", 0, 1.0), None)
    assert "warning: the model diverges: its loss has risen from 2 at version 10 to 1e+36; lower" in summary(report)


def test_samples_and_seconds_of_a_resumed_run_are_of_the_same_span(model: ProgressModel) -> None:
    """The first session learned for 7.8 s; the run was resumed an hour later."""
    model.feed(TermStarted(term=2, resumed_version=30, origins=(0, 0), records_per_batch=8, time_s=3700.0))
    for version in range(31, 51):
        members = (Member(worker=0, partition=0, batch=version, lo=0, hi=8, n_samples=8, base_version=version - 1),)
        time_s = 3700.0 + version
        model.feed(
            Update(
                term=2, version=version, members=members, n_samples=8, loss=1.0, samples_total=480 + 8 * (version - 30),
                time_s=time_s,
            )
        )  # fmt: skip
    outcome = RunOutcome("updates", 0, 21.0, started_at_s=3699.0)
    report = build_report(model, outcome, None)
    assert (report["updates"], report["samples"]) == (50, 640)
    assert report["seconds"] == pytest.approx(29 * 0.2 + 21.0), "versions 31 to 40 of the first session are void"
    assert report["session"] == {"seconds": 21.0, "updates": 20, "samples": 160}
    text = summary(report)
    assert text.startswith("digits: 50 updates, 640 samples in 27 s (updates)")
    assert "since it was resumed: 20 updates, 160 samples in 21 s" in text
    fresh = build_report(model, RunOutcome("updates", 0, 21.0), None)
    assert "resumed" not in summary(fresh)


def test_the_report_counts_dead_letters_and_leaves_out_updates_without_samples(model: ProgressModel) -> None:
    member = Member(worker=0, partition=0, batch=41, lo=0, hi=8, n_samples=0, base_version=40, dead=tuple(range(8)))
    model.feed(Update(term=1, version=41, members=(member,), n_samples=0, loss=0.0, samples_total=640, time_s=109.0))
    status = server_status(
        [], version=41, dead_reasons=(("no age", 7), ("empty", 1)), recent_records=648, recent_refused=8
    )
    model.feed(status)
    report = build_report(model, RunOutcome("updates", 0, 1.0), None)
    assert (report["updates"], report["version"]) == (40, 41)
    assert (report["dead_letters"], report["dead_reasons"][0]) == (8, {"reason": "no age", "letters": 7})
    assert "8 dead letters: most of them (7) no age" in summary(report)
    assert "8 dead letters (8 of the last 648 records): most of them (7) no age" in one_line(
        model.snapshot(1.0), StopConfig()
    )
    assert [text for _, text in model.all_events] == [
        "8 dead letters (8 of the last 648 records): most of them (7) no age; see doll dead list"
    ]
