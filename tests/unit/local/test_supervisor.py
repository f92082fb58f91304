"""The supervisor restarts what fails, waits longer each time, gives up with the last words, and stops in order."""

from __future__ import annotations

from pathlib import Path

import pytest
from doll.errors import ConfigError, DataLossError
from doll.local.supervisor import MAX_BACKOFF_S, Restart, RoleFailedError, RoleSpec, Supervisor, backoff_s
from hypothesis import given
from hypothesis import strategies as st


class FakeProcess:
    """A process whose end the test decides."""

    pid = 1

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.code: int | None = None
        self.stubborn = False

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, number: int) -> None:
        raise AssertionError("the supervisor terminates or kills")

    def terminate(self) -> None:
        self.world.signals.append(("TERM", self.name))
        if not self.stubborn:
            self.code = -15

    def kill(self) -> None:
        self.world.signals.append(("KILL", self.name))
        self.code = -9


class World:
    """A clock that only `sleep` and the test move, and all processes that were launched."""

    def __init__(self, tmp_path: Path) -> None:
        self.now_s = 0.0
        self.log_path = tmp_path / "role.log"
        self.launched: list[FakeProcess] = []
        self.signals: list[tuple[str, str]] = []
        self.restarts: list[Restart] = []
        self.supervisor = Supervisor(
            self.launch, on_restart=self.restarts.append, clock=lambda: self.now_s, sleep=self.sleep
        )

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def launch(self, spec: RoleSpec) -> FakeProcess:
        self.launched.append(FakeProcess(self, spec.name))
        return self.launched[-1]

    def start(self, name: str) -> FakeProcess:
        self.supervisor.start(RoleSpec(name, "m:f", self.log_path))
        return self.launched[-1]

    def fail_now(self, code: int = 1) -> None:
        """End the newest process and wait out the backoff."""
        launched = len(self.launched)
        self.launched[-1].code = code
        self.supervisor.poll()
        while len(self.launched) == launched:
            self.now_s += 0.1
            self.supervisor.poll()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_role_that_ends_well_is_not_started_again(world: World) -> None:
    world.start("w").code = 0
    world.supervisor.poll()
    world.now_s += 100
    world.supervisor.poll()
    assert len(world.launched) == 1
    assert world.supervisor.exit_codes() == {"w": 0}
    assert world.supervisor.handles() == {}


def test_a_role_that_fails_is_started_again_after_its_wait_and_not_before(world: World) -> None:
    world.start("w").code = -9
    world.supervisor.poll()
    assert world.restarts == [Restart("w", -9, failures=1, backoff_s=0.5)]
    world.now_s = 0.49
    world.supervisor.poll()
    assert len(world.launched) == 1
    world.now_s = 0.5
    world.supervisor.poll()
    assert len(world.launched) == 2
    assert world.supervisor.handles() == {"w": world.launched[1]}


def test_a_role_that_keeps_failing_ends_with_its_last_fifteen_lines(world: World) -> None:
    world.log_path.write_text("".join(f"line {number}\n" for number in range(40)))
    world.start("w")
    for _ in range(4):
        world.fail_now()
    assert [restart.backoff_s for restart in world.restarts] == [0.5, 1.0, 2.0, 4.0]
    world.launched[-1].code = -11
    with pytest.raises(RoleFailedError, match=r"w failed 5 times .* killed by SIGSEGV") as caught:
        world.supervisor.poll()
    assert "line 25\n" in str(caught.value)
    assert "line 39" in str(caught.value)
    assert "line 24\n" not in str(caught.value)


def test_a_role_that_is_killed_again_and_again_is_given_more_time(world: World) -> None:
    world.start("w")
    for _ in range(19):
        world.fail_now(-9)
    assert {restart.backoff_s for restart in world.restarts[4:]} == {5.0}
    world.launched[-1].code = -9
    with pytest.raises(RoleFailedError, match=r"w failed 20 times .* killed by SIGKILL"):
        world.supervisor.poll()


