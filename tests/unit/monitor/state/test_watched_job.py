"""What a page keeps of a job: the newest records, bounded, and events with their times."""

from pathlib import Path

from doll.monitor.state import progress, watched_job
from doll.monitor.state.folder_logs import EventLog, append_event
from doll.monitor.state.watched_job import Decisions, PageState, ProcessEvent
from doll.records.control import Finished
from page_feed import MadeUpJob
from record_builders import term_started, update


def state_of(made_up: MadeUpJob) -> PageState:
    return made_up.read(lambda state: state)


def test_a_job_that_runs_is_live_and_its_offsets_follow_each_other() -> None:
    made_up = MadeUpJob()
    made_up.run(5)
    state = state_of(made_up)
    assert state.is_live
    assert state.now_s == made_up.now_s
    assert state.continuity is not None
    assert (state.continuity.offsets, state.continuity.problem) == (20 * 4 * 32, "")
    assert [update.version for update in state.updates] == list(range(1, 21))
    assert state.served_by == {n: n for n in range(8)}


def test_workers_that_come_and_go_are_events() -> None:
    made_up = MadeUpJob()
    made_up.run(1)
    made_up.kill(3)
    made_up.run(1)
    state = state_of(made_up)
    assert [text for _, text in state.events] == ["workers 0-7: live", "worker 3: gone"]
    assert state.last_events[3] == (made_up.now_s, "gone")
    assert state.last_events[2][1] == "live"


def test_of_updates_the_newest_are_kept() -> None:
    made_up = MadeUpJob(workers=2, members=2)
    made_up.run(progress.MAX_UPDATES // 4 + 3)
    updates = state_of(made_up).updates
    assert len(updates) == progress.MAX_UPDATES
    assert updates[-1].version == progress.MAX_UPDATES + 12


def test_of_large_updates_fewer_are_kept() -> None:
    made_up = MadeUpJob(workers=4, members=4)
    made_up.run(1)
    many = update(1, 5, *[(0, batch) for batch in range(progress.MAX_MEMBERS + 1)])
    made_up.feed(many)
    assert [item.version for item in state_of(made_up).updates] == [5]


def test_a_new_generation_drops_what_was_of_the_earlier_one() -> None:
    made_up = MadeUpJob()
    made_up.refuse(3, "no JSON")
    made_up.run(3)
    made_up.feed(term_started(2, generation=2, origins=(0,) * 8))
    state = state_of(made_up)
    assert (len(state.updates), len(state.letters), len(state.events)) == (0, 0, 0)


def test_an_earlier_run_on_the_same_topics_is_not_shown() -> None:
    job = watched_job.WatchedJob(MadeUpJob().config, 0.0, after_term=1)
    job.feed(term_started(1))
    job.feed(update(1, 1, (0, 0)))
    state = job.state(0.0, 0.0)
    assert (state.snapshot.version, len(state.updates)) == (0, 0)
    assert state.continuity is not None
    assert state.continuity.offsets == 0


def test_dead_letters_keep_the_beginning_of_their_content() -> None:
    made_up = MadeUpJob()
    made_up.refuse(3, "no JSON", b"x" * 5_000)
    made_up.refuse(4, "sent again", code="replayed")
    (letter,) = state_of(made_up).letters
    assert len(letter.payload) == watched_job.MAX_PAYLOAD_BYTES
    assert letter.payload_bytes == 5_000


def test_a_job_that_has_ended_is_not_live() -> None:
    made_up = MadeUpJob()
    made_up.run(2)
    made_up.feed(Finished(term=1, version=8, reason="updates: 8 reached", time_s=made_up.now_s))
    state = state_of(made_up)
    assert not state.is_live
    assert state.snapshot.finished == "updates: 8 reached"


def test_a_role_that_is_silent_is_named() -> None:
    made_up = MadeUpJob()
    made_up.run(2)
    late = made_up.watched.state(0.0, made_up.now_s + 60)
    assert set(late.silent_s) == {"ps", *(f"worker-{n}" for n in range(8))}
    assert state_of(made_up).silent_s == {}


def test_a_decision_of_the_journal_and_of_the_topic_is_one() -> None:
    decisions = Decisions()
    plain = {"turn": 1, "actions": [], "phase": "run", "binding": "none", "markets": ["spot"], "alarms": []}
    decisions.add(plain)
    decisions.add({**plain, "spent_usd": 1.0})
    assert (len(decisions.notable), decisions.newest["spent_usd"]) == (1, 1.0)
    decisions.add({**plain, "turn": 2})
    assert len(decisions.notable) == 1, "it changes nothing"
    decisions.add({**plain, "turn": 3, "markets": ["on_demand"]})
    assert [item["turn"] for item in decisions.notable] == [1, 3]


def test_decisions_of_the_topic_have_their_numbers_and_reasons() -> None:
    made_up = MadeUpJob()
    made_up.run(1)
    made_up.decide("slot 3: launch incarnation 2 on_demand")
    newest = state_of(made_up).decisions.newest
    assert newest["expected_finish_sd_s"] == 4.2
    assert newest["elapsed_s"] == 1.0
    assert newest["reasons"] == {
        "spot is cheaper and the slack can bear its loss": "0-4",
        "without it the work would not be done in time": "5-7",
    }


def test_a_launch_that_is_tried_again_and_again_is_one_decision() -> None:
    decisions = Decisions()
    plain = {"phase": "run", "binding": "none", "markets": ["spot"], "alarms": []}
    tried = ["slot 0: launch incarnation 2 spot: no capacity"]
    for turn, actions in enumerate([tried, tried, [], tried, ["slot 0: launch incarnation 2 spot: i-1"]]):
        decisions.add({**plain, "turn": turn, "actions": actions})
    assert [item["turn"] for item in decisions.notable] == [0, 3, 4]


def test_what_happens_to_processes_of_this_machine_is_an_event(tmp_path: Path) -> None:
    made_up = MadeUpJob()
    made_up.run(1)
    log = EventLog(tmp_path)
    assert list(log.read()) == []
    append_event(tmp_path, ProcessEvent(5.0, "Kafka died: restarting it", "kafka"))
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('no json\n{"text": 3}\n')
    append_event(tmp_path, ProcessEvent(6.0, "something"))
    for event in log.read():
        made_up.watched.note(event)
    assert list(log.read()) == []
    state = state_of(made_up)
    assert [*state.events][-2:] == [(5.0, "Kafka died: restarting it"), (6.0, "something")]
    assert dict(state.restarts) == {"kafka": 1}
    append_event(tmp_path / "not there", ProcessEvent(7.0, "the disk is full"))
