"""The run's history: what counts after a parameter server restart, and the files that show it."""

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import record_builders
from doll import metrics
from doll.metrics.states import to_bytes
from doll.monitor.state.csv_file import CsvFile, read_rows
from doll.monitor.state.history import History
from doll.process.files import json_safe
from doll.records.control import Finished, HeldOutScore, Member, TermStarted, Update


def term_started(number: int, resumed: int = 0, generation: int = 0) -> TermStarted:
    return record_builders.term_started(number, resumed, generation=generation, time_s=float(number))


def update(number: int, version: int, *, loss: float = 1.0, n_samples: int = 16, accuracy: float = 0.5) -> Update:
    members = tuple(
        Member(worker=n, partition=n, batch=version, lo=8 * version, hi=8 * version + 8, n_samples=8,
               base_version=version - 1, compute_s=0.02, fetch_s=0.005, store_s=0.005)
        for n in range(2)
    )  # fmt: skip
    return Update(
        term=number, version=version, members=members, n_samples=n_samples, loss=loss,
        metrics={"accuracy": accuracy}, samples_total=16 * version, time_s=100.0 + version,
    )  # fmt: skip


def test_updates_become_rows_and_means() -> None:
    history = History()
    history.feed(term_started(1))
    for version in (1, 2, 3):
        history.feed(update(1, version, loss=4.0 - version))
    assert history.version == 3
    assert history.samples_total == 48
    assert history.updates.valid("prequential_loss").tolist() == [3.0, 2.0, 1.0]
    assert history.prequential.running().loss == 2.0
    assert history.service_s() == pytest.approx(0.03)
    assert history.restarts == 0


def test_a_term_voids_later_versions_of_the_one_before() -> None:
    history = History()
    history.feed(term_started(1))
    for version in range(1, 6):
        history.feed(update(1, version, loss=9.0))
        history.evaluated(time_s=100.5 + version, term=1, version=version, loss=2.0, metrics={"accuracy": 0.4})
    assert history.feed(term_started(2, resumed=3)) is True
    assert (history.version, history.samples_total, history.restarts) == (3, 48, 1)
    for version in (4, 5):
        history.feed(update(2, version, loss=1.0))
    assert history.updates.valid("version").tolist() == [1, 2, 3, 4, 5]
    assert history.evaluations.valid("version").tolist() == [1, 2, 3]
    assert [history.updates.row(i)["void"] for i in range(7)] == [0, 0, 0, 1, 1, 0, 0]
    assert history.prequential.running().loss == pytest.approx((3 * 9 + 2 * 1) / 5)


def test_a_rollback_voids_what_it_leaves_and_counts_only_what_the_model_has() -> None:
    history = History()
    history.feed(term_started(1))
    for version in range(1, 6):
        history.feed(update(1, version, loss=9.0))
    history.evaluated(time_s=1.0, term=1, version=5, loss=2.0, metrics={"accuracy": 0.4})
    back = msgspec.structs.replace(term_started(3, resumed=6), rolled_back_to=2)
    for term in (3, 4):  # a server that dies before its first update
        history.feed(msgspec.structs.replace(back, term=term))
        assert (history.version, history.samples_total, history.learned_updates) == (6, 32, 2)
    assert history.evaluations.valid("version").tolist() == []
    history.evaluated(time_s=2.0, term=1, version=5, loss=2.0, metrics={"accuracy": 0.4})
    assert history.evaluations.valid("version").tolist() == [], "it comes late"
    history.feed(update(4, 7, loss=1.0))
    assert history.updates.valid("version").tolist() == [1, 2, 7]
    assert history.prequential.running().loss == pytest.approx((2 * 9 + 1) / 3)
    assert history.learned_updates == 3
    history.feed(msgspec.structs.replace(term_started(6, resumed=8), rolled_back_to=1))  # before the first rollback
    assert history.learned_updates == 1
    history.feed(msgspec.structs.replace(term_started(8, resumed=9), rolled_back_to=8))
    assert history.learned_updates == 1


