"""Keep named roles running: one that fails is started again; one that keeps failing ends all, with its last words."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from doll.errors import ConfigError, DataLossError, DollError
from doll.local.processes import describe_exit, tail

FIRST_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 5.0
MAX_FAILURES: Final = 5
HEALTHY_AFTER_S: Final = 20.0  # a run of this length is a success: failures are counted from anew
_POLL_S: Final = 0.05


class RoleFailedError(DollError):
    """A role fails each time it is started: its log says why."""


@dataclass(frozen=True)
class RoleSpec:
    """What is started under a name; see `doll.local.forks.ForkServer.start_role` for the other fields."""

    name: str
    target: str
    log_path: Path
    args: Sequence[Any] = ()
    env: Mapping[str, str] = field(default_factory=dict)


class Handle(Protocol):
    """A process, as `Role` and `subprocess.Popen` are."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def send_signal(self, number: int) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


@dataclass(frozen=True)
class Restart:
    """A role has ended with an error and is started again after `backoff_s`."""

    name: str
    exit_code: int
    failures: int
    backoff_s: float


@dataclass
class _RoleState:
    spec: RoleSpec
    handle: Handle | None = None
    started_s: float = 0.0
    failures: int = 0
    restart_at_s: float | None = None
    exit_code: int | None = None


def backoff_s(failures: int) -> float:
    """Wait before the restart after this number (1 or more) of failures in a row: 0.5, 1, 2, 4, 5, 5, ... s."""
    return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (failures - 1))


class Supervisor:
    """Named roles, kept running. No threads: call `poll` a few times a second.

    Args:
        launch: starts a role, as `fork_server.launch` does.
        on_restart: told of each restart, before the wait for it.
        clock: monotonic seconds.
        sleep: waits; only `stop` uses it.
    """

    def __init__(
        self,
        launch: Callable[[RoleSpec], Handle],
        *,
        on_restart: Callable[[Restart], None] = lambda restart: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._launch = launch
        self._on_restart = on_restart
        self._clock = clock
        self._sleep = sleep
        self._states: dict[str, _RoleState] = {}

    def start(self, spec: RoleSpec) -> Handle:
        """Start a role and keep it running from now on. A name that has ended may be used again."""
        old = self._states.get(spec.name)
        if old is not None and old.exit_code is None:
            raise ValueError(f"role {spec.name!r} runs already")
        state = self._states[spec.name] = _RoleState(spec)
        return self._run(state)

    def poll(self) -> None:
        """Look after the roles: note which have ended, start again those whose wait is over.

        Raises:
            RoleFailedError: a role has failed 5 times in a row, each time within 20 s of its start.
            ConfigError: a role says (by exit code 2) that the job file or the task is wrong: another try would be in
                vain.
            DataLossError: a role says (by exit code 4) that records are gone before they were learned.
        """
        for state in self._states.values():
            if state.handle is not None and (code := state.handle.poll()) is not None:
                state.handle = None
                self._ended(state, code)
            if state.restart_at_s is not None and self._clock() >= state.restart_at_s:
                state.restart_at_s = None
                self._run(state)

    def _run(self, state: _RoleState) -> Handle:
        state.started_s = self._clock()
        state.handle = self._launch(state.spec)
        return state.handle

    def _ended(self, state: _RoleState, code: int) -> None:
        if code == 0:
            state.exit_code = 0
            return
        uptime_s = self._clock() - state.started_s
        state.failures = state.failures + 1 if uptime_s < HEALTHY_AFTER_S else 1
        log_tail = f"the end of {state.spec.log_path}:\n{tail(state.spec.log_path)}"
        if code == ConfigError.exit_code:
            state.exit_code = code
            raise ConfigError(f"{state.spec.name} cannot run this job as it is; {log_tail}")
        if code == DataLossError.exit_code:
            state.exit_code = code
            raise DataLossError(f"{state.spec.name}: records are gone before they were learned; {log_tail}")
        if state.failures >= MAX_FAILURES:
            state.exit_code = code
            raise RoleFailedError(
                f"{state.spec.name} failed {state.failures} times in a row within {HEALTHY_AFTER_S:g} s of its start, "
                f"the last time with {describe_exit(code)}; {log_tail}"
            )
        wait_s = backoff_s(state.failures)
        state.restart_at_s = self._clock() + wait_s
        self._on_restart(Restart(state.spec.name, code, state.failures, wait_s))

    def reset_failures(self, name: str) -> None:
        """Forget how often this role has failed: it is about to be killed on purpose."""
        self._states[name].failures = 0

    def release(self, name: str) -> tuple[RoleSpec, Handle]:
        """Look after this role no more; the process lives on, and the name is free.

        Raises:
            ValueError: it does not run.
        """
        state = self._states.get(name)
        if state is None or state.handle is None:
            raise ValueError(f"expected a role that runs, got {name!r}")
        del self._states[name]
        return state.spec, state.handle

    def adopt(self, spec: RoleSpec, handle: Handle) -> None:
        """Look after a process that runs already; its name must be free or have ended."""
        old = self._states.get(spec.name)
        if old is not None and old.exit_code is None:
            raise ValueError(f"role {spec.name!r} runs already")
        self._states[spec.name] = _RoleState(spec, handle, self._clock())

    def handles(self) -> dict[str, Handle]:
        """The roles that run now, by name."""
        return {name: state.handle for name, state in self._states.items() if state.handle is not None}

    def exit_codes(self) -> dict[str, int | None]:
        """For each name 0 once it has ended well, its code once it is given up, else None."""
        return {name: state.exit_code for name, state in self._states.items()}

    def stop(self, order: Iterable[str] = (), grace_s: float = 10.0) -> None:
        """End all roles: SIGTERM, and SIGKILL for those that still run after `grace_s`. Nothing is started again.

        Args:
            order: patterns as `worker-*`, one after the other; roles of one pattern are ended together, and those that
                no pattern names at last.
            grace_s: for each pattern.
        """
        for state in self._states.values():
            state.restart_at_s = None
        for pattern in (*order, "*"):
            self._stop_matching(pattern, grace_s)

    def _stop_matching(self, pattern: str, grace_s: float) -> None:
        states = [
            state for name, state in self._states.items() if state.handle is not None and fnmatch.fnmatch(name, pattern)
        ]
        for state in states:
            if state.handle is not None:
                state.handle.terminate()
        deadline_s = self._clock() + grace_s
        while states := self._still_running(states):
            if self._clock() >= deadline_s:
                for state in states:
                    if state.handle is not None:
                        state.handle.kill()
            self._sleep(_POLL_S)

    def _still_running(self, states: Iterable[_RoleState]) -> list[_RoleState]:
        left = []
        for state in states:
            code = state.handle.poll() if state.handle is not None else None
            if state.handle is not None and code is None:
                left.append(state)
            else:
                state.handle, state.exit_code = None, code
        return left
