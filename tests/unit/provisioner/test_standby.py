"""Two provisioners of one job: one acts at a time, whatever happens, and the state goes from one to the other."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from doll.config import load
from doll.errors import CheckpointError, FencedError
from doll.provisioner.billing import MARKETS
from doll.provisioner.lease import DOCUMENT, Holder, Lease, LeaseWatch, claims_of, holder_of, wait_for_lease
from doll.provisioner.state_store import FileStateStore, SharedStateStore
from doll.storage.file_checkpoints import FileCheckpointStore
from fake_fleet import VirtualClock
from fuzzing import examples
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from memory_stores import MemoryCheckpointStore
from standby_scenario import Host, StandbyScenario


@pytest.mark.slow  # random runs
@given(st.integers(0, 2**32))
@example(22)  # frozen between two launches
@hypothesis_settings(max_examples=examples(25), deadline=None)
def test_deaths_freezes_cuts_and_lost_answers(seed: int) -> None:
    scenario = StandbyScenario(seed, MemoryCheckpointStore("t"), faults=15)
    scenario.play()
    scenario.check()


def test_a_machine_that_is_launched_after_the_jobs_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen at its last launch, which the other got no machine for, until the other has ended the job."""
    scenario = StandbyScenario(1, MemoryCheckpointStore("t"), faults=0, wild=False)
    first, meanwhile = scenario.owner, scenario.meanwhile
    scenario.longest_freeze = True

    def without_capacity(frozen: Host) -> None:
        for pool, market in itertools.product(scenario.fleet.pools, MARKETS):
            scenario.fleet.set_capacity(pool, market, 0)
        meanwhile(frozen)
        assert scenario.ended
        assert scenario.fleet.alive() == []
        for pool, market in itertools.product(scenario.fleet.pools, MARKETS):
            scenario.fleet.set_capacity(pool, market, None)

    monkeypatch.setattr(scenario, "meanwhile", without_capacity)
    first.light(4, "freeze before", "launch")
    scenario.step()
    assert scenario.owner is not first
    assert len(scenario.fleet.all_instances()) == 4, "the late one too"
    assert scenario.fleet.alive() == []


def store(folder: Path, number: int = 0, *, local: str = "a") -> SharedStateStore:
    claims = FileCheckpointStore(folder / "provision", "t")
    return SharedStateStore(claims, FileStateStore(folder / local, "t"), number)


def test_the_state_goes_to_a_successor_on_another_machine_and_the_first_saves_no_more(tmp_path: Path) -> None:
    first, second = store(tmp_path, 1), store(tmp_path, 2, local="b")
    first.take()
    assert first.load() is None
    first.save({"turn": 1})
    second.take()
    assert second.load() == {"turn": 1}
    with pytest.raises(FencedError, match="provisioner 1 of this job is over: provisioner 2 has its state"):
        first.save({"turn": 2})
    assert first.load() == {"turn": 1}, "it may look, as a status does"
    with pytest.raises(FencedError):
        first.save({"turn": 2})
    second.save({"turn": 3})
    assert store(tmp_path).load() == {"turn": 3}
    with pytest.raises(FencedError):
        first.take()


