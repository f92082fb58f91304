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
    times = [f"  {name:<20}{count:>6}{p50:>9}{maximum:>9}" for name, count, p50, maximum in rows]
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
    ]


def _cells(spread: Mapping[str, float | None]) -> tuple[str, str]:
    p50, maximum = ("-" if spread[name] is None else f"{spread[name]:.2f}" for name in ("p50", "max"))
    return p50, maximum
