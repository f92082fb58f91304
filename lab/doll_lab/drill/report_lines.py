"""A drill's lines in the summary of a report: recovery times, audit, control links and sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from doll.amounts import aligned


def drill_lines(report: Mapping[str, Any]) -> list[str]:
    """Return the recovery times by kind of fault, and the result of the audit, as lines of text."""
    num_faults = sum(report["faults"].values())
    spreads = {**report["recovery_s_by_kind"], "all": report["recovery_s"]}
    rows = [("fault", "count", "p50 s", "max s")]
    for name, count in {**report["faults"], "all": num_faults}.items():
        p50, most = ("-" if spreads[name][key] is None else f"{spreads[name][key]:.2f}" for key in ("p50", "max"))
        rows.append((name, str(count), p50, most))
    audit, replay = report["audit"], report.get("replay")
    per_record = report["batch_size"] // report["records_per_batch"]
    lost, duplicated = (
        "unknown (no audit)" if audit is None else audit[name] * per_record for name in ("missing", "duplicate")
    )
    lines = [
        "drill: seconds from a fault to the next update",
        *(f"  {line}" for line in aligned(rows)),
        f"  recoveries {report['recoveries']} of {num_faults}, samples lost {lost}, samples duplicated {duplicated}",
        control_line(report["control"]),
        set_line(report["sets"]),
    ]
    if replay is not None:
        equal = f"{replay['checkpoints']} checkpoints of {replay['terms']} terms equal to the bit"
        lines.append(f"  replay: {'; '.join(replay['differences']) or equal}")
    return lines


def control_line(control: Mapping[str, Any]) -> str:
    """Return how often the links of grants and pushes were opened and lost in a drill."""
    if control["kind"] == "kafka":
        return "  control channel kafka"
    opened = ", ".join(f"{count} {link}" for link, count in control["links_opened"].items() if count)
    return (
        f"  control channel {control['kind']}: links opened {opened or 0}, broken {control['links_broken']}, refused "
        f"{control['links_refused']}; live workers fell back to Kafka {control['fallbacks']} times and came back "
        f"{control['returns']} times"
    )


def set_line(sets: Mapping[str, Any]) -> str:
    """Return the sets that were applied in a drill, and the batches that were requeued."""
    causes = ", ".join(f"{cause} {count}" for cause, count in sets["requeued_by_cause"].items())
    return (
        f"  sets: {sets['applied']} applied, {sets['applied_with_several_batches']} of them with 2 to "
        f"{sets['max_batches']} batches; batches requeued: {sets['requeued_batches']} ({causes or 'none'}), "
        f"{sets['requeued_together']} times several at once"
    )
