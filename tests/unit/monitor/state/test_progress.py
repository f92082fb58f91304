"""The progress model and the two views of it."""

import io
import json
import math
from dataclasses import replace

import msgspec
import pytest
from doll.amounts import clock, number
from doll.config import JobConfig, StopConfig, load, parse
from doll.monitor.state.policy_summary import PolicySummary
from doll.monitor.state.progress import ProgressModel
from doll.monitor.views.display import Display, panel
from doll.monitor.views.text import one_line, shard_lines, table_lines, worker_table
from doll.process.files import json_safe
from doll.records.control import Finished, Measures, Member, Metric, ShardStatus, TableStatus, Update, WorkerStatus
from doll.run.status import JobStatus
from doll.theory.queueing import Stability
from paths import EXAMPLES
from record_builders import term_started
from rich.cells import cell_len
from rich.console import Console
from statuses import gone_worker, live_worker, server_status

JOB = """
job: digits
task: {class: 'examples.digits.task:Digits'}
data: {workers: 2, batch_size: 8}
source: {kind: python, of: examples.digits.task:samples}
arrivals: {process: poisson, rate_per_s: 40}
training: {policy: {name: doll, group_size: 2}}
stop: {updates: 100, accuracy: 0.95}
"""


def job(*overrides: str) -> JobConfig:
    return parse(JOB, overrides)


def feed_updates(model: ProgressModel, count: int, *, term: int = 1, first: int = 1, every_s: float = 0.2) -> None:
    for version in range(first, first + count):
        members = tuple(
            Member(
                worker=n, partition=n, batch=version, lo=0, hi=8, n_samples=8, base_version=version - 1, compute_s=0.02
            )
            for n in range(2)
        )
        model.feed(
            Update(
                term=term,
                version=version,
                members=members,
                n_samples=16,
                loss=1.5,
                metrics={"accuracy": 0.6},
                samples_total=16 * version,
                time_s=5000.0 + every_s * version,
            )
        )


@pytest.fixture
def running() -> ProgressModel:
    """A job at update 50 of 100, with everything known."""
    model = ProgressModel(job(), started_s=10.0)
    model.feed(term_started(1))
    feed_updates(model, 50)
    for time_s, workers in (
        (4990.0, [live_worker(0), live_worker(1)]),
        (5000.0, [live_worker(0), gone_worker(1)]),
        (
            5010.0,
            [
                live_worker(
                    0,
                    live_since_s=4825.0,
                    market="on_demand",
                    control="local",
                    restarts=2,
                    retained_batches=4,
                    lag_records=17,
                ),
                gone_worker(1, session=1048579),
            ],
        ),
    ):
        model.feed(server_status(workers, version=50, durable_version=40, waiting_batches=3, time_s=time_s))
    model.feed(Metric(source="producer", values={"delivered_total": 900, "rate_per_s": 79.5}, time_s=0.0))
    values = {"version": 48, "term": 1, "loss": 0.7, "accuracy": 0.88}
    model.feed(Metric(source="evaluator", values=values, time_s=5009.0))
    model.add_event("worker-1 ended with killed by SIGKILL: restarted after 0.5 s", 18.0)
    return model


def test_a_snapshot_knows_it_all(running: ProgressModel) -> None:
    snapshot = running.snapshot(20.0)
    assert (snapshot.version, snapshot.samples, snapshot.seconds) == (50, 800, 10.0)
    assert snapshot.prequential.loss == 1.5
    assert (snapshot.held_out_version, snapshot.held_out_accuracy) == (48, 0.88)
    assert snapshot.rate_measured == pytest.approx(5.0)
    assert snapshot.rate_predicted == pytest.approx(2 * 40 / (2 * 8))
    assert snapshot.margin.sufficient == pytest.approx(8 / 80 / 0.02)
    assert (snapshot.durable_version, snapshot.waiting_batches, snapshot.sent) == (40, 3, 900)
    assert snapshot.eta_s == pytest.approx(50 / 5.0)
    assert [(line.is_live, line.retained_batches, line.lag_records) for line in snapshot.workers] == [
        (True, 4, 17),
        (False, 0, 0),
    ]
    assert snapshot.events == ((8.0, "worker-1 ended with killed by SIGKILL: restarted after 0.5 s"),)