def test_what_is_saved_during_a_take_over_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its orders may have been made."""
    first, second = store(tmp_path, 1), store(tmp_path, 2)
    first.take()
    first.save({"turn": 1})
    claims = second._store
    read = claims.read_document

    def then_the_first_saves(name: str) -> Any:
        answer = read(name)
        monkeypatch.undo()
        first.save({"turn": 2})
        return answer

    monkeypatch.setattr(claims, "read_document", then_the_first_saves)
    second.take()
    assert second.load() == {"turn": 2}


def test_an_answer_that_was_lost_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = store(tmp_path, 1)
    first.take()
    replace = first._store.replace_document

    def lost(*arguments: Any) -> Any:
        replace(*arguments)
        monkeypatch.undo()
        raise CheckpointError("the answer was lost")

    monkeypatch.setattr(first._store, "replace_document", lost)
    with pytest.raises(CheckpointError):
        first.save({"turn": 1})
    first.save({"turn": 2})
    assert first.load() == {"turn": 2}


def test_the_state_of_an_earlier_release_is_taken_over_once(tmp_path: Path) -> None:
    local = FileStateStore(tmp_path / "a", "t")
    local.save({"turn": 7})
    assert store(tmp_path).load() == {"turn": 7}, "one that only looks moves nothing"
    assert local.state.exists()
    store(tmp_path, 1).take()
    assert store(tmp_path, local="b").load() == {"turn": 7}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["provision-t.json.moved"]
    local.save({"turn": 1})
    store(tmp_path, 2).take()
    assert store(tmp_path).load() == {"turn": 7}


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"provisioner": 1}', b'{"provisioner": "x", "kept": {}}', b"\xff"]
)
def test_a_document_that_is_no_use_is_no_obstacle(tmp_path: Path, content: bytes) -> None:
    first = store(tmp_path, 1)
    first.take()
    (tmp_path / "provision" / "state.json").write_bytes(content)
    (tmp_path / "provision" / DOCUMENT).write_bytes(content)
    assert first.load() is None
    first.save({"turn": 1})
    assert first.load() == {"turn": 1}
    lease = Lease(FileCheckpointStore(tmp_path / "provision", "t"))
    lease.renew()
    assert holder_of(FileCheckpointStore(tmp_path / "provision", "t")) == Holder(1, 1)


# --- the lease


def test_a_lease_is_over_when_nothing_new_was_seen_for_its_length() -> None:
    watch = LeaseWatch(30.0, now=100.0)
    assert watch.look(Holder(1, 1), 129.0) == "held"
    assert watch.look(Holder(1, 2), 158.0) == "held"
    assert watch.look(Holder(1, 2), 187.9) == "held"
    assert watch.look(Holder(1, 2), 188.0) == "over"


def test_a_store_that_does_not_answer_says_nothing_about_the_holder() -> None:
    watch = LeaseWatch(30.0, now=0.0)
    watch.look(Holder(1, 1), 0.0)
    watch.restart(100.0)
    assert watch.look(Holder(1, 1), 110.0) == "held"
    assert watch.look(Holder(1, 1), 130.0) == "over"


@pytest.mark.parametrize(("state", "seen"), [("left", "over"), ("ended", "ended")])
def test_a_holder_that_says_why_it_stops_is_not_waited_for(state: Any, seen: str) -> None:
    watch = LeaseWatch(30.0, now=0.0)
    watch.look(Holder(1, 1), 0.0)
    assert watch.look(Holder(1, 2, state), 1.0) == seen
    again = LeaseWatch(30.0, now=0.0)
    assert again.look(Holder(1, 2, state), 0.0) == "over", "of a job that may be going on again"


def test_a_lease_is_renewed_when_it_is_due_and_only_by_its_holder(tmp_path: Path) -> None:
    clock, claims = VirtualClock(), FileCheckpointStore(tmp_path, "t")
    first = Lease(claims, 30.0, clock=clock)
    first.renew_if_due()
    first.renew_if_due()
    assert holder_of(claims) == Holder(1, 1)
    clock.advance(10.0)
    first.check()
    assert holder_of(claims) == Holder(1, 2)
    second = Lease(claims, 30.0, clock=clock)
    second.renew()
    clock.advance(10.0)
    with pytest.raises(FencedError, match="provisioner 2 has taken its place"):
        first.renew_if_due()
    with pytest.raises(FencedError):
        first.end("left")
    assert holder_of(claims) == Holder(2, 1)
    second.end("ended")
    assert json.loads((tmp_path / DOCUMENT).read_text())["state"] == "ended"


class Waits:
    """The waits of a standby, each of which lets something happen."""

    def __init__(self, *events: Any) -> None:
        self._events = list(events)

    def __call__(self, seconds: float) -> bool:
        event = self._events.pop(0)
        return bool(event()) if callable(event) else bool(event)


def test_a_standby_begins_where_there_was_nobody_and_ends_with_the_job(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("job: t\ntask: {class: 'a:B'}\nprovision: {lease_s: 600}\n")
    config = load(path)
    assert wait_for_lease(config, tmp_path, Waits())
    lease = Lease(claims_of(config, tmp_path))
    assert not wait_for_lease(config, tmp_path, Waits(False)), "a request to stop"
    lease.renew()
    assert not wait_for_lease(config, tmp_path, Waits(True, lambda: lease.end("ended") or True))
    lease.renew()
    assert wait_for_lease(config, tmp_path, Waits(lambda: lease.end("left") or True))
