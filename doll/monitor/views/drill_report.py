"""The part of a drill in `report.json`, as text. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def lines(report: Mapping[str, Any]) -> list[str]:
    """The recovery times by kind of fault, and what the audit says, as lines of text."""
    rows = [("fault", "count", "p50 s", "max s")]
    for name, count in report["faults"].items():
        rows.append((name, str(count), *_cells(report["recovery_s_by_kind"][name])))
    rows.append(("all", str(sum(report["faults"].values())), *_cells(report["recovery_s"])))
    width = max(20, *(len(row[0]) for row in rows))
    times = [f"  {name:<{width}}{count:>6}{p50:>9}{maximum:>9}" for name, count, p50, maximum in rows]
    audit = report["audit"]
    per_record = report["batch_size"] // report["records_per_batch"]
    lost, duplicated = (
        ("unknown (no audit)",) * 2
        if audit is None
        else (str(audit["missing"] * per_record), str(audit["duplicate"] * per_record))
    )
    return [
        "drill: seconds from a fault to the next update",
        *times,
        f"  recoveries {report['recoveries']} of {sum(report['faults'].values())}, samples lost {lost}, "
        f"samples duplicated {duplicated}",
        *control_lines(report["control"]),
        *set_lines(report["sets"]),
        *replay_lines(report.get("replay")),
    ]


def control_lines(control: Mapping[str, Any]) -> list[str]:
    if control["kind"] == "kafka":
        return ["  control channel kafka"]
    opened = ", ".join(f"{count} {link}" for link, count in control["links_opened"].items() if count)
    return [
        f"  control channel {control['kind']}: links opened {opened or 0}, broken {control['links_broken']}, refused "
        f"{control['links_refused']}; live workers fell back to Kafka {control['fallbacks']} times and came back "
        f"{control['returns']} times"
    ]


def set_lines(sets: Mapping[str, Any]) -> list[str]:
    causes = ", ".join(f"{cause} {count}" for cause, count in sets["requeued_by_cause"].items())
    return [
        f"  sets: {sets['applied']} applied, {sets['applied_with_several_batches']} of them with 2 to "
        f"{sets['max_batches']} batches; batches requeued: {sets['requeued_batches']} ({causes or 'none'}), "
        f"{sets['requeued_together']} times several at once"
    ]


def replay_lines(replay: Mapping[str, Any] | None) -> list[str]:
    if replay is None:
        return []
    return [
        f"  replay: {replay['checkpoints']} checkpoints of {replay['terms']} terms equal to the bit"
        if not replay["differences"]
        else f"  replay: {'; '.join(replay['differences'])}"
    ]


def _cells(spread: Mapping[str, float | None]) -> tuple[str, str]:
    p50, maximum = ("-" if spread[name] is None else f"{spread[name]:.2f}" for name in ("p50", "max"))
    return p50, maximum
