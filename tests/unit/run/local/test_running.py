"""The workers that a run starts and ends when its job is scaled; the error of a run whose source ended too early."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doll.local.supervisor import RoleSpec
from doll.run.folder import RunFolder
from doll.run.local import running
from doll.run.local.running import Learning, ended_early
from doll.services import Services


def test_more_samples_are_advised_only_where_nothing_failed() -> None:
    assert ended_early({"updates": 40, "accuracy": 0.97}, {}) == (
        "the source ended before the stop rule (updates 40, accuracy 0.97) was met: give it more samples"
    )
    text = ended_early({"updates": 40}, {"worker-1": (3, "exiting code=1 reason=no memory")})
    assert text.endswith("was met: worker-1 failed 3 times, last with: exiting code=1 reason=no memory")
    assert "more samples" not in text


@dataclass
class Process:
    """What a supervisor asks of a role."""

    name: str
    pid: int = 1
    code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, number: int) -> None:
        self.code = 0

    def terminate(self) -> None:
        self.code = 0

    kill = terminate


class Scaled:
    """A run of two workers, and what the server says of its job."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.workers, self.spares = 2, set[int]()
        self.stages = 0
        run = SimpleNamespace(
            config=SimpleNamespace(data=SimpleNamespace(workers=2), drift=None),
            folder=RunFolder(Path("run")),
            stack=SimpleNamespace(services=Services("", "")),
            launch=self.launch,
            worker=lambda slot: RoleSpec(f"worker-{slot}", "", Path("log")),
            stages=lambda slot: [RoleSpec(f"stage-{slot}-{at}", "", Path("log")) for at in range(self.stages)],
            display=SimpleNamespace(say=lambda text: None),
        )
        follower = SimpleNamespace(model=self, role_restarted=lambda restart: None, add_event=lambda text: None)
        self.learning = Learning(run, follower)  # type: ignore[arg-type]
        self.supervisor = self.learning._supervisor
        for slot in range(2):
            self.supervisor.start(run.worker(slot))

    def launch(self, spec: RoleSpec) -> Process:
        self.launched.append(spec.name)
        return Process(spec.name)

    @property
    def num_workers(self) -> int:
        return self.workers

    def worker_lines(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(worker=worker, is_spare=worker in self.spares) for worker in range(4)]

    def turn(self) -> list[str]:
        """Which roles are started in one turn of the run."""
        self.launched.clear()
        self.supervisor.poll()
        self.learning._match_workers()
        return self.launched.copy()


def test_a_job_that_is_scaled_gets_the_workers_that_it_is_to_have() -> None:
    run = Scaled()
    assert run.turn() == []
    run.workers = 4
    assert run.turn() == ["worker-2", "worker-3"]
    assert run.turn() == []
    run.workers, run.spares = 1, {1, 2, 3}
    assert run.turn() == []
    assert sorted(run.supervisor.handles()) == ["worker-0", "worker-1", "worker-2", "worker-3"], "they are ending"
    run.workers = 2
    assert run.turn() == ["worker-1"], "one that served nothing is started again"
    assert sorted(run.supervisor.handles()) == ["worker-0", "worker-1"]


def test_workers_that_are_added_get_their_stages_once() -> None:
    run = Scaled()
    run.stages = 2
    run.workers = 3
    assert run.turn() == ["stage-2-0", "stage-2-1", "worker-2"]
    run.workers, run.spares = 2, {2}
    run.turn()
    run.workers, run.spares = 3, set()
    assert run.turn() == ["worker-2"]


def test_a_worker_that_a_drill_has_taken_from_the_supervisor_is_not_started_beside_it() -> None:
    """The drill starts it itself; `doll drill` ended with "role 'worker-1' is running already"."""
    run = Scaled()
    spec, _ = run.supervisor.release("worker-1")
    assert run.turn() == []
    run.supervisor.start(spec)
    assert run.turn() == []


class Ended:
    """A run whose producer has ended, and whose model does not change any more; its clock goes on with each turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.history = SimpleNamespace(version=7, service_s=lambda: 0.1)
        self.finished, self.num_workers = False, 1
        self.said: list[str] = []
        self.events: list[str] = []
        self.learned_at_s, self.waits_at_s = 0.0, math.inf
        self.drifts: list[Any] = []
        run = SimpleNamespace(
            config=SimpleNamespace(
                data=SimpleNamespace(workers=1),
                group_size=1,
                source=None,
                drift=None,
                worker=SimpleNamespace(grant_timeout_s=30.0),
            ),
            launch=lambda spec: Process(spec.name),
            interrupts=SimpleNamespace(stop_requested=False),
            display=SimpleNamespace(say=self.said.append),
            hook=SimpleNamespace(tick=lambda *args: None, pids=dict),
            stack=SimpleNamespace(kafka=None, redis=None, services="services"),
            folder=SimpleNamespace(path=Path("line")),
        )
        follower = SimpleNamespace(
            model=self, role_restarted=lambda restart: None, follow=self.follow, finished=False,
            unlearned=self.unlearned, add_event=lambda text: None,
        )  # fmt: skip
        self.learning = Learning(run, follower)  # type: ignore[arg-type]
        producer = self.learning._supervisor.start(RoleSpec("producer", "", Path("log")))
        assert isinstance(producer, Process)
        producer.code = 0
        self.free_bytes = lambda: 10**9
        monkeypatch.setattr(Learning, "_write_pids", lambda self: None)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=self.free_bytes()))
        monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=lambda: self.now))

    def follow(self) -> None:
        self.now += 1.0

    def worker_lines(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(worker=0, is_spare=False, is_live=True, lag_records=0)]

    def add_event(self, text: str, at_s: float) -> None:
        self.events.append(text)

    def unlearned(self) -> int:
        return 0 if self.now >= self.learned_at_s else 2000

    def waits_for_more(self) -> bool:
        return self.now >= self.waits_at_s


@pytest.mark.parametrize(
    ("learned_at_s", "waits_at_s", "ends_s"),
    [
        (20.0, math.inf, 20.0),  # its first update takes longer than any pause between two updates
        (math.inf, 30.0, 30.0),  # a last group that is never full
        (math.inf, math.inf, 301.0),  # nothing comes of it
    ],
)
def test_records_that_somebody_works_on_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, learned_at_s: float, waits_at_s: float, ends_s: float
) -> None:
    run = Ended(monkeypatch)
    run.history.version, run.history.service_s = 0, lambda: math.nan
    run.learned_at_s, run.waits_at_s = learned_at_s, waits_at_s
    assert run.learning.follow() == running.SOURCE_ENDED
    assert ends_s <= run.now <= ends_s + 2
    assert run.said == ["the source has ended: 2000 records are read, and not learned yet"]


def test_a_full_disk_is_said_once_and_so_is_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails by it says so in the log of its process only."""
    run = Ended(monkeypatch)
    run.free_bytes = lambda: 0 if 2 <= run.now <= 4 else 10**9
    run.learning.follow()
    assert [text.partition(":")[0] for text in run.said] == [
        "no space is left on the disk of line", "there is space again for line",
    ]  # fmt: skip
    assert run.events == run.said


def test_a_run_goes_on_for_a_while_behind_the_end_of_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Ended(monkeypatch)
    assert run.learning.follow() == running.SOURCE_ENDED
    assert run.now >= running.IDLE_AFTER_SOURCE_S
