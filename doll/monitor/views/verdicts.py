"""The answers to the four questions of the page, from a job's records. Pure.

An answer states what the records show. If the records are old (Kafka or the parameter server does not answer), the
answer is "not known", followed by the last known answer. A model learns if its error has improved since the start by
more than noise. If its accuracy has not improved, a falling loss is not sufficient, because the model may only have
learned to guess.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from doll.amounts import clock, clock_range, known, number, out_of, usd
from doll.monitor.state.limit_text import divergence_text
from doll.monitor.state.watched_job import PageState
from doll.process.metric_names import EVALUATOR, PRODUCER, PROVISIONER, worker_of
from doll.provisioner.planning.planner import slot_ranges

Tone = str  # "good", "warn", "bad", or "none" if there is no answer (yet)

_PS: Final = "ps"
_ROLES: Final = {role: f"the {role}" for role in (EVALUATOR, PRODUCER, PROVISIONER)} | {_PS: "the parameter server"}
_SLOW_S: Final = 2.0  # a forecast is "barely" if the deadline is less than this many standard deviations after it
_PAUSE_S: Final = 30.0  # longest normal time without an update, unless ten updates take longer
_PAUSE_UPDATES: Final = 10.0

_FIRST: Final = 10  # number of updates that count as the start
_LAST: Final = 50  # maximum number of last updates that count as the current state
_FEWEST: Final = 2 * _FIRST
_ENOUGH: Final = _FIRST + _LAST
_LEAST_FALL: Final = 0.05  # minimum relative fall of a loss; untrained models begin slightly above the loss of guessing
_LEAST_RISE: Final = 0.02  # minimum rise of an accuracy
_ERRORS: Final = 4.0  # standard errors from which a change is not noise
_HELD_OUT_SAMPLES: Final = 360  # the number is not in the records: assume that of a small example
_MOST_GUESSED: Final = 0.6  # above this accuracy by guessing, judge by the loss


class Verdict(NamedTuple):
    """An answer, and its rating."""

    tone: Tone
    text: str


def verdicts(state: PageState) -> dict[str, Verdict]:
    """Return the answers by question."""
    answers = {
        "learning": _learning(state), "progress": _progress(state), "safety": _safety(state), "work": _work(state),
    }  # fmt: skip
    for question, why in blind(state).items():
        before = answers[question]
        is_news = bool(state.snapshot.version) and before.tone != "none"
        answers[question] = Verdict("none", f"not known: {why}{f'. Before: {before.text}' if is_news else ''}")
    return answers


def blind(state: PageState) -> dict[str, str]:
    """Return the questions whose newest records are missing, each with the reason."""
    if state.problem:
        return dict.fromkeys(("learning", "progress", "work"), state.problem)
    if _PS in state.silent_s:
        return dict.fromkeys(("learning", "progress", "work"), _not_heard(state, [_PS]))
    if PROVISIONER in state.silent_s:
        return {"progress": _not_heard(state, [PROVISIONER])}
    return {}


def _not_heard(state: PageState, roles: list[str]) -> str:
    return f"nothing is heard of {', '.join(_with_age(state, role) for role in roles)}"


def _with_age(state: PageState, role: str) -> str:
    return f"{_ROLES.get(role, role)} for {clock(state.silent_s[role])}"


def silent_text(state: PageState) -> str:
    """Return all silent roles, workers together: `the parameter server for 45 s, workers 0-7 for 40 s`."""
    workers = {worker: age_s for role, age_s in state.silent_s.items() if (worker := worker_of(role)) is not None}
    texts = [_with_age(state, role) for role in _others(state)]
    if workers:
        texts.append(f"worker{'s' * (len(workers) > 1)} {slot_ranges([*workers])} for {clock(min(workers.values()))}")
    return ", ".join(texts)


def _others(state: PageState) -> list[str]:
    """Return silent roles other than workers. Workers may leave at any time; without the other roles, the job does not
    continue or is not observed."""
    return [role for role in state.silent_s if worker_of(role) is None]


def elapsed_s(state: PageState) -> float:
    """Return the elapsed seconds on the job's clock, at the provisioner's last decision or since the first update."""
    decided_s = state.decisions.newest.get("elapsed_s", math.nan)
    end_s = state.now_s if state.is_live else state.history.last_time_s
    return float(decided_s) if known(decided_s) else end_s - state.history.first_time_s


def _nothing_yet(state: PageState) -> Verdict:
    """Return the answer before the first update."""
    if state.is_live:
        return Verdict("none", "waiting for the first update")
    return Verdict("bad", "no: it has ended, and nothing was learned")


def _refused(state: PageState) -> int:
    """Return the number of refused records if there is no update yet; otherwise 0."""
    return 0 if state.snapshot.updates else max(state.snapshot.dead.letters, len(state.letters))


def pause(state: PageState) -> str:
    """Return the time without an update, and the reason, if this time is long for the job; otherwise ""."""
    snapshot = state.snapshot
    if state.is_live and state.decisions.newest.get("phase") == "paused":
        return "the job pauses (provision.pause)"
    idle_s, per_s = state.now_s - state.history.last_time_s, snapshot.rate_measured
    usual_s = _PAUSE_UPDATES / per_s if known(per_s) and per_s > 0 else 0.0
    if not (state.is_live and snapshot.version and idle_s > max(_PAUSE_S, usual_s)):
        return ""
    lines = [line for line in snapshot.workers if not line.is_spare]
    has_read_all = all(line.is_live and line.lag_records == 0 for line in lines)
    return f"{'no records have come' if has_read_all else 'there was no update'} for {clock(idle_s)}"


# --- is it learning


class Change(NamedTuple):
    """The change of one measure: its name, its value at the start and now, and whether it improved by more than
    noise."""

    name: str
    start: float
    now: float
    is_better: bool

    def text(self, target: float | None = None) -> str:
        of_target = "" if target is None else f" of {target:g}"
        return f"{self.name} {number(self.now)}{of_target}, {number(self.start)} at the start"


def _learning(state: PageState) -> Verdict:
    snapshot, history = state.snapshot, state.history
    if refused := _refused(state):
        return Verdict("bad", f"no: all {refused:,} records so far were refused")
    if not snapshot.version:
        return _nothing_yet(state)
    if not snapshot.updates:
        return Verdict("bad", "no: no sample so far could be used")
    trend, held_out = history.loss_trend, history.held_out_loss_trend()
    for name, losses in (("prequential", trend), ("held-out", held_out)):
        if losses.worsened:
            far = f"the {name} loss is {number(losses.last)}, far above its best"
            return Verdict("bad", f"no: {divergence_text(state.config, losses) or far}")
    if reached := _reached(state):
        return Verdict("good", f"yes: {reached}, reached")
    accuracy, loss = _change(state, "accuracy"), _change(state, "loss")
    updates = history.learned_updates
    changes = [change for change in (accuracy, loss) if change is not None]
    if not changes:
        return Verdict("none", f"too early to say, after {updates:,} updates")
    better = [change for change in changes if change.is_better]
    if accuracy is not None and not accuracy.is_better and accuracy.now < _MOST_GUESSED:
        better = []
    if better:
        stop = state.config.stop
        targets = {"held-out accuracy": stop.accuracy, "held-out loss": stop.loss}
        text = f"yes: {better[0].text(targets.get(better[0].name))}"
        return Verdict("none", f"{text}; but {why}") if (why := pause(state)) else Verdict("good", text)
    if updates < _ENOUGH and state.is_live:
        return Verdict("none", f"too early to say: {changes[0].text()}")
    after = f"no better after {updates:,} updates"
    return Verdict("warn" if state.is_live else "bad", f"no: {changes[0].text()}: {after}")


def _reached(state: PageState) -> str:
    """Return the target that the newest version has reached."""
    snapshot, stop = state.snapshot, state.config.stop
    if stop.accuracy is not None and snapshot.held_out_accuracy >= stop.accuracy:
        return f"held-out accuracy {number(snapshot.held_out_accuracy)} of {stop.accuracy:g}"
    if stop.loss is not None and snapshot.held_out_loss <= stop.loss:
        return f"held-out loss {number(snapshot.held_out_loss)} of {stop.loss:g}"
    return ""


def _change(state: PageState, measure: str) -> Change | None:
    """Return the change of the held-out measure if it was evaluated from the start, else of the prequential measure.

    None: there are not enough values of this measure.
    """
    history = state.history
    evaluations = history.evaluations
    values, versions = evaluations.valid(measure), evaluations.valid("version")
    is_known = np.isfinite(values)
    values, versions = values[is_known], versions[is_known]
    if len(values) >= 2 and versions[0] <= max(_FIRST, versions[-1] / 10):
        return _held_out(measure, values)
    column = f"prequential_{measure}"
    if column not in history.updates.names:
        return None
    return _prequential(measure, history.updates.valid(column), history.updates.valid("weight"))


def _held_out(measure: str, values: npt.NDArray[np.float64]) -> Change:
    start, now = float(values[0]), float(values[-1])
    steady = float(values[-3:].mean()) if len(values) > 3 else now
    if measure == "loss":
        return Change("held-out loss", start, now, start - steady > _LEAST_FALL * abs(start))
    spread = max(start * (1 - start), now * (1 - now), 0.0)
    noise = _ERRORS * math.sqrt(spread / _HELD_OUT_SAMPLES)
    return Change("held-out accuracy", start, now, steady - start > max(noise, _LEAST_RISE))


def _prequential(
    measure: str, values: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]
) -> Change | None:  # fmt: skip
    counted = np.isfinite(values) & (weights > 0)
    values, weights = values[counted], weights[counted]
    if len(values) < _FEWEST:
        return None
    first, last = slice(0, _FIRST), slice(max(_FIRST, len(values) - _LAST), None)
    start, now = (float(np.average(values[part], weights=weights[part])) for part in (first, last))
    error = math.hypot(*(float(values[part].std()) / math.sqrt(len(values[part])) for part in (first, last)))
    least = _LEAST_FALL * abs(start) if measure == "loss" else _LEAST_RISE
    gain = start - now if measure == "loss" else now - start
    return Change(f"prequential {measure}", start, now, gain > max(least, _ERRORS * error))


# --- is it on time and on budget


def _progress(state: PageState) -> Verdict:
    on_time, over = _on_time(state), _over_budget(state)
    if not over:
        return on_time
    if on_time.tone == "bad":
        return Verdict("bad", f"{on_time.text}; {over}")
    return Verdict("bad", f"no: {over}")


def _over_budget(state: PageState) -> str:
    """Return the amount above the budget, in words; "" if the cost is not above the budget, or not known."""
    budget, decision = state.config.plan.budget_usd, state.decisions.newest
    if not budget:
        return ""
    spent = state.report.get("cost_usd") or decision.get("spent_usd", math.nan)
    if spent > budget:
        return f"{usd(spent)} USD spent of a budget of {usd(budget)} USD"
    expected = decision.get("expected_cost_usd", math.nan)
    if state.is_live and expected > budget:
        return f"an expected cost of {usd(expected)} USD, above the budget of {usd(budget)} USD"
    return ""


def _on_time(state: PageState) -> Verdict:
    decision, snapshot, passed_s = state.decisions.newest, state.snapshot, elapsed_s(state)
    deadline_s = state.config.plan.deadline_s or math.nan
    if not state.is_live:
        return _ended_on_time(state, passed_s, deadline_s)
    if decision.get("phase") in ("failed", "stopped", "budget"):
        return Verdict("bad", f"no: the provisioner has stopped ({decision['phase']})")
    if passed_s > deadline_s:
        return Verdict("bad", f"no: {clock(passed_s)} of {clock(deadline_s)}, and it is not done")
    if alarms := decision.get("alarms"):
        return Verdict("warn", str(alarms[0]))
    if not snapshot.version:
        return _nothing_yet(state)
    if not snapshot.updates:
        return Verdict("none", "not known: no sample has been learned")
    if why := pause(state):
        return Verdict("none", f"not known: {why}")
    finish_s, finish_sd_s = forecast_s(state)
    if not known(finish_s):
        stop = state.config.stop
        is_planned = stop.updates or stop.samples
        return Verdict("none", "not known yet" if is_planned else "no number of updates or samples to reach")
    if not known(deadline_s):
        return Verdict("good", f"about {clock_range(max(0.0, finish_s - passed_s), finish_sd_s)} left")
    margin_s = 0.0 if not known(finish_sd_s) else _SLOW_S * finish_sd_s
    text = f"expected end {clock(finish_s)} of {clock(deadline_s)}"
    if decision.get("feasible") is False or finish_s > deadline_s:
        return Verdict("bad", f"no: {text}")
    if finish_s + margin_s > deadline_s and not decision:
        return Verdict("warn", f"barely: {text}")
    return Verdict("good", f"yes: {text}")


def forecast_s(state: PageState) -> tuple[float, float]:
    """Return the expected end on the job's clock, and its standard deviation, seconds; NaN if not known."""
    decision, snapshot = state.decisions.newest, state.snapshot
    finish_s = decision.get("expected_finish_s", elapsed_s(state) + snapshot.eta_s)
    sd_s = decision.get("expected_finish_sd_s", math.nan) if decision else snapshot.eta_sd_s
    return float(finish_s), float(sd_s)