def test_nothing_is_known_at_the_start() -> None:
    snapshot = ProgressModel(job(), started_s=0.0).snapshot(1.0)
    assert snapshot.version == 0
    assert math.isnan(snapshot.rate_measured)
    assert snapshot.durable_version is None
    assert [line.is_live for line in snapshot.workers] == [None, None]
    assert one_line(snapshot, StopConfig()) == "waiting for the first update (0 of 2 workers live)"


def test_a_parameter_server_restart_takes_updates_back_and_is_told() -> None:
    model = ProgressModel(job(), started_s=0.0)
    model.feed(term_started(1))
    feed_updates(model, 10)
    model.feed(term_started(2, resumed=6))
    snapshot = model.snapshot(1.0)
    assert (snapshot.version, snapshot.samples, snapshot.ps_restarts) == (6, 96, 1)
    assert "resumed from version 6" in snapshot.events[-1][1]
    model.feed(Finished(term=2, version=6, reason="stopped", time_s=0.0))
    assert model.snapshot(2.0).finished == "stopped"


@pytest.mark.parametrize("override", ["arrivals.process=asap", "source=null", "source={kind: stdin}"])
def test_where_nobody_states_the_rate_it_is_measured(override: str) -> None:
    model = ProgressModel(job(override), started_s=0.0)
    assert math.isnan(model.rate_predicted())
    for second in range(11):
        model.observe_ends(float(second), [30 * second, 50 * second])
    assert not model.rate_is_stated
    assert model.rate_predicted() == pytest.approx(80 / 16)


def test_lockstep_goes_at_the_slowest_streams_pace() -> None:
    model = ProgressModel(job("training.policy={name: bsp}", "arrivals.rate_per_s=[40, 16]"), started_s=0.0)
    assert model.rate_predicted() == 2.0


def test_the_panel_shows_the_numbers_that_matter(running: ProgressModel) -> None:
    console = Console(file=io.StringIO(), width=110, record=True)
    console.print(panel(running.snapshot(20.0), running.config.stop))
    text = console.export_text()
    for expected in (
        "50 of 100", "0.88 of 0.95", "λ_U measured", "Nλ/(Kb)", "5 /s", "stable", "durable version", "40",
        "gone 10 s", "live 3:05", "on-demand", "17", "SIGKILL", "900",
    ):  # fmt: skip
        assert expected in text, expected
    lines = text.splitlines()
    assert "updates" in lines[2], "the bar has a line of its own"
    assert {len(line) for line in lines} == {110}


def test_the_panel_at_the_start_says_unknown() -> None:
    console = Console(file=io.StringIO(), width=110, record=True)
    console.print(panel(ProgressModel(job(), started_s=0.0).snapshot(1.0), StopConfig()))
    assert "starting" in console.export_text()


def test_text_of_the_user_is_no_markup() -> None:
    model = ProgressModel(job(), started_s=0.0)
    model.add_event("worker-0: [/red] [bold]", 1.0)
    console = Console(file=io.StringIO(), width=110, record=True)
    console.print(panel(model.snapshot(1.0), StopConfig()))
    assert "[/red] [bold]" in console.export_text()


def test_the_line_says_it_in_one(running: ProgressModel) -> None:
    assert one_line(running.snapshot(20.0), running.config.stop) == (
        "update 50 of 100, samples 800, prequential loss 1.500, held-out accuracy 0.880 of 0.95, "
        "5.00 updates/s (theory 5), durable 40, waiting batches 3"
    )


def test_plain_lines_come_every_five_seconds(running: ProgressModel, capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    display = Display(running.config.stop, clock=lambda: now[0])
    for _ in range(81):
        display.show(lambda: running.snapshot(20.0))
        now[0] += 0.125
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split("]")[0] for line in err.splitlines()] == ["[   0.0 s", "[   5.0 s", "[  10.0 s"]


def test_the_worker_table_has_a_line_for_each(running: ProgressModel) -> None:
    lines = worker_table(running.snapshot(20.0)).splitlines()
    assert len(lines) == 3
    assert lines[0].split("  ")[0] == "worker"
    assert lines[1].split() == ["0", "live", "3:05", "on-demand", "local", "2", "40.8", "17", "4"]
    assert lines[2].split() == ["1", "gone", "10", "s", "0", "40.8", "0", "0"]
    assert "1048579" not in "\n".join(lines), "a session number is of no use to people"


