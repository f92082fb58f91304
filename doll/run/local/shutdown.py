"""The orderly end of a run's roles: a last checkpoint, a last evaluation."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from doll.local.forks import Role
from doll.local.supervisor import Handle, Supervisor
from doll.monitor.views.display import Display
from doll.run.local.follower import POLL_S, RunFollower
from doll.run.local.role_specs import PARAMETER_SERVERS

PS_STOP_S = 30.0
LAST_EVALUATION_TIMEOUT_S = 60.0


def shut_down(supervisor: Supervisor, follower: RunFollower, display: Display) -> None:
    """Stop the producer, have the parameter server save and finish the job, then wait for the last evaluation."""
    handles = supervisor.handles()
    if (producer := handles.get("producer")) is not None:
        producer.terminate()
    if servers := [handles[name] for name in PARAMETER_SERVERS if name in handles]:
        display.say("saving the last checkpoint")
        if not _finish_job(servers, follower):
            display.say(f"the parameter server did not end within {PS_STOP_S:g} s: killed")
            for server in servers:
                server.kill()
    if (evaluator := handles.get("evaluator")) is not None:
        display.say("evaluating the last version")
        _await(evaluator, LAST_EVALUATION_TIMEOUT_S if follower.finished else POLL_S, follower)


def _finish_job(servers: Sequence[Handle], follower: RunFollower) -> bool:
    """Have the parameter server end the job; False if it, or its standby, does not end in time."""
    for _ in range(round(PS_STOP_S)):
        # SIGINT ends the job, SIGTERM would only end the process. It is sent again each second, because a process
        # that has just started does not handle it yet; a standby ignores it.
        for server in servers:
            if not follower.finished and isinstance(server, Role):
                server.send_signal(signal.SIGINT)
        if all(_await(server, 1.0, follower) for server in servers):
            return True
    return False


def _await(handle: Handle, timeout_s: float, follower: RunFollower) -> bool:
    """Follow the job until a process has ended; False if it has not in time."""
    deadline_s = time.monotonic() + timeout_s
    while handle.poll() is None:
        if time.monotonic() > deadline_s:
            return False
        follower.follow()
    return True
