"""Details that a click on the live page opens: a worker, an update with its offsets, a dead letter, a decision of the
provisioner, a version. Pure.

A detail has a title, facts, and possibly a table. It is None if the item does not exist, or if its record was deleted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from doll.amounts import clock, clock_range, date_time, known, number, usd, usd_range
from doll.config.pipeline import PipelineConfig
from doll.monitor.state.metric_window import update_values
from doll.monitor.state.progress import MAX_UPDATES
from doll.monitor.state.watched_job import KeptVersions, PageState
from doll.monitor.views.text import worker_state
from doll.records.control import Update

Detail = dict[str, Any]

MAX_ROWS: Final = 2_000  # limit of a table
_PAYLOAD_CHARS: Final = 1_024


def detail(state: PageState, kind: str, key: Sequence[int]) -> Detail | None:
    """Return the details of one item on the page.

    Args:
        kind: one of `KINDS`.
        key: numbers that identify the item: partition and offset of a dead letter, one number for other kinds.
    """
    arguments, function = KINDS[kind]
    return function(state, *key) if len(key) == arguments else None


def _detail(title: str, facts: Mapping[str, str], **table: Any) -> Detail:
    return {"title": title, "facts": [[name, text] for name, text in facts.items() if text], **table}


def _time(unix_s: float) -> str:
    return f"{date_time(unix_s)} UTC" if known(unix_s) and unix_s > 0 else ""


def _worker(state: PageState, number_: int) -> Detail | None:
    line = next((line for line in state.snapshot.workers if line.worker == number_), None)
    if line is None:
        return None
    at_s, event = state.last_events.get(number_, (math.nan, ""))
    facts = {
        "state": worker_state(line),
        "last event": f"{event}, {_time(at_s)}" if event else "",
        "market": line.market.replace("_", "-"),
        "machine": line.machine,
        "cost": f"{usd(line.usd)} USD" if known(line.usd) else "",
        "control link": line.control,
        "restarts": "" if line.restarts is None else str(line.restarts),
        "samples per second": number(line.rate_per_s) if known(line.rate_per_s) else "",
        "computing": f"{100 * line.computing:.0f} % of the time" if known(line.computing) else "",
        "a batch waits": f"{number(line.waiting_s)} s for its turn" if known(line.waiting_s) else "",
        "a batch takes": f"{number(line.batch_s)} s from grant to push" if known(line.batch_s) else "",
        "records not read": "" if line.lag_records is None else f"{line.lag_records:,}",
        "batches not durable": "" if line.retained_batches is None else str(line.retained_batches),
        "slow": line.slow,
        "waits for": line.waiting_for,
        **_stages(state.config.worker.pipeline, number_),
    }
    served = sorted(partition for partition, worker in state.served_by.items() if worker == number_)
    rows = [[str(partition), f"{state.next_offsets.get(partition, 0):,}"] for partition in served[:MAX_ROWS]]
    return _detail(f"Worker {number_}", facts, columns=["partition", "learned below offset"], rows=rows)


def _stages(pipeline: PipelineConfig | None, worker: int) -> dict[str, str]:
    """Return device and layers of each stage of a worker, from the job file."""
    if pipeline is None:
        return {}
    chosen = "layers by the profile" if pipeline.profile is not None else "about as many parameters as the others"
    layers = [", ".join(names) for names in pipeline.layers or []] or [chosen] * pipeline.stages
    devices = [device.device for device in pipeline.devices_of(worker)]
    stages = enumerate(zip(devices, layers, strict=True), 1)
    return {f"stage {stage}": f"{device}: {names}" for stage, (device, names) in stages}


def _update(state: PageState, version: int) -> Detail | None:
    row = _row_of(state, version)
    update = next((item for item in reversed(state.updates) if item.version == version), None)
    if update is None and row is None:
        return None
    if update is None:
        topic = state.config.topic("updates")
        where = f"in the topic {topic}; a page keeps those of the newest updates only, at most {MAX_UPDATES}"
        if not state.is_live:
            where += ", and so does the folder of a run that has ended"
        return _detail(f"Update {version}", {**_row_facts(row), "offsets": where})
    is_void = (update.term, update.version) in state.history.updates.void_of(MAX_UPDATES)
    facts = {
        "samples": f"{update.n_samples:,}",
        "void": "not in the model: a later server began before it, after a crash or doll rollback" if is_void else "",
        "prequential loss": number(update.loss),
        **{f"prequential {name}": number(value) for name, value in update_values(update.metrics).items()},
        "from the first grant": f"{number(update.grant_to_update_s)} s",
        "at the server": f"{number(1000 * update.apply_s)} ms",
        "term": str(update.term),
        "at": _time(update.time_s),
    }
    columns = ["partition", "offsets", "samples", "worker", "on version", "computed", "waited", "without"]
    return _detail(f"Update {version}", facts, columns=columns, rows=_members(update))


def _members(update: Update) -> list[list[str]]:
    rows = []
    for item in update.members[:MAX_ROWS]:
        without = {"dead": len(item.dead), "gaps": len(item.gaps), "lost": len(item.lost)}
        rows.append(
            [
                str(item.partition), f"{item.lo:,} to {max(item.lo, item.hi - 1):,}",
                f"{item.n_samples:,}", str(item.worker), str(item.base_version),
                f"{number(1000 * item.compute_s)} ms", f"{number(1000 * item.wait_s)} ms",
                ", ".join(f"{count} {name}" for name, count in without.items() if count),
            ]
        )  # fmt: skip
    return rows


def _row_of(state: PageState, version: int) -> dict[str, float] | None:
    """Return the newest row of the table of updates that has this version and is not void."""
    table = state.history.updates
    for index in range(len(table) - 1, -1, -1):
        row = table.row(index)
        if row["version"] == version and not row["void"]:
            return row
    return None


def _row_facts(row: Mapping[str, float] | None) -> dict[str, str]:
    if row is None:
        return {}
    return {
        "samples": f"{row['n_samples']:,.0f}",
        "batches": f"{row['batches']:,.0f}",
        "prequential loss": number(row["prequential_loss"]),
        "samples so far": f"{row['samples_total']:,.0f}",
        "term": f"{row['term']:.0f}",
        "at": _time(row["time_s"]),
    }


def _letter(state: PageState, partition: int, offset: int) -> Detail | None:
    at = (partition, offset)
    item = next((item for item in reversed(state.letters) if (item.partition, item.offset) == at), None)
    if item is None:
        return None
    shown = item.payload[:_PAYLOAD_CHARS].decode("utf-8", "backslashreplace")
    facts = {
        "reason": item.reason,
        "code": item.code,
        "refused": "the whole record" if item.whole else f"{item.samples} of its samples",
        "worker": str(item.worker),
        "size": f"{item.payload_bytes:,} bytes",
        "at": _time(item.time_s),
        "content": "".join(char if char.isprintable() or char == "\n" else "�" for char in shown),
        "to do": "doll dead show and doll dead replay read it whole, and put it into the stream again",
    }
    return _detail(f"Dead letter of partition {partition}, offset {offset:,}", facts)


def _decision(state: PageState, turn: int) -> Detail | None:
    item = next((item for item in reversed(state.decisions.notable) if item["turn"] == turn), None)
    if item is None:
        return None

    def of_usd(name: str) -> str:
        return f"{usd(item[name])} USD" if known(item.get(name, math.nan)) else ""

    finish_s, cost = item.get("expected_finish_s", math.nan), item.get("expected_cost_usd", math.nan)
    facts = {
        "phase": item["phase"],
        "decided by": item["binding"],
        "at": clock(item.get("elapsed_s", math.nan)) + " on the job's clock",
        "deadline": "can be met" if item["feasible"] else "cannot be met",
        "expected end": clock_range(finish_s, item.get("expected_finish_sd_s", math.nan)),
        "expected cost": f"{usd_range(cost, item.get('expected_cost_sd_usd', math.nan))} USD" if known(cost) else "",
        "spent": of_usd("spent_usd"),
        "all on-demand until then": of_usd("all_on_demand_usd"),
        "done": "; ".join(item["actions"]),
        "alarms": "; ".join(item["alarms"]),
    }
    facts = {name: text.replace("+-", "±") for name, text in facts.items()}
    rows = [[slots, reason] for reason, slots in item["reasons"].items()]
    return _detail(f"Decision {turn} of the provisioner", facts, columns=["slots", "reason"], rows=rows)


def _version(state: PageState, version: int) -> Detail | None:
    table, row = state.history.evaluations, _row_of(state, version)
    evaluations = [table.row(index) for index in range(len(table))]
    evaluation = next((item for item in reversed(evaluations) if item["version"] == version), {})
    if row is None and not evaluation:
        return None
    durable = state.snapshot.durable_version
    facts = {
        "held-out loss": number(evaluation["loss"]) if evaluation else "not evaluated",
        "held-out accuracy": number(evaluation["accuracy"]) if evaluation and known(evaluation["accuracy"]) else "",
        "durable": "" if durable is None else "in a checkpoint, or a later one is" if version <= durable else "not yet",
        **_kept(state.kept, version),
        **_row_facts(row),
        "to do": f"doll versions show RUN {version} has its lineage; doll versions pin RUN {version} keeps it",
    }
    return _detail(f"Version {version}", facts)


def _kept(kept: KeptVersions | None, version: int) -> dict[str, str]:
    """Return whether the version can be used, and its names."""
    if kept is None:
        return {}
    aliases = kept.marks.aliases_of(version)
    return {
        "kept": ("yes, pinned" if version in kept.marks.pins else "yes")
        if version in kept.versions
        else "not any more",
        "aliases": ", ".join(aliases),
        "gates": "" if (verdict := kept.marks.verdict_of(version)) is None else verdict.text(),
    }


KINDS: Final[Mapping[str, tuple[int, Callable[..., Detail | None]]]] = {
    "worker": (1, _worker),
    "update": (1, _update),
    "letter": (2, _letter),
    "decision": (1, _decision),
    "version": (1, _version),
}
"""The kinds of items that can be opened: the count of numbers in a key, and the function that returns the details."""