def test_a_bounded_table_has_a_line(running: ProgressModel) -> None:
    table = TableStatus(name="items.weight", rows=1000, admitted=4000, evicted=2500, expired=500, refused=12345)
    snapshot = replace(running.snapshot(20.0), tables=(table,))
    assert table_lines(snapshot) == [
        "table items.weight: 1,000 rows; 4,000 ids admitted, 2,500 evicted, 500 expired, 12,345 gradients without a row"
    ]


def test_each_shard_has_a_line_and_lost_ones_come_first(running: ProgressModel) -> None:
    live = ShardStatus(
        shard=0, host="h", pid=7, version=41, slice_bytes=1_200_000, memory_bytes=310_000_000, part_version=40
    )
    lost = ShardStatus(shard=1, is_alive=False)
    assert shard_lines(replace(running.snapshot(20.0), shards=(live, lost))) == [
        "shard 1: lost, 0 B of the model, 0 B of memory, no part of a checkpoint in this term",
        "shard 0: live, process 7 on h, version 41, 1.2 MB of the model, 310.0 MB of memory, part of version 40",
    ]
    many = shard_lines(replace(running.snapshot(20.0), shards=(live,) * 20))
    assert (len(many), many[-1]) == (17, "other shards: 4")


@pytest.mark.parametrize(("seconds", "shown"), [(7.2, "7 s"), (65, "1:05"), (7385, "2:03:05"), (math.nan, "")])
def test_clock(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(math.nan, "?"), (math.inf, "unlimited"), (0.12345, "0.123"), (12345.6, "12,346")]
)
def test_number(value: float, shown: str) -> None:
    assert number(value) == shown


def test_a_job_that_cannot_make_an_update_says_so_once() -> None:
    config = parse("job: j\ntask: {class: 'examples.digits.task:Digits'}\n")
    model = ProgressModel(config, started_s=0.0)
    model.feed(term_started(1))
    workers = [live_worker(0), gone_worker(1)]
    for stalled_s in (0.0, 5.0, 11.0, 12.0):
        model.feed(server_status(workers, stalled_s=stalled_s, shortfall_batches=2))
    (text,) = [text for _, text in model.all_events]
    assert "2 batches more" in text or "2 more batches" in text
    for stalled_s in (0.0, 11.0):
        model.feed(server_status(workers, stalled_s=stalled_s, shortfall_batches=3))
    assert len(model.all_events) == 2


def test_a_slow_worker_is_named_with_how_slow_it_is() -> None:
    config = parse("job: j\ntask: {class: 'examples.digits.task:Digits'}\ndata: {workers: 3}\n")
    model = ProgressModel(config, started_s=0.0)
    model.feed(term_started(1))
    usual = live_worker(0, batch_s=3.0, time_limit_s=30.0)
    gone = gone_worker(1, batch_s=40.0, time_limit_s=80.0)
    model.feed(server_status([usual, gone, live_worker(2, time_limit_s=30.0, is_stalled=True)]))
    assert [text for _, text in model.all_events] == ["worker 2: no gradient within 30 s"]
    for _ in range(2):
        model.feed(server_status([usual, gone, live_worker(2, batch_s=35.02, time_limit_s=70.04)]))
    assert [line.slow for line in model.worker_lines()] == [
        "", "", "35 s per batch, limit raised to 70 s (worker.grant_timeout_s: 30)"
    ]  # fmt: skip
    assert len(model.all_events) == 1, "it is slow still"
    shown = JobStatus(config, model.snapshot(1.0), {}).text()
    assert "slow: worker 2: 35 s per batch, limit raised to 70 s" in shown
    assert "worker 1:" not in shown


def test_workers_that_wait_to_decode_and_skipped_samples_are_shown() -> None:
    config = parse("job: j\ntask: {class: 'examples.digits.task:Digits'}\ndata: {workers: 3}\n")
    model = ProgressModel(config, started_s=0.0)
    model.feed(term_started(1))
    away = "the registry does not answer"
    waiting = [live_worker(0, waiting_for=away), live_worker(1), live_worker(2, waiting_for=away)]
    for _ in range(2):
        model.feed(server_status(waiting, skipped=(("tombstone", 1000), ("bot", 8))))
    shown = JobStatus(config, model.snapshot(1.0), {}).text()
    assert f"waiting: worker 0, 2: {away}" in shown
    assert "1,008 samples skipped: 1,000 tombstone, 8 bot" in shown
    assert [text for _, text in model.all_events] == [f"worker 0 waits: {away}", f"worker 2 waits: {away}"]


