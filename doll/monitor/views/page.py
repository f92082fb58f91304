"""The overview of a job for the live page, as plain values: questions, workers, curves, lists of records. Pure.

Texts and numbers come from the same state as the terminal display, and a browser only draws them. Numbers are rounded
to the displayed precision, because the server sends every change. Unknown values are left out.
`doll.monitor.views.page_details` provides the details that a click opens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from doll.amounts import clock, clock_range, known, number, out_of, usd, usd_range
from doll.config.step_size import step_samples
from doll.ledger.balance import named
from doll.metrics.states import ERROR_BOUND, STDERR
from doll.monitor.state.history import EVALUATION_COLUMNS
from doll.monitor.state.policy_summary import PolicySummary
from doll.monitor.state.progress import MAX_UPDATES, WorkerLine, skipped_text
from doll.monitor.state.watched_job import PageState
from doll.monitor.views.page_parts import market, served
from doll.monitor.views.panels import moving_mean
from doll.monitor.views.text import shard_lines, table_lines, verdict, with_error
from doll.monitor.views.verdicts import blind, elapsed_s, forecast_s, pause, silent_text, verdicts
from doll.process.metric_names import worker_of
from doll.provisioner.prices.shipped import ec2_estimate

Fact = tuple[str, str]  # name and value

MAX_POINTS: Final = 240  # of a curve, which has up to twice as many; more points than pixels only take time
LISTED: Final = 50  # entries of each list
_MOST_METRICS: Final = 4


def page(state: PageState) -> dict[str, Any]:
    """Return all content that the page shows without a click."""
    return {
        "job": _job(state),
        "questions": _questions(state),
        "curves": _curves(state),
        "market": market(state),
        "served": served(state.served),
        "workers": {str(line.worker): _worker(line, state) for line in state.snapshot.workers},
        "lists": {
            "events": [[_rounded(at_s, 1) or 0, text] for at_s, text in reversed(_newest(state.events))],
            "updates": _updates(state),
            "letters": {f"{item.partition}-{item.offset}": item.reason for item in _newest(state.letters)},
            "decisions": {
                str(item["turn"]): [
                    clock(item.get("elapsed_s", math.nan)), "; ".join(item["actions"]) or item["phase"]
                ]
                for item in _newest(state.decisions.notable)
            },
            "versions": _versions(state),
        },
    }  # fmt: skip


def _updates(state: PageState) -> dict[str, list[Any]]:
    """Return the newest updates; an update that a crash or `doll rollback` has undone is marked as void."""
    void = state.history.updates.void_of(MAX_UPDATES)
    rows: dict[str, list[Any]] = {}
    for item in _newest(state.updates):
        samples = f"{item.n_samples:,}" + (", void" if (item.term, item.version) in void else "")
        rows[str(item.version)] = [samples, number(item.loss), len(item.members)]
    return rows


def _newest(items: Sequence[Any]) -> list[Any]:
    """Return the last items, the newest last."""
    return list(items)[-LISTED:]


def _job(state: PageState) -> dict[str, Any]:
    config, snapshot = state.config, state.snapshot
    data, policy = config.data, config.training.policy.name
    ended = f"ended: {snapshot.finished}" if snapshot.finished else "not running"
    unseen = blind(state).get("work", "") if state.is_live else ""
    return {
        "name": snapshot.job,
        "state": unseen or ("running" if state.is_live else ended),
        "is_live": state.is_live,
        "is_seen": not unseen,
        "time": clock(elapsed_s(state)),
        "now_s": round(state.now_s, 1),
        "shape": f"{len(snapshot.workers):,} workers, b = {data.batch_size}, K = {config.group_size}, policy {policy}",
        "doing": f"{out_of(snapshot.updates, config.stop.updates)} updates, "
        f"{out_of(snapshot.samples, config.stop.samples)} samples",
    }


def _questions(state: PageState) -> dict[str, dict[str, Any]]:
    facts = {"learning": _learning, "progress": _progress, "safety": _safety, "work": _work}
    shown: dict[str, dict[str, Any]] = {
        name: {"tone": tone, "verdict": text, "facts": [list(fact) for fact in facts[name](state) if fact[1]]}
        for name, (tone, text) in verdicts(state).items()
    }
    limit_s = state.config.plan.deadline_s or state.config.stop.seconds or math.nan
    bars = (_work_bar(state), _share_bar("time", elapsed_s(state), limit_s, clock), _cost_bar(state))
    shown["progress"]["bars"] = [bar for bar in bars if bar]
    return shown


# --- is it learning


def _learning(state: PageState) -> list[Fact]:
    snapshot, trend = state.snapshot, state.history.loss_trend
    means = snapshot.prequential
    version = "" if snapshot.held_out_version is None else f" (version {snapshot.held_out_version})"
    accuracy = means.metrics.get("accuracy", math.nan)
    return [
        ("prequential loss", number(means.loss) if known(means.loss) else ""),
        ("held-out loss", f"{number(snapshot.held_out_loss)}{version}" if known(snapshot.held_out_loss) else ""),
        ("prequential accuracy", number(accuracy) if known(accuracy) else ""),
        ("held-out accuracy", number(snapshot.held_out_accuracy) if known(snapshot.held_out_accuracy) else ""),
        *_other_metrics(state),
        ("held-out records", "" if snapshot.held_out_records is None else snapshot.held_out_records.text()),
        ("one step", f"{step_samples(state.config):,} samples"),
        ("target", _target(state)),
        (
            "best prequential",
            "" if trend.best_version is None else f"{number(trend.best)} (version {trend.best_version})",
        ),
    ]


def _other_metrics(state: PageState) -> list[Fact]:
    """Return the metrics of a task, held-out and prequential (of a window), except loss and accuracy."""
    newest = state.history.evaluations.last() or {}
    held_out = {name: value for name, value in newest.items() if name not in (*EVALUATION_COLUMNS, "void")}
    prequential = {name: value for name, value in state.snapshot.prequential.metrics.items() if name != "accuracy"}
    facts: list[Fact] = []
    for kind, values in (("held-out", held_out), ("prequential", prequential)):
        named = [name for name, value in values.items() if known(value) and not name.endswith((STDERR, ERROR_BOUND))]
        facts += [(f"{kind} {name}", with_error(name, values)) for name in named[:_MOST_METRICS]]
    return facts


def _target(state: PageState) -> str:
    stop, plan = state.config.stop, state.config.plan
    if stop.accuracy is not None:
        return f"accuracy {stop.accuracy:g}"
    if stop.loss is not None:
        return f"loss {stop.loss:g}"
    if stop.metric is not None:
        return f"{stop.metric} {stop.bound}"
    return "" if plan.target_error is None else f"{plan.measure.replace('_', ' ')} {plan.target_error:g}"


# --- is it on time and on budget


def _progress(state: PageState) -> list[Fact]:
    finish_s, finish_sd_s = forecast_s(state)
    is_open = known(finish_s) and state.is_live and not (pause(state) or "progress" in blind(state))
    return [("expected end", clock_range(finish_s, finish_sd_s) if is_open else ""), *_cost_facts(state)]


def _share_bar(label: str, value: float, most: float, text: Any = "{:,}".format) -> dict[str, Any] | None:
    if not (known(value) and known(most) and most > 0):
        return None
    return {"label": label, "share": round(value / most, 3), "text": f"{text(value)} of {text(most)}"}


def _work_bar(state: PageState) -> dict[str, Any] | None:
    stop, snapshot, decision = state.config.stop, state.snapshot, state.decisions.newest
    if known(target := decision.get("target_samples", math.nan)):
        return _share_bar("samples", snapshot.samples, target, lambda value: f"{round(value):,}")
    if stop.samples is not None:
        return _share_bar("samples", snapshot.samples, stop.samples)
    return _share_bar("updates", snapshot.updates, stop.updates or state.config.plan.updates or math.nan)


def _cost_bar(state: PageState) -> dict[str, Any] | None:
    decision, report = state.decisions.newest, state.report
    spent, all_on_demand = decision.get("spent_usd", math.nan), decision.get("all_on_demand_usd", math.nan)
    if "cost_usd" in report and report.get("all_on_demand_usd") is not None:
        spent, all_on_demand = report["cost_usd"], report["all_on_demand_usd"]
    bar = _share_bar("cost", spent, all_on_demand, usd)
    if bar is not None:
        bar["text"] = f"{usd(spent)} USD, {100 * spent / all_on_demand:.0f} % of {usd(all_on_demand)} all on-demand"
    return bar


def _cost_facts(state: PageState) -> list[Fact]:
    """Return the cost of the machines; if none are provisioned, their cost on EC2."""
    decision, plan = state.decisions.newest, state.config.plan
    facts: list[Fact] = []
    rough = ec2_estimate(state.config, max(0.0, elapsed_s(state))) if known(elapsed_s(state)) else None
    if decision:
        expected, sd = decision.get("expected_cost_usd", math.nan), decision.get("expected_cost_sd_usd", math.nan)
        spot, on_demand = decision.get("instances_spot", math.nan), decision.get("instances_on_demand", math.nan)
        facts += [
            ("expected cost", f"{usd_range(expected, sd).replace('+-', '±')} USD" if known(expected) else ""),
            ("budget", f"{usd(plan.budget_usd)} USD" if plan.budget_usd else ""),
        ]
        if state.is_live:
            facts += [
                ("machines", f"{spot:.0f} spot, {on_demand:.0f} on-demand" if known(spot) and known(on_demand) else ""),
                ("limit of the plan", f"{decision['binding']}; moves: {decision.get('moves_total', 0):.0f}"),
            ]
    elif rough is not None:
        facts.append(("workers on EC2", f"{usd(rough['spot_usd'])} spot, {usd(rough['on_demand_usd'])} USD on-demand"))
    if rough is not None:
        workers_usd = rough["spot_usd"] if not decision else decision.get("spent_usd", math.nan)
        for line in rough["services"]:
            amount = "" if line["usd"] is None else f"{usd(line['usd'])} USD: "
            facts.append((line["name"], f"{amount}{line['source']}"))
        if known(workers_usd):
            facts.append(("workers and services", f"{usd(workers_usd + rough['services_usd'])} USD"))
    return facts


# --- is it safe


def _safety(state: PageState) -> list[Fact]:
    snapshot = state.snapshot
    durable = snapshot.durable_version
    behind = "" if durable is None else f", updates after it: {snapshot.version - durable}"
    dead = snapshot.dead
    harmful = sum(letter.code == "harmful" for letter in state.letters)
    return [
        ("audit", _audit_text(state)),
        ("durable", "" if durable is None else f"version {durable}{behind if state.is_live else ''}"),
        ("dead letters", dead.text() or "none"),
        ("guard", f"{harmful} of the last {len(state.letters)} dead letters would harm the model" if harmful else ""),
        ("skipped", skipped_text(snapshot.skipped)),
        ("restarts", _restarts(state)),
        ("lost", named(snapshot.lost) if snapshot.lost else ""),
        ("silent", silent_text(state)),
    ]


def _restarts(state: PageState) -> str:
    """Return the restarts of workers and server from the job's records, and those of other roles on this machine."""
    counts = {"workers": sum(line.restarts or 0 for line in state.snapshot.workers)}
    counts["parameter server"] = state.snapshot.ps_restarts
    counts |= {role: count for role, count in state.restarts.items() if role != "ps" and worker_of(role) is None}
    return ", ".join(f"{role} {count}" for role, count in counts.items())


