"""The health of a job: it determines when launches are held back, when all machines are ended, and which alarms people
get.

A job that cannot advance must not cost money. Nothing is launched without a parameter server. A slot whose machines
fail again and again is given up (`LaunchState`). After `max_stall_s` of paid time without an update, or when every slot
is given up, all machines are ended until a person clears the stop (`state_store.clear_stops`). Restarts do not clear
the stop. If the source sends nothing, machines are also ended; they are launched again when the source sends. See
docs/decisions/0049-a-job-that-cannot-advance-is-stopped.md. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar, Final, get_args

import numpy as np

from doll.provisioner.fleets.port import Instance
from doll.provisioner.kept_state import KeptState
from doll.provisioner.launch_state import LaunchState
from doll.provisioner.market_plan import DesiredState, MarketPlan
from doll.provisioner.observation import Observed
from doll.provisioner.planning.planner import slot_ranges
from doll.provisioner.planning.state import Bools, Market
from doll.provisioner.reconcile import Readiness
from doll.provisioner.settings import ALARM_S, ControllerSettings

_STEADY_TERM_S: Final = 600.0
_MAX_STEP_S: Final = 300.0  # longest step that counts, if the provisioner or the computer was suspended
_RESTART = "start the provisioner again: doll provision run JOB.yaml"
_CLEAR = "say so, or a restart changes nothing: doll provision clear JOB.yaml; then " + _RESTART
_ALARM_FAILURES = 2  # machines in a row; a single failure is replaced without an alarm


@dataclass(frozen=True)
class _JobView:
    """The state of the job in one turn. `active` are the slots that should have workers."""

    settings: ControllerSettings
    observed: Observed
    launch_state: LaunchState
    plan: MarketPlan
    readiness: Readiness
    now_s: float
    active: list[int]
    alive: list[Instance]

    @property
    def server_runs(self) -> bool:
        return self.observed.ps_since_s(self.now_s) is not None

    @property
    def is_silent(self) -> bool:
        """Whether the source sends nothing, so that machines may be ended."""
        return self.observed.source_silent_since_s() is not None and self.settings.releases_idle

    def failure(self, slots: Sequence[int]) -> str:
        """Return the last failure of the first of these slots."""
        return self.launch_state.slots[slots[0]].failure


class JobHealth(KeptState):
    """The health of a job over the turns. Call `review` once per turn, then read the attributes.

    Attributes:
        failed: reason why all machines are ended until a person acts; "": the job has not failed. Restarts do not clear
            the reason, because a supervisor restarts a process that has ended.
        idle: time since which the source has sent nothing, if machines are ended for this reason; otherwise "".
        hold_launches: reason why nothing is launched now; "": launches are allowed.
        hold_moves: reason why no slot moves from spot to on-demand now; "": moves are allowed.
    """

    KEPT: ClassVar = {
        "failed": str, "stalled_s": float, "progressed_s": float, "generation": int, "batches": int,
        "term": tuple[int, int], "term_since_s": float,
    }  # fmt: skip
    LATER: ClassVar = ("failed",)

    def __init__(self) -> None:
        self.failed = self.idle = self.hold_launches = self.hold_moves = ""
        self.alarms: list[str] = []
        self._stalled_s = 0.0  # time with machines since the last progress, without times that did not count
        self._progressed_s: float | None = None  # when progress was last seen
        self._generation = 0
        self._batches = 0  # highest number of batches in the model
        self._term = (0, 0)  # newest term, and the batches in the model at the last look
        self._term_since_s = math.inf
        self._seen_s = math.inf  # not kept: the time until the next look does not count

    def review(
        self, settings: ControllerSettings, observed: Observed, instances: Sequence[Instance], readiness: Readiness,
        launch_state: LaunchState, plan: MarketPlan, now_s: float,
    ) -> None:  # fmt: skip
        """Update the attributes from the current state of the job."""
        active = np.flatnonzero(plan.scale_in.active).tolist()
        alive = [instance for instance in instances if instance.is_alive]
        view = _JobView(settings, observed, launch_state, plan, readiness, now_s, active, alive)
        waits_for_others = view.server_runs and (view.is_silent or _waits_for_spot(view))
        progressed_s = self._observe_progress(observed, now_s, counts=bool(alive) and not waits_for_others)
        cause = _stall_cause(view)
        self._review_failure(view, progressed_s, cause)
        self._review_idleness(view, progressed_s)
        is_stalled = self._stalled_s >= settings.stall_alarm_s
        self.hold_launches = "" if view.server_runs else server_text(observed)
        self.hold_moves = self.hold_launches or (cause if is_stalled else "")
        stalled = f"no update since {time_text(progressed_s)}: {cause}" if is_stalled else ""
        self.alarms = [] if self.failed or self.idle else _job_alarms(view, stalled)

    def _review_failure(self, view: _JobView, progressed_s: float, cause: str) -> None:
        """Stop the job if the machines of every slot fail, or if it has been stalled for too long."""
        if self.failed:
            return
        if not view.alive and all(view.launch_state.gave_up(slot) for slot in view.active):
            self.failed = f"the machines of every slot fail: {view.failure(view.active)}"
        elif self._stalled_s >= view.settings.max_stall_s:
            since, stalled_s = time_text(progressed_s), self._stalled_s
            self.failed = f"no update since {since}, with machines for {stalled_s:.0f} s of that time: {cause}"

    def _review_idleness(self, view: _JobView, progressed_s: float) -> None:
        """Determine whether machines are ended because the source has sent nothing for too long."""
        silent_since_s = view.observed.source_silent_since_s() or 0.0
        is_idle = view.is_silent and view.now_s - max(silent_since_s, progressed_s) >= view.settings.max_stall_s
        if self.idle and not is_idle:
            view.plan.resume(view.now_s)
        self.idle = time_text(silent_since_s) if is_idle else ""

    def _observe_progress(self, observed: Observed, now_s: float, *, counts: bool) -> float:
        """Record the job's progress. Returns the Unix time of the last progress. `counts` states whether this time
        counts as stalled: machines are paid, and the job waits neither for the market nor for the source."""
        term, batches = observed.term, observed.batches_done
        if term != self._term[0]:
            self._term_since_s = now_s
        # A server that crashes again and again may repeat the same updates each time, which is no progress; one that
        # runs steadily after it was reset to an old checkpoint makes some.
        steady = now_s - self._term_since_s >= _STEADY_TERM_S and batches > self._term[1]
        new_run = observed.generation != self._generation
        if self._progressed_s is None or new_run or batches > self._batches or steady:
            self._stalled_s, self._progressed_s = 0.0, now_s
            self._batches = batches if new_run else max(batches, self._batches)
        elif counts:
            self._stalled_s += min(max(0.0, now_s - self._seen_s), _MAX_STEP_S)
        self._generation, self._term, self._seen_s = observed.generation, (term, batches), now_s
        return self._progressed_s

    def tells_of_spot(self, launch_state: LaunchState, num_slots: int, *, is_run: bool) -> Bools:
        """Return the slots whose state is evidence of spot's availability, shape (N,). All are False if no machines are
        wanted or workers cannot join. Slots whose machines fail by themselves are excluded."""
        counts = is_run and not self.hold_launches
        return np.array([counts and not launch_state.slots[slot].failures for slot in range(num_slots)], dtype=np.bool_)


def _stall_cause(view: _JobView) -> str:
    """Return the reason why the model does not advance, as far as the provisioner knows. The text is the same in each
    turn."""
    observed = view.observed
    if not view.server_runs:
        return server_text(observed)
    slots = range(observed.num_slots)
    if failing := [slot for slot in slots if view.launch_state.slots[slot].failures]:
        return f"machines of slots {slot_ranges(failing)} fail: {view.failure(failing)}"
    with_worker = {instance.slot for instance in view.alive if instance.id in view.readiness.ready_s}
    if not with_worker:
        return "no worker has joined: the machines run, but their workers do not reach the parameter server"
    if (since_s := observed.source_silent_since_s()) is not None:
        return f"the source has sent nothing since {time_text(since_s)}"
    missing = [slot for slot in slots if slot not in with_worker]
    without = f", but slots {slot_ranges(missing)} have no worker" if missing else ""
    return f"workers are ready{without}, and the parameter server applies no update: see doll status and its log"


def server_text(observed: Observed) -> str:
    """Return a text which states that no parameter server sends heartbeats."""
    seen_s = observed.ps_last_seen_s
    since = "" if not math.isfinite(seen_s) else f" since {time_text(seen_s)}"
    return f"no parameter server has been heard{since}"


def time_text(at_s: float) -> str:
    """Return a Unix time as text for people.

    >>> time_text(1_700_000_000.0)
    '2023-11-14 22:13:20 UTC'
    """
    try:
        return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{at_s:g} s"  # records may be wrong: such a time is not possible


def _waits_for_spot(view: _JobView) -> bool:
    """Return whether a slot that should be on spot has no machine because spot has no capacity. Other slots may wait
    for it."""
    with_machine = {instance.slot for instance in view.alive}
    return any(
        slot not in with_machine and view.plan.markets[slot] == "spot" and view.launch_state.slots[slot].no_capacity
        for slot in view.active
    )


def _job_alarms(view: _JobView, stalled: str) -> list[str]:
    """Return the alarms of a job that runs. `stalled` states since when and why it makes no progress; "": it does."""
    alarms, max_stall_s = list[str](), view.settings.max_stall_s
    ends = f"everything is ended after {max_stall_s:.0f} s of paid time without an update"
    if not view.server_runs:
        alarms.append(f"{server_text(view.observed)}: no machine is launched without it, and {ends}")
    elif stalled:
        alarms.append(f"{stalled}; {ends}")
    alarms += _slot_alarms(view)
    silent_since_s = view.observed.source_silent_since_s()
    if silent_since_s is not None and view.server_runs and not stalled:
        until = f"after {max_stall_s:.0f} s machines are ended until it sends again" if view.is_silent else ends
        since = time_text(silent_since_s)
        alarms.append(f"the source has sent nothing since {since}: slots stay in their markets; {until}")
    return alarms


def _slot_alarms(view: _JobView) -> list[str]:
    alarms, launch_state = [], view.launch_state
    given_up = [slot for slot in view.active if launch_state.gave_up(slot)]
    failing = [slot for slot in view.active if launch_state.slots[slot].failures >= _ALARM_FAILURES]
    failing = [slot for slot in failing if slot not in given_up]
    if failing:
        alarms.append(
            f"machines of slots {slot_ranges(failing)} fail again and again: {view.failure(failing)}; "
            f"the pause between two launches doubles, and after {launch_state.limits.max_failures} in a row the slot "
            "is given up"
        )
    if given_up:
        alarms.append(
            f"slots {slot_ranges(given_up)} are given up, nothing is launched for them: {view.failure(given_up)}. "
            f"Correct it, then {_CLEAR}"
        )
    late_s = max(ALARM_S, 2 * view.plan.planner.boot_s)
    late = sorted({item.slot for item in view.alive if view.readiness.not_ready_s.get(item.id, 0.0) > late_s})
    if late:
        alarms.append(
            f"the workers of slots {slot_ranges(late)} have not joined {late_s:.0f} s after their machines were "
            f"launched; a machine is replaced after {launch_state.limits.boot_timeout_s:.0f} s"
        )
    return alarms


def alarms_of(
    desired: DesiredState, launch_state: LaunchState, health: JobHealth, *, budget_usd: float | None, now_s: float
) -> list[str]:
    """Return the alarms of a turn, for people."""
    alarms = list(health.alarms) if desired.phase == "run" else []
    if desired.phase == "failed":
        alarms.append(f"the job is stopped, and all machines are ended: {health.failed}. Correct it, then {_CLEAR}")
    if desired.phase == "idle":
        alarms.append(
            f"the source has sent nothing since {health.idle}: all machines are ended, and launched again when it sends"
        )
    if launch_state.stopped:
        alarms.append(f"no machine is launched any more: {launch_state.stopped}. Correct it, then {_RESTART}")
    markets: tuple[Market, ...] = get_args(Market)
    for market in markets:
        name = market.replace("_", "-")
        if now_s < launch_state.quota_s(market):
            alarms.append(f"the quota of {name} machines is used up: request an increase")
        elif message := launch_state.refusal(market):
            alarms.append(f"no {name} machines, for another reason than capacity: {message}; it is tried again")
    if not desired.feasible and desired.phase == "run":
        alarms.append(
            "the budget does not suffice for the deadline: raise one of them, or accept a later end"
            if desired.binding == "budget"
            else "the deadline cannot be met any more: everything runs on-demand to finish as soon as possible"
            if "spot" not in desired.markets
            else "the deadline cannot be met any more at the rates of the streams"
        )
    if desired.phase == "budget":
        alarms.append(
            f"the budget of {budget_usd} USD is spent: all machines are ended, and the provisioner exits. To continue "
            f"the job, raise plan.budget_usd in the job file, then {_RESTART}"
        )
    if desired.binding == "done" and desired.phase == "run":
        alarms.append("the planned work is done, but the job goes on: set stop.updates, or plan for more")
    return alarms