def _ended_on_time(state: PageState, passed_s: float, deadline_s: float) -> Verdict:
    finished = state.history.finished
    if error := state.report.get("error") or (finished.error if finished else ""):
        return Verdict("bad", f"no: {error}")
    if not state.snapshot.version:
        return Verdict("bad", "no: there was no update")
    if not known(deadline_s):
        return Verdict("none", f"ended after {clock(passed_s)}")
    met = state.report.get("deadline_met", passed_s <= deadline_s)
    if not met and passed_s <= deadline_s:
        return Verdict(
            "warn", f"ended after {clock(passed_s)} of {clock(deadline_s)}, before the planned work was done"
        )
    return Verdict("good" if met else "bad", f"{'yes' if met else 'no'}: {clock(passed_s)} of {clock(deadline_s)}")


# --- is it safe


def _safety(state: PageState) -> Verdict:
    snapshot, audit = state.snapshot, state.report.get("audit")
    if state.problem:
        return Verdict("warn" if snapshot.version else "none", state.problem)
    if audit and not audit["ok"]:
        return Verdict("bad", "no: the audit found offsets that are missing or applied twice")
    if state.continuity is not None and state.continuity.problem:
        return Verdict("bad", f"no: {state.continuity.problem}")
    if snapshot.lost:
        return Verdict("bad", "no: records were deleted before they were learned")
    if away := _others(state):
        return Verdict("bad", f"no: {_not_heard(state, away)}")
    if refused := _refused(state):
        return Verdict("bad", f"no: none of {refused:,} records could be learned")
    if state.is_live and not snapshot.version:
        return _nothing_yet(state)
    if not state.is_live and not audit:
        return Verdict("none", "not known: it has ended, and there is no audit yet (doll audit)")
    if dead := snapshot.dead.letters:
        return Verdict("warn", f"yes, but {dead:,} record{'s' * (dead > 1)} could not be learned")
    if audit:
        return Verdict("good", "yes: by the audit each offset is in one update, none is missing")
    return Verdict("good", "yes: each offset is in one update, none is missing")


# --- who works


def _work(state: PageState) -> Verdict:
    snapshot = state.snapshot
    live = sum(line.is_live is True and not line.is_spare for line in snapshot.workers)
    needed = sum(not line.is_spare for line in snapshot.workers)
    if not state.is_live:
        return Verdict("none", f"{needed} workers took part")
    if snapshot.limit and not state.history.loss_trend.diverged:  # the answer on learning reports a divergence
        return Verdict("warn", snapshot.limit)
    text = f"{out_of(live, needed)} workers are live"
    if why := pause(state):
        return Verdict("none" if live == needed else "warn" if live else "bad", f"{text}, and {why}")
    tone = "good" if live == needed else "warn" if live else "bad"
    return Verdict(tone if snapshot.version or live else "none", text)