def _audit_text(state: PageState) -> str:
    if audit := state.report.get("audit"):
        counts = {
            "applied once": audit["applied"], "not yet": audit["pending"], "missing": audit["missing"],
            "twice": audit["duplicate"],
        }  # fmt: skip
        return ", ".join(f"{count:,} {name}" for name, count in counts.items())
    seen = state.continuity
    if seen is None:
        return ""
    return f"{seen.offsets:,} offsets in updates, {seen.missing} missing, {seen.twice} twice so far"


# --- who works


def _work(state: PageState) -> list[Fact]:
    snapshot, policy = state.snapshot, state.snapshot.policy
    pipeline = state.config.worker.pipeline
    measured, predicted = number(snapshot.rate_measured), number(snapshot.rate_predicted)
    return [
        ("updates per second", f"{measured}, by theory {predicted}" if known(snapshot.rate_measured) else ""),
        ("stability margin", f"{number(snapshot.margin.sufficient)} {verdict(snapshot)}".replace("? ", "?")),
        ("staleness", "" if policy is None else _staleness(policy)),
        ("blocked", "" if policy is None else policy.blocked_text + policy.void_text),
        ("sent", "" if policy is None else f"gradients {policy.bytes_text}, weights {policy.weights_text}"),
        ("stages", "" if pipeline is None else f"{pipeline.stages} of each worker; a click on a worker names them"),
        *((name, text) for name, _, text in (line.partition(": ") for line in shard_lines(snapshot))),
        *(("table", line.removeprefix("table ")) for line in table_lines(snapshot)),
        ("join", "" if snapshot.join is None else snapshot.join.text().removeprefix("join: ")),
        ("history", snapshot.history),
        *((f"from events to {stage.stage}", stage.text()) for stage in snapshot.freshness),
    ]