def test_the_limit_of_a_wave_is_named_as_such() -> None:
    config = parse(
        "job: j\ntask: {class: 'examples.digits.task:Digits'}\ntraining: {policy: {name: wsp, wave_batches: 8}}\n"
    )
    model = ProgressModel(config, started_s=0.0)
    model.feed(term_started(1))
    model.feed(server_status([live_worker(0, batch_s=20.0, time_limit_s=320.0)]))
    assert model.worker_lines()[0].slow == (
        "20 s per batch, limit raised to 320 s for a push of 8 batches (worker.grant_timeout_s: 30)"
    )


def test_lost_records_are_noted_once_and_counted(running: ProgressModel) -> None:
    assert running.snapshot(20.0).lost == ()
    for _ in range(2):  # a worker that stops for it is started again, and says so again
        running.feed(
            Metric(source="worker-1", values={"lost_partition": 1.0, "lost_from": 40.0, "lost_until": 44.0}, time_s=0.0)
        )
    member = Member(worker=1, partition=1, batch=6, lo=48, hi=56, n_samples=6, base_version=50, lost=((48, 50),))
    running.feed(Update(term=1, version=51, members=(member,), n_samples=6, loss=1.0))
    for name, values in {"x": {"lost_from": 1.0}, "worker-0": {"lost_from": math.nan, "lost_until": 3.0}}.items():
        running.feed(Metric(source=name, values=values, time_s=0.0))  # nothing that a worker says
    snapshot = running.snapshot(20.0)
    assert snapshot.lost == ((1, 40, 44), (1, 48, 50))
    assert "6 records lost" in one_line(snapshot, StopConfig())
    texts = [text for _, text in snapshot.events if "lost" in text]
    assert texts == [
        "records lost: partition 1: 40-43: deleted before they were learned (data.on_data_loss: stop)",
        "records lost: partition 1: 48-49: deleted before they were learned (data.on_data_loss: stop)",
    ]
    assert running.next_offsets[1] == 56


def test_offsets_are_of_partitions_whichever_worker_serves_them(running: ProgressModel) -> None:
    """Partition 7 was added since the job began."""
    member = Member(worker=1, partition=7, batch=0, lo=0, hi=8, n_samples=6, base_version=50, lost=((0, 2),))
    before = dict(running.next_offsets)
    running.feed(Update(term=1, version=51, members=(member,), n_samples=6, loss=1.0))
    assert running.next_offsets == before | {7: 8}
    assert running.snapshot(20.0).lost == ((7, 0, 2),)


def test_machines_and_money_are_shown_in_both_views() -> None:
    config = load(EXAMPLES / "digits" / "market.yaml")
    snapshot = ProgressModel(config, 0.0).snapshot(10.0)
    workers = tuple(replace(line, machine=f"spot #{line.worker} works", usd=0.25) for line in snapshot.workers)
    shown = replace(snapshot, workers=workers, costs="5 of 190 s, 6 spot + 0 on-demand, 1.500 USD")
    out = io.StringIO()
    Console(file=out, width=140).print(panel(shown, config.stop))
    assert "spot #5 works" in out.getvalue()
    assert "0.25" in out.getvalue()
    assert "6 spot + 0 on-demand" in out.getvalue()
    assert one_line(shown, config.stop).endswith("1.500 USD")
    out = io.StringIO()
    Console(file=out, width=140).print(panel(snapshot, config.stop))
    assert "USD" not in out.getvalue()


