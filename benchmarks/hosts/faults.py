"""Faults of a job on several hosts: two of them are cut apart, both ways or one way, and roles are killed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.hosts.job import SERVICES, RunningJob

_CUT_SHARE: Final = 0.75
_KILL_IN_CUT: Final = 0.2  # share of the cuts in which a role is killed as well
_HOLD_S: Final = (0.5, 8.0)
_GAP_S: Final = 1.0
_RECOVERY_S: Final = 120.0
_WAYS: Final = ("both ways", "to it", "from it")


@dataclass(frozen=True, slots=True)
class HostFault:
    """One fault.

    Attributes:
        host: whose role is cut off or killed.
        services: hosts that it is cut from; none: nothing is cut.
        way: of the cut, as seen from the service.
        kill: a role that is killed when the cut has begun; "": none.
    """

    host: str
    services: tuple[str, ...] = ()
    way: str = ""
    hold_s: float = 0.0
    kill: str = ""

    def cuts(self) -> list[tuple[str, str]]:
        """As of `Network.cut`."""
        pairs: list[tuple[str, str]] = []
        for service in self.services:
            pairs += [(self.host, service)] if self.way != "from it" else []
            pairs += [(service, self.host)] if self.way != "to it" else []
        return pairs

    def text(self) -> str:
        """What happens, in a few words."""
        parts = []
        if self.services:
            parts.append(f"cut {self.host} from {' and '.join(self.services)}, {self.way}, {self.hold_s:.1f} s")
        if self.kill:
            parts.append(f"kill {self.kill}")
        return "; ".join(parts)


def make_plan(number: int, seed: int, roles: Sequence[str]) -> list[HostFault]:
    """So many faults of these roles. Of the cuts most are between two hosts; some take a host from both services."""
    rng = random.Random(seed)
    plan = []
    for _ in range(number):
        host = rng.choice(roles)
        if rng.random() >= _CUT_SHARE:
            plan.append(HostFault(host, kill=host))
            continue
        services = rng.choice(((SERVICES[0],), (SERVICES[1],), (SERVICES[0],), (SERVICES[1],), SERVICES))
        kill = rng.choice(roles) if rng.random() < _KILL_IN_CUT else ""
        plan.append(HostFault(host, services, rng.choice(_WAYS), rng.uniform(*_HOLD_S), kill))
    return plan


def inject(job: RunningJob, plan: Sequence[HostFault], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Carry out one fault after the other, each once the job has recovered from the one before.

    Returns:
        For each fault what it was, and the seconds from its end to the next two updates.

    Raises:
        TimeoutError: no update came for 120 s after a fault.
    """
    lines = []
    job.wait_for_updates(3)
    for number, fault in enumerate(plan, 1):
        say(f"fault {number} of {len(plan)}: {fault.text()}")
        before = len(job.updates)
        job.site.network.cut(fault.cuts())
        end_s = time.monotonic() + fault.hold_s
        if fault.kill and (handle := job.supervisor.handles().get(fault.kill)) is not None:
            job.supervisor.reset_failures(fault.kill)
            handle.kill()
        job.follow(max(end_s - time.monotonic(), 0.0))
        meanwhile = len(job.updates) - before
        job.site.network.cut(())
        healed_s = time.monotonic()
        job.wait_for_updates(2, _RECOVERY_S)
        recovery_s = job.updates[-1][0] - healed_s
        lines.append({"fault": fault.text(), "updates_meanwhile": meanwhile, "recovery_s": round(recovery_s, 2)})
        say(f"  {meanwhile} updates meanwhile, two more {recovery_s:.1f} s after it")
        job.follow(_GAP_S)
    return lines