def _staleness(policy: PolicySummary) -> str:
    mean, p99 = policy.staleness.mean, policy.staleness.p99
    if mean is None or p99 is None:
        return ""
    return f"{number(mean)} batches (99 %: {number(p99)}, lock step: -1; {policy.counted_text})"


def _worker(line: WorkerLine, state: PageState) -> dict[str, Any]:
    """Return a row of the table: numbers for sorting, and texts."""
    at_s, event = state.last_events.get(line.worker, (math.nan, ""))
    values = {
        "state": "spare" if line.is_spare else _states(state)[line.is_live],
        "since_s": _rounded(line.since_s, 1) if state.is_live or not line.is_live else None,
        "market": line.market.replace("_", "-"),
        "partitions": line.partitions,
        "computing": _share(line.computing),
        "waiting_s": _significant(line.waiting_s),
        "lag": line.lag_records,
        "rate": _significant(line.rate_per_s),
        "restarts": line.restarts,
        "usd": _significant(line.usd),
        "event": event,
        "event_s": _rounded(at_s, 1),
        "note": line.slow or line.waiting_for or line.machine,
    }
    return {name: value for name, value in values.items() if value not in (None, "")}


def _states(state: PageState) -> dict[bool | None, str]:
    if not state.is_live:
        return {None: "not known", True: "ended", False: "gone"}
    return {None: "starting", True: "live", False: "gone"}


