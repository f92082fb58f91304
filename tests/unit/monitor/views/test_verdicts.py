"""The four answers of the page, of twelve runs: learning, diverging, random labels, all refused, ended well, ended
badly, server gone, Kafka gone, page frozen, over budget, late, paused source."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec
import pytest
from doll.monitor.state.watched_job import PageState
from doll.monitor.views.verdicts import verdicts
from doll.records.control import Finished
from page_feed import MadeUpJob

AUDIT = {"ok": True, "applied": 30_720, "pending": 0, "missing": 0, "duplicate": 0}
LEARNS = ("good", "yes: held-out accuracy 0.781 of 0.97, 0.126 at the start")
ON_TIME = ("good", "yes: expected end 3:15 of 5:00")
SAFE = ("good", "yes: each offset is in one update, none is missing")
ALL_LIVE = ("good", "8 of 8 workers are live")
REFUSED = "3,000 records"


def diverging(version: int) -> tuple[float, float]:
    return 2.3 * math.exp(version / 40), 0.1


def guessing(version: int) -> tuple[float, float]:
    """Labels are random: the loss falls to that of guessing one of ten, and no further."""
    return 2.303 + 0.06 * math.exp(-version / 30), 0.098 + 0.011 * math.sin(version)


def _state(made_up: MadeUpJob) -> PageState:
    return made_up.read(lambda state: state)


def learning() -> PageState:
    made_up = MadeUpJob()
    made_up.run(60)
    return _state(made_up)


def of_errors(errors: Callable[[int], tuple[float, float]]) -> Callable[[], PageState]:
    def state() -> PageState:
        made_up = MadeUpJob(errors=errors)
        made_up.run(60)
        return _state(made_up)

    return state


def all_refused() -> PageState:
    made_up = MadeUpJob()
    made_up.run(1)
    refused = [msgspec.structs.replace(update, n_samples=0, samples_total=0) for update in _state(made_up).updates]
    made_up = MadeUpJob()
    for record in refused:
        made_up.feed(record)
    made_up.status(version=4, samples_total=0, dead_reasons=(("no JSON", 3_000),))
    return _state(made_up)


def ended(report: Mapping[str, object]) -> Callable[[], PageState]:
    def state() -> PageState:
        made_up = MadeUpJob()
        made_up.run(60)
        made_up.feed(Finished(term=1, version=240, reason="samples: 30720 reached", time_s=made_up.now_s))
        return replace(_state(made_up), report=report)

    return state


def server_gone() -> PageState:
    made_up = MadeUpJob()
    made_up.run(60)
    made_up.now_s += 45
    return _state(made_up)


def old(problem: str) -> Callable[[], PageState]:
    def state() -> PageState:
        made_up = MadeUpJob()
        made_up.run(60)
        made_up.problem = problem
        return _state(made_up)

    return state


def over_budget() -> PageState:
    made_up = MadeUpJob(plan="{updates: 900, deadline_s: 300, budget_usd: 0.5}")
    made_up.run(59)
    made_up.decide()
    made_up.run(1)
    return _state(made_up)


def late() -> PageState:
    made_up = MadeUpJob(plan="{updates: 900, deadline_s: 100}")
    made_up.run(60)
    return _state(made_up)


def paused() -> PageState:
    """The server says each second that it lives; the workers have read everything."""
    made_up = MadeUpJob()
    made_up.run(60)
    for _ in range(60):
        made_up.now_s += 1
        made_up.status(unread=0)
    return _state(made_up)


def not_known(why: str, before: tuple[str, str]) -> tuple[str, str]:
    return "none", f"not known: {why}. Before: {before[1]}"


_KAFKA, _FROZEN = "Kafka has not answered for 25 s", "this page has not followed the job for 35 s"
_GONE = "nothing is heard of the parameter server for 45 s"
_PAUSED = "no records have come for 1:00"
RUNS: Mapping[str, tuple[Callable[[], PageState], Mapping[str, tuple[str, str]]]] = {
    "learning": (learning, {"learning": LEARNS, "progress": ON_TIME, "safety": SAFE, "work": ALL_LIVE}),
    "diverging": (
        of_errors(diverging),
        {
            "learning": (
                "bad",
                "no: the model diverges: its loss has risen from 2.339 at the start to 829.2; lower "
                "training.optimizer.lr, or set training.clip_norm",
            ),
            "progress": ON_TIME, "safety": SAFE, "work": ALL_LIVE,
        },
    ),
    "random labels": (
        of_errors(guessing),
        {
            "learning": ("warn", "no: held-out accuracy 0.113, 0.0947 at the start: no better after 240 updates"),
            "progress": ON_TIME, "safety": SAFE, "work": ALL_LIVE,
        },
    ),
    "all refused": (
        all_refused,
        {
            "learning": ("bad", f"no: all {REFUSED} so far were refused"),
            "progress": ("none", "not known: no sample has been learned"),
            "safety": ("bad", f"no: none of {REFUSED} could be learned"),
            "work": ALL_LIVE,
        },
    ),
    "ended well": (
        ended({"error": None, "audit": AUDIT}),
        {
            "learning": LEARNS,
            "progress": ("good", "yes: 1:00 of 5:00"),
            "safety": ("good", "yes: by the audit each offset is in one update, none is missing"),
            "work": ("none", "8 workers took part"),
        },
    ),
    "ended badly": (
        ended({"error": "worker 3 failed 8 times", "audit": {**AUDIT, "ok": False, "missing": 7}}),
        {
            "learning": LEARNS,
            "progress": ("bad", "no: worker 3 failed 8 times"),
            "safety": ("bad", "no: the audit found offsets that are missing or applied twice"),
            "work": ("none", "8 workers took part"),
        },
    ),
    "server gone": (
        server_gone,
        {
            "learning": not_known(_GONE, LEARNS),
            "progress": not_known(_GONE, ON_TIME),
            "safety": ("bad", f"no: {_GONE}"),
            "work": not_known(_GONE, ALL_LIVE),
        },
    ),
    **{
        name: (
            old(why),
            {
                "learning": not_known(why, LEARNS), "progress": not_known(why, ON_TIME), "safety": ("warn", why),
                "work": not_known(why, ALL_LIVE),
            },
        )
        for name, why in (("Kafka gone", _KAFKA), ("page frozen", _FROZEN))
    },
    "over budget": (
        over_budget,
        {
            "learning": LEARNS,
            "progress": ("bad", "no: an expected cost of 0.72 USD, above the budget of 0.50 USD"),
            "safety": SAFE, "work": ALL_LIVE,
        },
    ),
    "late": (
        late,
        {
            "learning": LEARNS, "progress": ("bad", "no: expected end 3:15 of 1:40"), "safety": SAFE, "work": ALL_LIVE,
        },
    ),
    "paused source": (
        paused,
        {
            "learning": ("none", f"{LEARNS[1]}; but {_PAUSED}"),
            "progress": ("none", f"not known: {_PAUSED}"),
            "safety": SAFE,
            "work": ("none", f"8 of 8 workers are live, and {_PAUSED}"),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
def test_each_answer_is_the_true_one(run: str) -> None:
    make, answers = RUNS[run]
    assert {question: tuple(verdict) for question, verdict in verdicts(make()).items()} == answers


_NO_BETTER = "at the start: no better after 240 updates"


def falls(start: float, end: float, accuracy: float) -> Callable[[int], tuple[float, float]]:
    return lambda version: (end + (start - end) * math.exp(-version / 60), accuracy)


@pytest.mark.parametrize(
    ("errors", "seconds", "tone", "text"),
    [
        (falls(1.0, 0.2, math.nan), 60, "good", "yes: held-out loss 0.22, 0.921 at the start"),
        (falls(0.7, 0.12, 0.97), 60, "good", "yes: held-out loss 0.14, 0.648 at the start"),
        (falls(5.0, 2.303, 0.1), 60, "warn", f"no: held-out accuracy 0.105, 0.105 {_NO_BETTER}"),
        (falls(0.7, 0.7, 0.5), 60, "warn", f"no: held-out accuracy 0.5, 0.5 {_NO_BETTER}"),
        (falls(2.3, 2.29, 0.1), 8, "none", "too early to say: held-out accuracy 0.105, 0.105 at the start"),
        (falls(2.3, 2.29, math.nan), 1, "none", "too early to say, after 4 updates"),
    ],
    ids=["loss alone", "rare labels", "bad start", "nothing learned", "early", "one look"],
)  # fmt: skip
def test_learning_is_more_than_noise_and_guessing(
    errors: Callable[[int], tuple[float, float]], seconds: int, tone: str, text: str
) -> None:
    made_up = MadeUpJob(errors=errors)
    made_up.run(seconds)
    assert verdicts(_state(made_up))["learning"] == (tone, text)
    made_up.now_s += 600
    made_up.status()
    assert verdicts(_state(made_up))["learning"][0] != "good", "no update for ten minutes"


def test_a_run_that_ended_without_an_audit_or_an_update_says_so() -> None:
    made_up = MadeUpJob()
    made_up.feed(Finished(term=1, version=0, reason="stopped by you", time_s=made_up.now_s))
    answers = verdicts(_state(made_up))
    assert answers["learning"] == ("bad", "no: it has ended, and nothing was learned")
    assert answers["progress"] == ("bad", "no: there was no update")
    assert answers["safety"] == ("none", "not known: it has ended, and there is no audit yet (doll audit)")


def test_a_broker_that_is_away_after_the_end_is_no_alarm() -> None:
    made_up = MadeUpJob()
    made_up.run(60)
    made_up.feed(Finished(term=1, version=240, reason="samples: 30720 reached", time_s=made_up.now_s))
    made_up.problem = _KAFKA
    assert [text for _, text in verdicts(_state(made_up)).values() if "Kafka" in text] == []


def test_a_provisioner_that_is_silent_leaves_the_forecast_open() -> None:
    made_up = MadeUpJob()
    made_up.run(59)
    made_up.decide()
    made_up.run(1)
    state = replace(_state(made_up), silent_s={"provisioner": 130.0})
    assert verdicts(state)["progress"].text.startswith(
        "not known: nothing is heard of the provisioner for 2:10. Before:"
    )