def test_a_new_generation_counts_nothing_of_the_run_before() -> None:
    history = History()
    history.evaluated(time_s=1.0, term=3, version=1, loss=0.5, metrics={"accuracy": 0.9})  # of the file of this run
    for record in (term_started(1), update(1, 1, loss=9.0), term_started(2, resumed=1), update(2, 2, loss=9.0)):
        history.feed(record)
    history.evaluated(time_s=1.0, term=2, version=2, loss=8.0, metrics={"accuracy": 0.1})
    history.feed(Finished(term=2, version=2, reason="updates: 2 reached", time_s=1.0))
    assert history.feed(term_started(3, generation=3)) is True
    assert (history.version, history.samples_total, history.restarts, history.finished) == (0, 0, 0, None)
    history.feed(update(2, 3))  # its server wakes up
    history.evaluated(time_s=1.0, term=2, version=2, loss=8.0, metrics={"accuracy": 0.1})
    history.feed(Finished(term=2, version=3, reason="late", time_s=1.0))
    history.feed(update(3, 1, loss=2.0))
    assert (history.version, history.finished, history.first_time_s) == (1, None, 101.0)
    assert history.updates.valid("version").tolist() == [1]
    assert history.evaluations.valid("loss").tolist() == [0.5]
    assert history.prequential.running().loss == 2.0
    history.feed(term_started(5, resumed=1, generation=3))
    assert history.restarts == 1


def test_a_run_that_is_told_of_the_one_before_counts_nothing_of_it_before_it_begins() -> None:
    history = History(after_term=2)
    for record in (term_started(1), update(1, 1), Finished(term=2, version=1, reason="r", time_s=1.0)):
        assert history.feed(record) is False
    history.evaluated(time_s=1.0, term=2, version=1, loss=8.0, metrics={"accuracy": 0.1})
    assert (history.version, history.finished, len(history.updates), len(history.evaluations)) == (0, None, 0, 0)
    assert not history.is_current(2)
    history.feed(term_started(3, generation=3))
    assert history.is_current(3)


def test_a_fenced_parameter_servers_late_update_is_void() -> None:
    history = History()
    history.feed(term_started(1))
    history.feed(update(1, 1))
    history.feed(term_started(2, resumed=1))
    history.feed(update(1, 2, loss=50.0))
    history.evaluated(time_s=1.0, term=1, version=2, loss=1.0, metrics={})
    assert history.version == 1
    assert history.updates.valid("version").tolist() == [1]
    assert len(history.evaluations.valid("version")) == 0
    assert history.prequential.running().loss == 1.0


def test_a_later_term_reopens_a_finished_job() -> None:
    history = History()
    history.feed(term_started(1))
    history.feed(Finished(term=1, version=0, reason="updates", time_s=1.0))
    assert history.finished is not None
    history.feed(term_started(2))
    assert history.finished is None


def test_an_update_without_samples_has_no_loss() -> None:
    history = History()
    history.feed(term_started(1))
    history.feed(update(1, 1, n_samples=0, loss=0.0))
    assert np.isnan(history.updates.valid("prequential_loss")).all()
    assert math.isnan(history.prequential.running().loss)


def test_a_row_counts_the_records_that_were_learned() -> None:
    history = History()
    history.feed(term_started(1))
    more: list[dict[str, Any]] = [{}, {"dead": (11,), "gaps": ((13, 16),), "lost": ((18, 20),)}, {"gaps": ((20, 30),)}]
    members = tuple(
        Member(worker=0, partition=0, batch=n, lo=10 * n, hi=10 * n + 10, n_samples=1, base_version=0, **more[n])
        for n in range(3)
    )
    history.feed(msgspec.structs.replace(update(1, 1), members=members))
    assert history.updates.valid("records").tolist() == [10 + 4]


def test_the_csv_file_follows_the_table(tmp_path: Path) -> None:
    history = History()
    file = CsvFile(tmp_path / "updates.csv", history.updates)
    history.feed(term_started(1))
    changed = [history.feed(update(1, version)) for version in (1, 2)]
    file.sync(changed=any(changed))
    first = file.path.read_text()
    file.sync(changed=history.feed(update(1, 3)))
    assert file.path.read_text().startswith(first), "appended, not rewritten"
    file.sync(changed=history.feed(term_started(2, resumed=1)))
    rows = read_rows(file.path)
    assert [(row["version"], row["void"]) for row in rows] == [(1, 0), (2, 1), (3, 1)]
    assert rows[0]["prequential_accuracy"] == 0.5
    assert rows[0]["mean_service_s"] == pytest.approx(0.03)