def test_failures_after_a_long_life_do_not_add_up(world: World) -> None:
    world.start("w")
    for _ in range(12):
        world.now_s += 20.0
        world.fail_now()
    assert {restart.failures for restart in world.restarts} == {1}


def test_a_wrong_configuration_is_not_tried_again(world: World) -> None:
    world.log_path.write_text("job: unknown key\n")
    world.start("w").code = 2
    with pytest.raises(ConfigError, match="job: unknown key"):
        world.supervisor.poll()
    assert world.restarts == []


def test_lost_records_do_not_come_back_by_trying_again(world: World) -> None:
    world.log_path.write_text("samples/0: records 5 to 9 were deleted\n")
    world.start("worker-0").code = DataLossError.exit_code
    with pytest.raises(DataLossError, match=r"worker-0: records are gone .*(?s:.)*records 5 to 9 were deleted"):
        world.supervisor.poll()
    assert len(world.launched) == 1


def test_a_name_that_runs_cannot_be_started_twice(world: World) -> None:
    world.start("w")
    with pytest.raises(ValueError, match="is running already"):
        world.start("w")


def test_stop_goes_pattern_by_pattern_and_the_unnamed_last(world: World) -> None:
    for name in ("ps", "worker-0", "evaluator", "worker-1", "producer"):
        world.start(name)
    world.supervisor.stop(("producer", "worker-*", "evaluator"))
    assert [name for signal, name in world.signals] == ["producer", "worker-0", "worker-1", "evaluator", "ps"]
    assert {signal for signal, _ in world.signals} == {"TERM"}
    assert world.supervisor.handles() == {}


def test_stop_kills_who_does_not_go_within_the_grace(world: World) -> None:
    world.start("mule").stubborn = True
    world.start("lamb")
    world.supervisor.stop(grace_s=3.0)
    assert world.signals == [("TERM", "mule"), ("TERM", "lamb"), ("KILL", "mule")]
    assert world.now_s == pytest.approx(3.0, abs=0.2)


def test_nothing_is_started_again_after_stop(world: World) -> None:
    world.start("w").code = 1
    world.supervisor.poll()
    world.supervisor.stop()
    world.now_s += 10
    world.supervisor.poll()
    assert len(world.launched) == 1


@given(st.integers(1, 1000))
def test_waits_grow_up_to_their_limit(failures: int) -> None:
    assert 0.5 <= backoff_s(failures) <= backoff_s(failures + 1) <= MAX_BACKOFF_S


def test_a_role_killed_on_purpose_is_forgiven(world: World) -> None:
    world.start("w")
    for _ in range(20):  # far more than a role may fail by itself
        world.supervisor.reset_failures("w")
        world.fail_now(-9)
    assert [restart.backoff_s for restart in world.restarts] == [0.5] * 20


def test_a_released_role_lives_on_and_its_name_is_free(world: World) -> None:
    first = world.start("w")
    spec, handle = world.supervisor.release("w")
    assert handle is first
    assert spec.name == "w"
    with pytest.raises(ValueError, match="'w'"):
        world.supervisor.release("w")
    second = world.supervisor.start(spec)
    first.code = 1  # nobody's business any more
    world.supervisor.poll()
    world.now_s += 100
    world.supervisor.poll()
    assert world.supervisor.handles() == {"w": second}
    world.supervisor.stop()
    assert world.signals == [("TERM", "w")]


def test_an_adopted_process_is_looked_after(world: World) -> None:
    first = world.start("w")
    spec, handle = world.supervisor.release("w")
    world.supervisor.start(spec)
    with pytest.raises(ValueError, match="is running already"):
        world.supervisor.adopt(spec, handle)
    world.launched[-1].code = 0
    world.supervisor.poll()
    world.supervisor.adopt(spec, handle)
    assert world.supervisor.handles() == {"w": first}
    first.code = 1
    world.supervisor.poll()
    world.now_s += 1
    world.supervisor.poll()
    assert len(world.launched) == 3
