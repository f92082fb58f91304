"""Whether a job is worth its machines: when launches are held back, when everything is ended, and what people are told.

A job that cannot advance must not be paid for. Nothing is launched without a parameter server; a slot whose machines
fail again and again is given up (`LaunchState`); after `max_stall_s` of paid time without an update, or when every slot
is given up, all machines are ended until a person has acted. While the source sends nothing, machines are ended too,
and launched again when it sends. See docs/decisions/0049-a-job-that-cannot-advance-is-stopped.md. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from doll.provisioner.fleets.port import Instance
from doll.provisioner.instances import Readiness
from doll.provisioner.launch_state import LaunchState
from doll.provisioner.market_plan import MarketPlan
from doll.provisioner.observation import Observed
from doll.provisioner.planning.planner import slot_ranges
from doll.provisioner.planning.state import Bools
from doll.provisioner.progress import ALARM_S, ProgressWatch, server_text, stall_cause, time_text
from doll.provisioner.settings import ControllerSettings

_ALARM_FAILURES = 2  # machines in a row; one alone is replaced, and no news


class JobHealth:
    """What is remembered of it from turn to turn. Call `review` once per turn, then read the attributes.

    Attributes:
        failed: why everything is ended until a person has acted; "": it is not.
        idle: since when the source has sent nothing, for people, where everything is ended until it sends; else "".
        hold_launches: why nothing is launched now; "": launches go on.
        hold_moves: why no slot moves from spot to on-demand now; "": they may.
        alarms: of this turn.
    """

    def __init__(self) -> None:
        self.failed = ""
        self.idle = ""
        self.hold_launches = ""
        self.hold_moves = ""
        self.alarms: list[str] = []
        self._watch = ProgressWatch()

    def review(
        self, settings: ControllerSettings, observed: Observed, instances: Sequence[Instance], readiness: Readiness,
        launch_state: LaunchState, plan: MarketPlan, now_s: float,
    ) -> None:  # fmt: skip
        """Look at the job as it is now."""
        active = np.flatnonzero(plan.scale_in.active).tolist()
        alive = [instance for instance in instances if instance.is_alive]
        server_runs = observed.ps_since_s(now_s) is not None
        silent_since_s = observed.source_silent_since_s()
        silent = silent_since_s is not None and settings.releases_idle
        watch = self._watch
        waits_for_others = silent or _waits_for_spot(active, alive, launch_state, plan)
        watch.observe(observed, now_s, counts=bool(alive) and not (server_runs and waits_for_others))
        assert watch.progressed_s is not None
        cause = stall_cause(observed, instances, readiness.ready_s, launch_state, now_s)
        if not self.failed and not alive and all(launch_state.gave_up(slot) for slot in active):
            self.failed = f"the machines of every slot fail: {launch_state.last_failure(active[0])}"
        if not self.failed and watch.stalled_s >= settings.max_stall_s:
            since = time_text(watch.progressed_s)
            self.failed = f"no update since {since}, with machines for {watch.stalled_s:.0f} s of that time: {cause}"
        idle = silent and silent_since_s is not None
        idle = idle and now_s - max(silent_since_s or 0.0, watch.progressed_s) >= settings.max_stall_s
        if self.idle and not idle:
            plan.resume(now_s)
        self.idle = time_text(silent_since_s or 0.0) if idle else ""
        stalled = watch.stalled_s >= settings.stall_alarm_s
        self.hold_launches = "" if server_runs else server_text(observed)
        self.hold_moves = self.hold_launches or (cause if stalled else "")
        self.alarms = (
            [] if self.failed or self.idle else _slot_alarms(active, alive, readiness, launch_state, plan, now_s)
        )
        if self.failed or self.idle:
            return
        ends = f"everything is ended after {settings.max_stall_s:.0f} s of paid time without an update"
        if not server_runs:
            self.alarms.insert(0, f"{server_text(observed)}: no machine is launched without it, and {ends}")
        elif stalled:
            self.alarms.insert(0, f"no update since {time_text(watch.progressed_s)}: {cause}; {ends}")
        elif silent_since_s is not None:
            self.alarms.append(
                f"the source has sent nothing since {time_text(silent_since_s)}: slots stay in their markets; "
                + (f"after {settings.max_stall_s:.0f} s machines are ended until it sends again" if silent else ends)
            )

    def tells_of_spot(self, launch_state: LaunchState, num_slots: int, *, is_run: bool) -> Bools:
        """Slots whose state says something about spot, shape (N,): none while workers cannot join, and not those whose
        machines fail by themselves.

        Args:
            is_run: machines are wanted.
        """
        counts = is_run and not self.hold_launches
        return np.array([counts and not launch_state.failures(slot) for slot in range(num_slots)], dtype=np.bool_)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON. `failed` is not kept: a new start means that a person has acted."""
        return self._watch.to_dict()

    def restore(self, kept: Mapping[str, Any], max_stall_s: float) -> None:
        """Continue from what `to_dict` returned.

        Raises:
            KeyError, TypeError, ValueError: `kept` is something else.
        """
        self._watch.restore(kept)
        if self._watch.stalled_s >= max_stall_s:
            self._watch.forgive()


def _waits_for_spot(
    active: Sequence[int], alive: Sequence[Instance], launch_state: LaunchState, plan: MarketPlan
) -> bool:
    """A slot is to be on spot and has no machine, because spot has no capacity: the others may have to wait for it."""
    with_machine = {instance.slot for instance in alive}
    return any(
        slot not in with_machine and plan.markets[slot] == "spot" and launch_state.lacks_capacity(slot)
        for slot in active
    )


def _slot_alarms(
    active: Sequence[int], alive: Sequence[Instance], readiness: Readiness, launch_state: LaunchState,
    plan: MarketPlan, now_s: float,
) -> list[str]:  # fmt: skip
    alarms = []
    given_up = [slot for slot in active if launch_state.gave_up(slot)]
    failing = [slot for slot in active if launch_state.failures(slot) >= _ALARM_FAILURES and slot not in given_up]
    if failing:
        alarms.append(
            f"machines of slots {slot_ranges(failing)} fail again and again: {launch_state.last_failure(failing[0])}; "
            f"the pause between two launches doubles, and after {launch_state.limits.max_failures} in a row the slot "
            "is given up"
        )
    if given_up:
        alarms.append(
            f"slots {slot_ranges(given_up)} are given up, nothing is launched for them: "
            f"{launch_state.last_failure(given_up[0])}. Correct it, then start the provisioner again"
        )
    late_s = max(ALARM_S, 2 * plan.planner.boot_s)
    late = sorted({item.slot for item in alive if readiness.not_ready_s.get(item.id, 0.0) > late_s})
    if late:
        alarms.append(
            f"the workers of slots {slot_ranges(late)} have not joined {late_s:.0f} s after their machines were "
            f"launched; a machine is replaced after {launch_state.limits.boot_timeout_s:.0f} s"
        )
    return alarms