def test_the_csv_file_of_an_earlier_process_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "updates.csv").write_text("something else\n1,2\n")
    history = History()
    history.feed(update(1, 1))
    CsvFile(tmp_path / "updates.csv", history.updates).sync()
    assert [row["version"] for row in read_rows(tmp_path / "updates.csv")] == [1]


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.csv"
    path.write_text("time_s,version,loss\n1.0,1,0.5\n2.0,2,0.4e\n")
    assert read_rows(path) == [{"time_s": 1.0, "version": 1.0, "loss": 0.5}]


def test_plain_says_unknown_where_json_has_no_number() -> None:
    assert json_safe({"a": math.nan, "b": [math.inf, 1.0], "c": 3}) == {"a": None, "b": [None, 1.0], "c": 3}


def scored(number: int, version: int, *losses: float, held_out: tuple[int, ...] = ()) -> Update:
    """An update with held-out samples, and a metric of each form."""
    made = update(number, version)
    state = to_bytes(metrics.mean(losses)) if losses else b""
    score = HeldOutScore(
        n_samples=len(losses), weight=2.0 * len(losses), loss_sum=2.0 * sum(losses),
        metric_sums={"half": float(sum(losses)), "state": state},
    )  # fmt: skip
    member = msgspec.structs.replace(made.members[0], held_out=held_out)
    members = (member, *made.members[1:])
    return msgspec.structs.replace(made, members=members, held_out_score=score if losses else None)


def test_held_out_records_are_counted_and_scored_apart() -> None:
    history = History()
    history.feed(term_started(1))
    history.feed(update(1, 1))
    assert history.held_out_records() is None
    history.feed(scored(1, 2, 1.0, 3.0, held_out=(16, 17, 18)))
    history.feed(update(1, 3))
    history.feed(scored(1, 4, held_out=(33,)))
    counted = history.held_out_records()
    assert counted is not None
    assert (counted.records, counted.samples, counted.window_samples) == (4, 2, 2)
    assert counted.metrics == counted.window_metrics
    assert counted.metrics == {"loss": 2.0, "half": 1.0, "state": 2.0, "state_stderr": pytest.approx(2**-0.5)}
    assert counted.text() == "4 records held out: loss 2, half 1, state 2 over the last 2 samples"
    assert history.prequential.running().loss == 1.0
    assert history.prequential.running().metrics == {"accuracy": 0.5}


def test_held_out_records_of_void_updates_do_not_count() -> None:
    history = History()
    history.feed(term_started(1))
    for version in range(1, 5):
        history.feed(scored(1, version, 9.0, held_out=(16 * version,)))
    history.feed(term_started(2, resumed=2))
    history.feed(scored(2, 3, 3.0, held_out=(48,)))
    counted = history.held_out_records()
    assert counted is not None
    assert (counted.records, counted.samples, counted.metrics["loss"]) == (3, 3, 7.0)
    history.feed(term_started(5, generation=5))
    counted = history.held_out_records()
    assert counted is not None
    assert (counted.records, counted.samples, counted.metrics, counted.text()) == (0, 0, {}, "0 records held out")


def test_the_window_of_held_out_samples_has_500_updates_and_a_score_that_is_not_finite_is_left_out() -> None:
    history = History()
    history.feed(term_started(1))
    for version in range(1, 521):
        history.feed(scored(1, version, 9.0 if version <= 20 else 1.0, held_out=(version,)))
    history.feed(scored(1, 521, math.inf))
    counted = history.held_out_records()
    assert counted is not None
    assert (counted.window_samples, counted.window_metrics["loss"], counted.window_metrics["state"]) == (500, 1.0, 1.0)
    assert (counted.samples, counted.metrics["loss"]) == (520, pytest.approx((20 * 9 + 500) / 520))


def test_the_files_of_a_run_keep_its_held_out_records(tmp_path: Path) -> None:
    history = History()
    history.feed(term_started(1))
    for version in range(1, 4):
        history.feed(update(1, version) if version == 2 else scored(1, version, float(version), held_out=(version,)))
    CsvFile(tmp_path / "updates.csv", history.updates).sync(changed=True)
    again = History.of_rows(read_rows(tmp_path / "updates.csv"), [])
    counted = again.held_out_records()
    assert counted is not None
    assert (counted.records, counted.samples) == (2, 0), "the metrics are in report.json"
    assert again.updates.valid("held_out_loss")[[0, 2]].tolist() == [1.0, 3.0]
