"""The planner: from where a job stands to the market of every slot. Pure; the same in `plan`, `simulate`, and live.

`plan` is asked again and again; it holds no state of its own. Missing the deadline is the last resort: where spot
cannot be afforded any more, slots go on-demand, and where even that is too late the plan says so.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from doll.provisioner.planning import market_rules
from doll.provisioner.planning.forecast import Forecast, forecast
from doll.provisioner.planning.market_rules import Slack
from doll.provisioner.planning.state import Bools, PlannerSettings, PlannerState


class Reason(enum.IntEnum):
    """Why a slot is in its market."""

    KEEP_SPOT = 0
    WAIT = 1
    RETURN = 2
    KEEP_ON_DEMAND = 3
    COVER = 4
    GUARD = 5
    PRICE = 6
    LATE = 7
    DONE = 8
    MIX = 9


_TEXT = {
    Reason.KEEP_SPOT: "spot is cheaper and the slack can bear its loss",
    Reason.WAIT: "spot is down; the slack allows to wait for it",
    Reason.RETURN: "spot has been available for {dwell:g} s and the slack pays for the move",
    Reason.KEEP_ON_DEMAND: "stays on-demand: spot is down, or not back for long enough, or the slack is needed",
    Reason.COVER: "to on-demand: without it the remaining work would not be done in time at the expected pace",
    Reason.GUARD: "on-demand by the guard: if all of spot went down now, the deadline would be missed",
    Reason.PRICE: "on-demand: not cheaper on spot at the current prices",
    Reason.LATE: "on-demand: the deadline cannot be met any more, this is the soonest",
    Reason.DONE: "the work is done",
    Reason.MIX: "as at the start: the rule is a fixed mix",
}


@dataclass(frozen=True)
class Plan:
    """Markets for all slots, and what to expect of them.

    Attributes:
        on_spot: bool, shape (N,): True for spot.
        moved: bool, shape (N,): slots whose market changes by this plan.
        reason_codes: int8, shape (N,): values of `Reason`.
        binding: what decides: "none" (all is on spot), "deadline", "guard", "price", "late", "mix" or "done".
        slack_s: time to spare if all were on-demand from now on, in seconds of the whole fleet; negative when late.
    """

    on_spot: Bools
    moved: Bools
    reason_codes: npt.NDArray[np.int8]
    feasible: bool
    binding: str
    slack_s: float
    _state: PlannerState = field(repr=False)
    _settings: PlannerSettings = field(repr=False)
    _slack: Slack = field(repr=False)

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        """One sentence per slot."""
        return tuple(_TEXT[Reason(code)].format(dwell=self._settings.dwell) for code in self.reason_codes)

    @cached_property
    def forecast(self) -> Forecast:
        """Expected cost and finish with their spread, and P(miss). Computed when asked for."""
        return forecast(self.on_spot, self._state, self._settings, self._slack)


def plan(state: PlannerState, settings: PlannerSettings) -> Plan:
    """Choose the market of every slot for the next `settings.replan_s` seconds.

    With `settings.guard`, and as long as on-demand workers boot in `boot_s`, streams keep their rates and the planner
    is asked every `replan_s`, a deadline that can be met at the first call is met.
    """
    if settings.rule == "mix":
        return _keep(state, settings)
    return _decide(state, settings, settings.boot_s)


def start(state: PlannerState, settings: PlannerSettings) -> Plan:
    """The first plan of a job: nothing runs yet, so no slot has a market to keep and no choice is a move.

    `state.on_spot` and `state.up` are ignored: every slot may begin where it is best.
    """
    ones = np.ones(state.num_workers, dtype=np.bool_)
    if settings.rule == "mix":
        settings = replace(settings, rule="theorem", guard=False)
    chosen = _decide(replace(state, on_spot=ones, up=ones), settings, 0.0)
    begun = replace(state, on_spot=chosen.on_spot, up=ones)
    return replace(chosen, moved=~ones, _state=begun)


def slot_ranges(slots: Sequence[int], most: int = 12) -> str:
    """Ascending slot numbers for people.

    >>> slot_ranges([0, 1, 2, 3, 7, 9, 10])
    '0-3, 7, 9-10'
    """
    runs: list[list[int]] = []
    for slot in slots:
        if runs and runs[-1][1] == slot - 1:
            runs[-1][1] = slot
        else:
            runs.append([slot, slot])
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    return ", ".join(shown[:most]) + (f", ... ({len(slots)} in all; --json lists them)" if len(shown) > most else "")


_RULES = {"pace": market_rules.pace, "theorem": market_rules.theorem}


def _keep(state: PlannerState, settings: PlannerSettings) -> Plan:
    """Every slot stays where it is, whatever has become of the deadline and the price."""
    slack = Slack.of(state, settings)
    reason, binding = (Reason.DONE, "done") if slack.work <= 0 else (Reason.MIX, "mix")
    if slack.work > 0 and slack.total_per_s * (settings.deadline_s - state.elapsed_s) < slack.work:
        binding = "late"
    return _plan(state, settings, slack, state.on_spot, np.full(state.num_workers, reason, np.int8), binding)


def _decide(state: PlannerState, settings: PlannerSettings, move_s: float) -> Plan:
    slack = Slack.of(state, settings)
    count = state.num_workers
    if slack.work <= 0:
        return _plan(state, settings, slack, state.on_spot, np.full(count, Reason.DONE, np.int8), "done")
    if slack.spare_samples < 0:
        # The margin is there to be used up; only beyond it the deadline is lost.
        late = slack.spare_samples + slack.total_per_s * settings.margin * settings.deadline_s < 0
        code, binding = (Reason.LATE, "late") if late else (Reason.GUARD, "guard")
        return _plan(state, settings, slack, np.zeros(count, np.bool_), np.full(count, code, np.int8), binding)
    # Waiting for spot costs nothing, whatever its price is meanwhile: price moves only what runs, or would.
    worth = market_rules.cheaper_on_spot(state) | (state.on_spot & ~state.spot_available)
    none = np.zeros(count, dtype=np.bool_)
    wanted = _RULES[settings.rule](state, settings, slack, worth) & worth
    chosen, guarded = (
        market_rules.deadline_rule(state, settings, slack, wanted, move_s) if settings.guard else (wanted, none)
    )
    codes = np.where(chosen, Reason.KEEP_SPOT, Reason.KEEP_ON_DEMAND).astype(np.int8)
    codes[chosen & ~state.spot_available] = Reason.WAIT
    codes[chosen & ~state.on_spot] = Reason.RETURN
    codes[~chosen & state.on_spot] = Reason.COVER
    codes[~worth] = Reason.PRICE
    # A return that the guard refused is a slot that stays, not one that the guard moved.
    codes[guarded & state.on_spot] = Reason.GUARD
    if guarded.any():
        binding = "guard"
    elif chosen.all():
        binding = "none"
    else:
        binding = "deadline" if (~chosen & worth).any() else "price"
    return _plan(state, settings, slack, chosen, codes, binding)


def _plan(
    state: PlannerState,
    settings: PlannerSettings,
    slack: Slack,
    on_spot: Bools,
    codes: npt.NDArray[np.int8],
    binding: str,
) -> Plan:
    return Plan(
        on_spot=on_spot,
        moved=on_spot != state.on_spot,
        reason_codes=codes,
        feasible=binding != "late",
        binding=binding,
        slack_s=slack.spare_samples / slack.total_per_s,
        _state=state,
        _settings=settings,
        _slack=slack,
    )
