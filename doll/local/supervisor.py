"""Supervise roles: a failed role is restarted; a role that fails repeatedly ends the run, with the end of its log."""

from __future__ import annotations

import fnmatch
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from doll.errors import ConfigError, DataLossError, DollError
from doll.local.processes import describe_exit, tail

FIRST_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 5.0
MAX_FAILURES: Final = 5
MAX_KILLS: Final = 20  # by SIGKILL: from a person, a test, or repeatedly from a kernel without memory
HEALTHY_AFTER_S: Final = 20.0  # after this uptime a role counts as healthy, and its failures are reset
_POLL_S: Final = 0.05


class RoleFailedError(DollError):
    """A role fails after each start; the message contains the end of its log."""


@dataclass(frozen=True)
class RoleSpec:
    """A role to start; `doll.local.forks.ForkServer.start_role` describes the fields."""

    name: str
    target: str
    log_path: Path
    args: Sequence[Any] = ()
    env: Mapping[str, str] = field(default_factory=dict)


class Handle(Protocol):
    """A process, such as `Role` or `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def send_signal(self, number: int) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


@dataclass(frozen=True)
class Restart:
    """The record that a role has failed and is restarted after `backoff_s`."""

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
    """Return the wait before a restart, in seconds, after this number (1 or more) of failures in a row: 0.5, 1, 2, 4,
    5, 5, ..."""
    return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (failures - 1))


@dataclass(eq=False, repr=False)
class Supervisor:
    """A supervisor that keeps named roles running. It has no threads: call `poll` a few times a second.

    `launch` starts a role, as `ForkServer.launch` does. `on_restart` is called before the wait for each restart.
    `sleep` is used only by `stop`.
    """

    launch: Callable[[RoleSpec], Handle]
    _: KW_ONLY
    on_restart: Callable[[Restart], None] = lambda restart: None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _states: dict[str, _RoleState] = field(default_factory=dict, init=False)

    def start(self, spec: RoleSpec) -> Handle:
        """Start a role and keep it running. The name of an ended role may be used again."""
        return self._run(self._add(_RoleState(spec)))

    def poll(self) -> None:
        """Check which roles have exited, and restart those whose wait is over.

        Raises:
            RoleFailedError: a role has failed 5 times in a row, each time within 20 s of its start. If SIGKILL caused
                the last failure, the limit is 20 failures, because the role itself is not the cause.
            ConfigError: a role reports with exit code 2 that the job file or task is invalid; it is not restarted.
            DataLossError: a role reports with exit code 4 that records were deleted before they were learned.
        """
        for state in self._states.values():
            if state.handle is not None and (code := state.handle.poll()) is not None:
                state.handle = None
                self._ended(state, code)
            if state.restart_at_s is not None and self.clock() >= state.restart_at_s:
                state.restart_at_s = None
                self._run(state)

    def _run(self, state: _RoleState) -> Handle:
        state.started_s = self.clock()
        state.handle = self.launch(state.spec)
        return state.handle

    def _ended(self, state: _RoleState, code: int) -> None:
        if code == 0:
            state.exit_code = 0
            return
        uptime_s = self.clock() - state.started_s
        state.failures = state.failures + 1 if uptime_s < HEALTHY_AFTER_S else 1
        log_tail = f"the end of {state.spec.log_path}:\n{tail(state.spec.log_path)}"
        if code == ConfigError.exit_code:
            state.exit_code = code
            raise ConfigError(f"{state.spec.name} cannot run this job; {log_tail}")
        if code == DataLossError.exit_code:
            state.exit_code = code
            raise DataLossError(f"{state.spec.name}: records are gone before they were learned; {log_tail}")
        if state.failures >= (MAX_KILLS if code == -signal.SIGKILL else MAX_FAILURES):
            state.exit_code = code
            raise RoleFailedError(
                f"{state.spec.name} failed {state.failures} times in a row within {HEALTHY_AFTER_S:g} s of its start, "
                f"the last time with {describe_exit(code)}; {log_tail}"
            )
        wait_s = backoff_s(state.failures)
        state.restart_at_s = self.clock() + wait_s
        self.on_restart(Restart(state.spec.name, code, state.failures, wait_s))

    def reset_failures(self, name: str) -> None:
        """Reset the failures of a role, before it is killed intentionally."""
        self._states[name].failures = 0

    def release(self, name: str) -> tuple[RoleSpec, Handle]:
        """Stop supervising this role. Its process continues, and the name is free. Raise ValueError if it has ended."""
        state = self._states.get(name)
        if state is None or state.handle is None:
            raise ValueError(f"expected a running role, got {name!r}")
        del self._states[name]
        return state.spec, state.handle

    def adopt(self, spec: RoleSpec, handle: Handle) -> None:
        """Supervise a running process. Its name must be free, or the role of that name must have ended."""
        self._add(_RoleState(spec, handle, self.clock()))

    def _add(self, state: _RoleState) -> _RoleState:
        old = self._states.get(state.spec.name)
        if old is not None and old.exit_code is None:
            raise ValueError(f"role {state.spec.name!r} is running already")
        self._states[state.spec.name] = state
        return state

    def handles(self) -> dict[str, Handle]:
        """Return the running roles, by name."""
        return {name: state.handle for name, state in self._states.items() if state.handle is not None}

    def exit_codes(self) -> dict[str, int | None]:
        """Return the exit code by role: 0 if it has ended normally, another code if it is not restarted any more,
        otherwise None."""
        return {name: state.exit_code for name, state in self._states.items()}

    def stop(self, order: Iterable[str] = (), grace_s: float = 10.0) -> None:
        """Stop all roles: SIGTERM, and SIGKILL for roles that still run after `grace_s`. No role is restarted.

        Args:
            order: patterns such as `worker-*`, in the order of stopping. The roles of one pattern are stopped together.
                Roles that match no pattern are stopped last.
            grace_s: time for the roles of each pattern, in seconds.
        """
        for state in self._states.values():
            state.restart_at_s = None
        for pattern in (*order, "*"):
            self._stop_matching(pattern, grace_s)

    def _stop_matching(self, pattern: str, grace_s: float) -> None:
        handles = {name: handle for name, handle in self.handles().items() if fnmatch.fnmatch(name, pattern)}
        for handle in handles.values():
            handle.terminate()
        deadline_s = self.clock() + grace_s
        while handles:
            for name, handle in list(handles.items()):
                if (code := handle.poll()) is not None:
                    del handles[name]
                    self._states[name].handle, self._states[name].exit_code = None, code
                elif self.clock() >= deadline_s:
                    handle.kill()
            if handles:
                self.sleep(_POLL_S)