def test_what_the_policy_cost_is_added_up_over_the_terms() -> None:
    model = ProgressModel(job(), 0.0)
    assert model.snapshot(1.0).policy is None
    model.feed(term_started(1))
    counted = Measures(
        staleness={-1: 3, 0: 1}, staleness_total=-3, blocked_s=1.0, computing_s=1.0, idle_s=1.0, gradient_bytes=50,
        void_batches=1_200,
    )  # fmt: skip
    for measures in (Measures(staleness={-1: 1}, staleness_total=-1), counted):  # the newest of a term counts
        model.feed(server_status(measures=measures))
    model.feed(term_started(2, 10))
    model.feed(
        server_status(
            term=2, measures=Measures(staleness={-5: 4}, staleness_total=-20, computing_s=2.0, void_batches=34)
        )
    )
    policy = model.snapshot(1.0).policy
    assert policy is not None
    assert policy.staleness.histogram == {-5: 4, -1: 3, 0: 1}
    assert policy.staleness.mean == pytest.approx(-23 / 8)
    assert (policy.blocked_share, policy.bytes.gradients) == (0.25, 50)
    assert policy.text() == (
        "staleness -2.88 (p99 -5, 100 % of reads), workers blocked 25 % of the time, 1,234 batches void, "
        "gradients 50 B, weights 0 B"
    )
    assert policy.to_dict()["void_batches"] == 1_234
    model.feed(term_started(3, generation=3))
    assert model.snapshot(1.0).policy is None, "another run"


@pytest.mark.parametrize(("older", "text"), [(0, "100 %"), (1, "99.9 %"), (10_000, "50 %"), (90_000, "10 %")])
def test_a_share_of_reads_that_is_not_whole_is_never_shown_as_100_percent(older: int, text: str) -> None:
    policy = PolicySummary.total([Measures(staleness={-1: 10_000}, staleness_total=-10_000, older_reads=older)])
    assert policy is not None
    assert policy.staleness_text == f"-1 (p99 -1, {text} of reads)"
    assert policy.to_dict()["staleness"]["counted_share"] == 10_000 / (10_000 + older)
    assert msgspec.convert(policy.to_dict(), PolicySummary, strict=False) == policy


def test_no_rate_is_shown_before_a_start_is_over() -> None:
    """What had waited for the first weights is learned in a burst: 45 updates a second, and then 4."""
    model = ProgressModel(job(), started_s=0.0)
    times_s = [0.02 * n for n in range(12)] + [0.25 * n for n in range(1, 60)]
    shown = []
    for version, time_s in enumerate(times_s, 1):
        members = (Member(worker=0, partition=0, batch=version, lo=0, hi=8, n_samples=8, base_version=version - 1),)
        model.feed(
            Update(
                term=1, version=version, members=members, n_samples=8, loss=1.0, samples_total=8 * version,
                time_s=1000.0 + time_s,
            )
        )  # fmt: skip
        shown.append(model.rate_measured())
    assert math.isnan(shown[20])
    assert all(math.isnan(rate) or rate < 5.0 for rate in shown)
    assert shown[-1] == pytest.approx(4.0)


@pytest.mark.parametrize("has_machines", [False, True])
def test_the_panel_fits_80_columns_and_cuts_nothing_off(running: ProgressModel, has_machines: bool) -> None:
    worker = live_worker(
        0,
        live_since_s=100.0,
        market="on_demand",
        control="local",
        restarts=12,
        retained_batches=64,
        lag_records=123_417,
    )
    reasons = (("ValidationError: Object missing required field `age`", 1024),)
    running.feed(server_status([worker], dead_reasons=reasons, recent_records=1024, recent_refused=1024, time_s=5011.0))
    snapshot = replace(running.snapshot(20.0), rate_stated=False)
    snapshot = replace(snapshot, samples=123_456, held_out_version=123_456, margin=Stability(0.5, 1.5))
    if has_machines:
        named = replace(snapshot.workers[0], machine="spot c7g.large eu-west-1a works", usd=1.234)
        snapshot = replace(snapshot, workers=(named, *snapshot.workers[1:]))
    stop = StopConfig(updates=100, samples=400_000, accuracy=0.95, loss=0.1)
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(panel(snapshot, stop))
    text = console.export_text()
    assert "…" not in text
    assert {cell_len(line) for line in text.splitlines()} == {80}
    words = "".join(text.split()).replace("│", "")
    for expected in (
        "123,456of400,000",
        "0.88of0.95(v123456)",
        "parallel",
        "on-demand",
        "123417",
        "`age`",
    ):
        assert expected in words, expected
    assert ("eu-west-1a" in words) == has_machines
    assert len(text.splitlines()) <= 24, "an 80 x 24 terminal"


