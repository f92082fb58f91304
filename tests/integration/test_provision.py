"""`doll provision` on a real broker: worker processes as machines, a spot market, a journal, a drain, a successor."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from doll.config import dump, load
from doll.process.platform import lock_exclusively
from doll.provisioner.billing import LOCAL
from doll.provisioner.fleets.port import LaunchError, Order
from doll.provisioner.fleets.processes import ProcessFleet
from doll.records.control import Finished, Leave, Metric
from doll.run.folder import RunFolder
from doll.run.local.provisioning import machines_of
from doll.run.status import JobStatus, status_of
from doll.run.target import open_target
from doll.services import KAFKA_ENV, REDIS_ENV
from fleet_worlds import WORLDS
from job_rig import MakePipeline
from process_checks import is_gone
from provision_program import Provisioner, journal_of
from statuses import server_status
from waiting import WAIT_TIMEOUT_S, until

pytestmark = pytest.mark.integration

PLAN = (
    "plan.deadline_s=600", "plan.spot_usd_per_h=0.158", "plan.on_demand_usd_per_h=0.286", "plan.boot_s=5",
    "plan.alpha=0.8", "plan.cycle_s=60", "provision.every_s=1", "arrivals.process=poisson", "arrivals.rate_per_s=20",
)  # fmt: skip


@pytest.fixture
def provision(make_pipeline: MakePipeline) -> Iterator[Provisioner]:
    job = make_pipeline(*PLAN, "stop.updates=40")
    provisioner = Provisioner(job)
    job.start_ps()
    yield provisioner
    provisioner.close()


def test_a_job_from_its_first_machine_to_its_last(provision: Provisioner) -> None:
    """The provisioner starts workers, keeps them, says why, and terminates all machines when the job has ended."""
    job = provision.job
    process = provision("run")
    job.send(job.samples(1200))
    job.until_finished()
    out, _ = process.communicate(timeout=WAIT_TIMEOUT_S)
    assert process.returncode == 0, job.log("provision-0")
    assert "done" in out
    journal = provision.journal()
    last = [entry for entry in journal if entry["kind"] == "decision"][-1]
    assert (last["phase"], last["finished"], last["updates_done"]) == ("done", True, 40)
    orders = [entry for entry in journal if entry["kind"] == "order"]
    assert {order["slot"] for order in orders} == {0, 1}
    made = {entry["id"] for entry in journal if entry["kind"] == "launched"}
    bills = {entry["id"]: entry["usd"] for entry in journal if entry["kind"] == "ended"}
    assert bills.keys() == made, "every machine has its bill"
    assert last["spent_usd"] == pytest.approx(sum(bills.values()))
    assert all(entry.get("reasons") for entry in journal if entry["kind"] == "decision")
    job.assert_audit_ok()
    job.until(lambda: job.metrics.get("provisioner", {}).get("spent_usd", 0.0) > 0, "what it tells on `metrics`")
    shown = provision.ask("status")
    assert (shown["phase"], shown["instances"]) == ("done", [])


def test_sigterm_leaves_and_a_dry_run_changes_nothing(provision: Provisioner) -> None:
    """A dry run orders nothing; SIGTERM ends the provisioner with code 0, and its successor goes on with the job."""
    job = provision.job
    job.until_status(lambda status: True, "the server to be heard, without which nothing is launched")
    said = provision.ask("once", "--dry-run")
    assert said["dry_run"]
    assert said["markets"] == ["spot", "spot"] or "on_demand" in said["markets"]
    assert said["actions"], "it would launch"
    assert provision.journal() == []
    first = provision("run")
    job.send(job.samples(400))
    job.until_version(5)
    first.send_signal(signal.SIGTERM)
    assert first.wait(WAIT_TIMEOUT_S) == 0, job.log("provision-1")
    second = provision("run")
    job.send(job.samples(800))
    job.until_finished()
    assert second.wait(WAIT_TIMEOUT_S) == 0, job.log("provision-2")
    journal = provision.journal()
    # Not at least what the first one said: it bills a worker that has just ended until it hears of the end.
    launched = [entry for entry in journal if entry["kind"] == "launched"]
    bills = {entry["id"]: entry["usd"] for entry in journal if entry["kind"] == "ended"}
    assert bills.keys() == {entry["id"] for entry in launched}, "every machine has its bill"
    assert journal[-1]["spent_usd"] == pytest.approx(sum(bills.values())), "what was spent is not forgotten"
    incarnations = [(entry["slot"], entry["incarnation"]) for entry in launched]
    assert len(set(incarnations)) == len(incarnations), "no incarnation twice"
    job.assert_audit_ok()


def test_drain_hands_everything_back_and_stops_the_other(provision: Provisioner) -> None:
    """The drain takes the lease: the provisioner that ran ends with code 1 and starts nothing more."""
    job = provision.job
    first = provision("run")
    job.send(job.samples(200))
    job.until_version(3)
    said = provision.ask("drain")
    assert (said["phase"], said["finished"]) == ("drain", True)
    assert first.wait(WAIT_TIMEOUT_S) == 1
    assert "has taken its place" in job.log("provision-0")
    assert [market for market in said["markets"] if market] == []


@pytest.mark.parametrize("loss", [signal.SIGKILL, signal.SIGSTOP])
def test_a_standby_on_another_machine_takes_over_from_a_provisioner_that_is_lost(
    make_pipeline: MakePipeline, tmp_path: Path, loss: signal.Signals
) -> None:
    """The workers are processes of its machine. One that was only frozen finds its successor, and ends."""
    job = make_pipeline(
        *PLAN,
        "stop.updates=40",
        "provision.lease_s=3",
        f"checkpoint.folder={tmp_path}/run/checkpoints",
        "plan.alpha=0.99",
    )
    provision = Provisioner(job)
    try:
        job.start_ps()
        first = provision("run", "--standby")
        job.send(job.samples(320))
        job.until_version(3)
        other = tmp_path / "other machine"
        second = provision("run", "--standby", "--run-folder", str(other))
        job.until(lambda: "standby_waiting" in job.log("provision-1"), "the standby to wait")
        made = [entry for entry in provision.journal() if entry["kind"] == "launched"]
        (lock,) = (tmp_path / "run" / "checkpoints").glob("provision-*/.lock")
        started = psutil.Process(first.pid)
        with lock.open("w") as held:  # so that it is not stopped with the lock, without which nobody can take over
            lock_exclusively(held.fileno(), wait=True)
            first.send_signal(loss)
            until(lambda: is_gone(started) or started.status() == psutil.STATUS_STOPPED, "the signal to arrive")
        entries = partial(journal_of, other, job)
        job.until(lambda: entries("launched"), "the standby to launch")
        first.send_signal(signal.SIGCONT)
        assert first.wait(WAIT_TIMEOUT_S) == (1 if loss is signal.SIGSTOP else -signal.SIGKILL)
        job.send(job.samples(880))
        job.until_finished()
        out, _ = second.communicate(timeout=WAIT_TIMEOUT_S)
        assert second.returncode == 0, job.log("provision-1")
        assert "done" in out
        names = [(entry["slot"], entry["incarnation"]) for entry in made + entries("launched")]
        assert len(set(names)) == len(names), "no incarnation twice"
        last = entries("decision")[-1]
        ended = provision.journal() + entries("ended")
        bills = {entry["id"]: entry["usd"] for entry in ended if entry["kind"] == "ended"}
        assert bills.keys() == {entry["id"] for entry in made + entries("launched")}, "every machine has its bill"
        assert last["spent_usd"] == pytest.approx(sum(bills.values()))
        assert job.assert_audit_ok().lost == 0
    finally:
        provision.close()


def test_status_names_a_provisioner_that_is_silent(
    make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_pipeline(*PLAN)
    monkeypatch.setenv(KAFKA_ENV, job.services.kafka)
    monkeypatch.setenv(REDIS_ENV, job.services.redis)
    target = open_target(job.job_path, [], job.run)
    job.control("metrics", server_status(time_s=time.time() - 1))
    for ago_s, source in ((600, "provisioner"), (900, "producer")):
        job.control("metrics", Metric(source=source, values={"turn": 1.0}, time_s=time.time() - ago_s))
    job.control("metrics", Metric(source="producer", values={"left": 1.0}, time_s=time.time() - 800))
    status = status_of(target)
    assert isinstance(status, JobStatus)
    assert set(status.silent_s) == {"provisioner"}
    assert "silent: provisioner: no heartbeat for 10:0" in status.text()
    assert "nothing enforces the budget: start it again (doll provision run)" in status.text()
    job.control("updates", Finished(term=1, version=0, reason="updates", time_s=0.0))
    ended = status_of(target)
    assert isinstance(ended, JobStatus)
    assert ended.silent_s == {}, "a job that has finished needs none"


def test_processes_join_the_job_and_end_with_their_owner(make_pipeline: MakePipeline) -> None:
    """What `fleet.kind: processes` stands for: workers of this job on a market that says what is available."""
    job = make_pipeline(*PLAN, "fleet.speed_up=10")
    job.start_ps()
    run = RunFolder(job.run)
    with machines_of(job.config, job.services, run.path) as machines:
        assert isinstance(machines.fleet, ProcessFleet)
        assert machines.billing == LOCAL
        now = machines.prices.current(time.time())
        assert (now.spot_usd_per_h, now.on_demand_usd_per_h) == pytest.approx((1.58, 2.86)), "of the market's time"
        assert load(run.job).topic("events") == job.config.topic("events")
        made = machines.fleet.launch(Order(slot=1, incarnation=1, market="on_demand", attempt=0))
        (machine,) = machines.fleet.machines
        job.until(lambda: "joined" in job.log(made.id), "the worker to join")
        assert machine.pid is not None
        assert runs(machine.pid)
        assert machines.probe is not None
        for slot in range(2):
            before = machines.probe(slot)
            try:
                had = machines.fleet.launch(Order(slot=slot, incarnation=2, market="spot", attempt=0)).is_alive
            except LaunchError:
                had = False
            assert had in (before, machines.probe(slot))  # the market goes on while we ask
    pids = [machine.pid for machine in machines.fleet.machines if machine.pid is not None]
    job.until(lambda: not any(runs(pid) for pid in pids), "the end of the processes")


def runs(pid: int) -> bool:
    """A dead process that nobody has buried yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_job_file_is_read_again_while_the_job_runs(make_pipeline: MakePipeline) -> None:
    """Deadline, work and behaviour count from the next turn on; a wrong file does not, and is reported; K needs a new
    parameter server (docs/operations.md, "Changing one's mind")."""
    job = make_pipeline(*PLAN, "provision.every_s=3600", "plan.updates=400", "provision.heartbeat_timeout_s=60")
    provision = Provisioner(job)
    try:
        job.start_ps()
        process = provision("run")

        def decisions() -> list[dict[str, Any]]:
            assert process.poll() is None, job.log("provision-0")
            return [entry for entry in provision.journal() if entry["kind"] == "decision"]

        def edit(*overrides: str) -> None:
            """As an editor does: a new file under the old name."""
            beside = job.job_path.with_suffix(".new")
            beside.write_text(dump(load(job.job_path, list(overrides))))
            beside.replace(job.job_path)

        def until_decided(what: str, condition: Callable[[dict[str, Any]], bool]) -> None:
            job.until(lambda: any(condition(decision) for decision in decisions()[-1:]), what)

        until_decided("the first turn", lambda decision: decision["feasible"])
        edit("provision.every_s=0.5", "plan.deadline_s=15")
        # Nobody looks at the file before the next turn, which is an hour away, or here when somebody leaves.
        job.control("events", Leave(worker=99, session=1, cause="test"))
        until_decided("a deadline that cannot be met", lambda decision: not decision["feasible"])
        assert set(decisions()[-1]["markets"]) == {"on_demand"}
        turn = decisions()[-1]["turn"]
        until_decided("turns in the new rhythm", lambda decision: decision["turn"] >= turn + 8)
        edit("plan.deadline_s=90000", "plan.updates=500")
        until_decided(
            "more time and more work", lambda decision: decision["feasible"] and decision["target_updates"] == 500
        )

        job.send(job.samples(160))
        job.until_version(3)
        before = job.job_path.read_text()
        for wrong, words in (("plan.deadline_s=soon", "deadline_s"), ("data.batch_size=16", "b stays within a job"),
                             ("data.workers=3", "expected 2 slots as before, got 3")):  # fmt: skip
            if words == "deadline_s":
                job.job_path.write_text(before.replace("deadline_s: 90000", "deadline_s: soon"))
            else:
                edit(wrong)
            job.until(lambda said=words: said in refusals(job), f"a word on {wrong}")  # type: ignore[misc]
            job.job_path.write_text(before)
        turn = decisions()[-1]["turn"]
        until_decided("it goes on", lambda decision: decision["turn"] >= turn + 3 and decision["target_updates"] == 500)

        assert {len(update.members) for update in job.updates} == {2}
        edit("training.policy.group_size=1")
        job.kill("ps")
        version = job.version
        job.send(job.samples(160))
        job.until(
            lambda: any(len(update.members) == 1 for update in job.updates if update.version > version),
            "updates of one batch",
        )
        until_decided("it goes on", lambda decision: decision["updates_done"] > version)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_TIMEOUT_S) == 0, job.log("provision-0")
    finally:
        provision.close()