def _rounded(value: float, decimals: int) -> float | None:
    if not known(value):
        return None
    return round(value, decimals) if decimals else round(value)


def _share(value: float) -> float | None:
    """Return a share in percent, with two digits below ten."""
    percent = 100 * value
    return _significant(percent, 2) if known(percent) and percent < 10 else _rounded(percent, 0)


def _significant(value: float, digits: int = 3) -> float | None:
    return float(f"{value:.{digits}g}") if known(value) else None


# --- curves and versions


def _curves(state: PageState) -> dict[str, Any]:
    """Return curves over the seconds since the first update: prequential error, held-out error, and samples learned."""
    history, start_s = state.history, state.history.first_time_s
    updates, evaluations = history.updates, history.evaluations
    at_s, held_s = updates.valid("time_s") - start_s, evaluations.valid("time_s") - start_s
    weight, window = updates.valid("weight"), history.prequential.window
    curves: dict[str, Any] = {"samples": points(at_s, updates.valid("samples_total"))}
    for name in ("loss", "accuracy"):
        column = f"prequential_{name}"
        means = moving_mean(updates.valid(column), weight, window) if column in updates.names else np.zeros(0)
        curves[name] = {
            "prequential": points(at_s, means),
            "held_out": points(held_s, evaluations.valid(name)),
        }
    stop, plan = state.config.stop, state.config.plan
    marks = {
        "accuracy": stop.accuracy,
        "loss": stop.loss,
        "deadline_s": plan.deadline_s,
        "samples": stop.samples or state.decisions.newest.get("target_samples"),
        "per_s": _rounded(state.snapshot.rate_predicted * state.config.group_size * state.config.data.batch_size, 1),
    }
    return {**curves, "marks": {name: value for name, value in marks.items() if value is not None}}


def points(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> dict[str, list[float]]:
    """Return some of the points by their number. Added points do not change them, until every second one is left
    out."""
    rows = np.flatnonzero(np.isfinite(y))
    step = 1
    while len(y) > 2 * MAX_POINTS * step:
        step *= 2
    kept = rows[rows % step == 0]
    if len(rows) and (not len(kept) or kept[-1] != rows[-1]):
        kept = np.append(kept, rows[-1])
    return {str(row): [round(float(x[row]), 2), float(f"{y[row]:.5g}")] for row in kept.tolist()}


def _versions(state: PageState) -> dict[str, list[str]]:
    """Return the last evaluated versions, the newest last: held-out loss and accuracy, and whether in a checkpoint."""
    table, durable = state.history.evaluations, state.snapshot.durable_version
    rows = map(table.row, range(max(0, len(table) - LISTED), len(table)))
    return {
        f"{row['version']:.0f}": [
            number(row["loss"]),
            number(row["accuracy"]) if known(row["accuracy"]) else "",
            "durable" if durable is not None and row["version"] <= durable else "not durable",
        ]
        for row in rows
        if not row["void"]
    }


def visible(value: Any) -> Any:
    r"""Return the same texts, lists and mappings, with invisible characters escaped.

    Control characters, and characters that change the direction of a text, are escaped. Ends of lines are not.

    >>> visible({"reason": ["abc\u202e", 1]})
    {'reason': ['abc\\u202e', 1]}
    """
    if isinstance(value, str):
        if value.isprintable():
            return value
        return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in value)
    if isinstance(value, Mapping):
        return {name: visible(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [visible(item) for item in value]
    return value