def test_the_status_of_a_job_with_measures_is_plain() -> None:
    model = ProgressModel(job(), started_s=0.0)
    model.feed(term_started(1))
    model.feed(server_status(measures=Measures(staleness={-1: 3, -2: 1}, staleness_total=4, gradient_bytes=100)))
    content = json.loads(json.dumps(json_safe(JobStatus(job(), model.snapshot(1.0), {}).to_dict())))
    assert content["policy"]["staleness"]["reads"] == 4
    assert content["policy"]["bytes"]["gradients"] == 100
    assert content["policy"]["bytes"]["both_ways"] == 100 + content["policy"]["bytes"]["fetched"]


@pytest.mark.parametrize(
    ("worker", "computing", "expected"),
    [
        (live_worker(0, retained_batches=1), 0, True),
        (live_worker(0, retained_batches=1), 1, False),
        (live_worker(0, retained_batches=1, is_stalled=True), 0, False),  # a first pass that takes long
        (live_worker(0), 0, False),  # what it has read is being decoded
    ],
)
def test_batches_that_nobody_computes_wait_for_more(worker: WorkerStatus, computing: int, expected: bool) -> None:
    model = ProgressModel(job(), started_s=10.0)
    assert not model.waits_for_more()
    model.feed(term_started(1))
    model.feed(server_status([worker], computing_batches=computing))
    assert model.waits_for_more() == expected


def test_a_model_that_diverges_is_named_before_dead_letters_and_workers() -> None:
    """Samples that are refused and workers that have no batches then are the consequence."""
    model = ProgressModel(job("training.policy={name: ssp, contributions: sum}"), 0.0)
    model.feed(term_started(1))
    for version, loss in enumerate((1.2, 7.0, 77.0, 1.5e5, 4.3e12, 2.4e31), 1):
        model.feed(Update(term=1, version=version, members=(), n_samples=16, loss=loss, samples_total=16 * version))
    model.feed(server_status([], dead_reasons=(("the loss is inf", 9),), stalled_s=60.0))
    first, stall, dead = (text for _, text in model.snapshot(1.0).events)
    assert first == (
        "the model diverges: its loss has risen from 1.2 at the start to 7.504e+04; divide training.optimizer.lr by 2, "
        "which is how far policy ssp goes beside bsp, set training.policy.contributions: mean, or set "
        "training.clip_norm"
    )
    now = model.diverged
    assert model.snapshot(1.0).limit == now
    assert stall.startswith(f"{now} (no update can be made")
    assert dead.startswith(f"{now} (9 ")
    assert ProgressModel(job(), 0.0).explained("a worker has ended") == "a worker has ended"


def test_a_version_that_gates_hold_back_is_an_event_and_changes_no_measured_value() -> None:
    model = ProgressModel(job(), started_s=0.0)
    model.feed(Metric(source="evaluator", values={"loss": 0.5, "version": 6.0, "term": 1.0}, time_s=1.0))
    checks = {"gate_passed_finite": 1.0, "gate_passed_auc": 0.0, "gate_passed_auc[0]": 0.0}
    for version, passed in ((7.0, 0.0), (8.0, 1.0)):
        values = {"gate_version": version, "gate_passed": passed, **checks}
        model.feed(Metric(source="evaluator", values=values, time_s=2.0))
    assert [text for _, text in model.all_events] == ["version 7 was held back: auc, auc[0] (doll versions show)"]
    assert model.metric("evaluator", "loss") == 0.5


def test_drifts_and_moves_back_are_events_once() -> None:
    model = ProgressModel(job(), started_s=0.0)
    facts = {"drift_before_auc": 0.8, "drift_after_auc": 0.6, "drift_since_auc": 90.0, "drift_version_auc": 99.0}
    drift = {"drift": 1.0, **facts}
    for values in (drift, drift, {"moved_back": 7.0, "moved_back_to": 5.0}):
        model.feed(Metric(source="evaluator", values=values, time_s=1.0))
    assert [text for _, text in model.all_events] == [
        "drift: auc went from 0.8 to 0.6 between versions 90 and 99",
        "version 7 was moved back to 5: worse on live records",
    ]