def refusals(job: Any) -> str:
    """What the provisioner has said of job files that it did not take."""
    return "\n".join(line for line in job.log("provision-0").splitlines() if "job_file_invalid" in line)


@pytest.mark.parametrize("make_world", WORLDS)
def test_a_job_on_a_cluster_that_loses_nodes_and_its_provisioner(
    make_pipeline: MakePipeline, tmp_path: Path, make_world: Callable[..., Any]
) -> None:
    """One node goes with a notice, one without. Between them a standby takes over, and adopts the workers."""
    overrides = (*PLAN, "stop.updates=60", "provision.lease_s=3", f"checkpoint.folder={tmp_path}/run/checkpoints",
                 "plan.alpha=0.99")  # fmt: skip
    with make_world(make_pipeline, overrides, tmp_path) as (job, world):
        provision, other = Provisioner(job), tmp_path / "other machine"
        try:
            job.start_ps()
            for _ in range(4):
                world.add()
            first = provision("run", "--standby")
            job.send(job.samples(160))
            job.until_version(3)
            second = provision("run", "--standby", "--run-folder", str(other))
            job.until(lambda: "standby_waiting" in job.log("provision-1"), "the standby to wait")
            (drained, *_) = world.of_workers()
            world.drain(drained)
            made = partial(journal_of, job.run, job, "launched")
            job.until(lambda: len(made()) == 3 and len(world.of_workers()) == 2, "the drained worker to be replaced")
            before = set(world.of_workers())
            first.kill()
            world.take_drained()
            job.until(lambda: journal_of(other, job, "decision"), "the standby to decide")
            version = job.version
            job.send(job.samples(320))
            job.until_version(version + 4)
            assert set(world.of_workers()) == before
            assert journal_of(other, job, "launched") == []
            world.kill(min(before))
            job.send(job.samples(640))
            job.until_finished()
            out, _ = second.communicate(timeout=WAIT_TIMEOUT_S)
            assert second.returncode == 0, job.log("provision-1")
            assert "done" in out
        finally:
            provision.close()
        launched = journal_of(other, job, "launched")
        assert len(launched) == 1
        ended = [*journal_of(job.run, job, "ended"), *journal_of(other, job, "ended")]
        bills = {entry["id"]: entry["usd"] for entry in ended}
        assert bills.keys() == {entry["id"] for entry in made() + launched}, "every worker has its bill"
        assert sorted(entry["end_reason"] for entry in ended) == ["interrupted"] * 2 + ["terminated"] * 2
        last = journal_of(other, job, "decision")[-1]
        assert (last["phase"], last["finished"]) == ("done", True)
        assert last["spent_usd"] == pytest.approx(sum(bills.values()))
        assert job.assert_audit_ok().lost == 0
