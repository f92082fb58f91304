"""Versions of a job as text: a table of all versions, one version with its lineage, and the difference of two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from doll.amounts import aligned, byte_size, clock, date_time, known, usd
from doll.monitor.state.table_changes import TableChange
from doll.monitor.state.version_lines import VersionDiff, VersionLine, model_fields

_COLUMNS = ("version", "saved (UTC)", "samples", "policy", "prequential", "held-out", "accuracy", "USD", "job", "marks")


def versions_table(lines: Sequence[VersionLine], location: str) -> str:
    """Return one line for each version, the newest last."""
    if not lines:
        return f"no version is kept in {location}: nothing has been learned yet"
    rows = [_COLUMNS, *(_row(line) for line in lines)]
    return "\n".join(aligned(rows, ">>><>>>><<"))


def _row(line: VersionLine) -> tuple[str, ...]:
    names = [*line.aliases, *(["(pinned)"] if line.is_pinned else [])]
    if line.verdict is not None and not line.verdict.passed:
        names.append("(held back)")
    return (
        str(line.version), date_time(line.saved_s), f"{line.samples:,}".replace(",", " "), line.policy,
        _number(line.prequential.get("loss")), _number(line.held_out.get("loss")),
        _number(line.held_out.get("accuracy")), usd(line.cost_usd) if known(line.cost_usd) else "-",
        line.digest, " ".join(names) or "-",
    )  # fmt: skip


def version_text(line: VersionLine) -> str:
    """Return one version with its lineage, as text."""
    spans = ", ".join(f"{n}: {lo}..{hi}" for n, (lo, hi) in enumerate(line.offsets))
    marks = [*(f"alias {name}" for name in line.aliases), *(["pinned"] if line.is_pinned else [])]
    rows = [
        ("saved", f"{date_time(line.saved_s)} UTC by term {line.term}, {byte_size(line.size_bytes)}"),
        ("marks", ", ".join(marks) or "none"),
        *(("gates", text) for text in _verdict(line)),
        *(("alias", remark) for remark in line.remarks),
        ("samples", f"{line.samples}, in {clock(line.elapsed_s)} of learning"),
        ("offsets", f"{spans} (partition: first..behind the last)"),
        ("policy", line.policy),
        ("prequential", _numbers(line.prequential)),
        ("held-out", _numbers(line.held_out)),
        ("cost", f"{usd(line.cost_usd)} USD" if known(line.cost_usd) else "not known"),
        ("began with", line.init_from or "the task's own weights"),
        ("recipe", " ".join(f"{key.removeprefix('training.')}={value}" for key, value in line.recipe.items())),
        ("model", " ".join(f"{key}={value}" for key, value in model_fields(line).items())),
        ("job", f"fingerprint {line.digest}, grid {line.grid}"),
        ("code", line.code or "not known"),
        *(("note", note) for note in line.notes),
    ]
    return "\n".join([f"version {line.version}", *(f"  {row}" for row in aligned(rows, "<"))])


def _verdict(line: VersionLine) -> list[str]:
    """Return the verdict of the gates and its checks, one line each."""
    if line.verdict is None:
        return []
    against = "" if line.verdict.against is None else f" against version {line.verdict.against}"
    head = (
        f"{line.verdict.text() if line.verdict.passed else 'held back'}{against}, {date_time(line.verdict.time_s)} UTC"
    )
    return [head, *(f"{'+' if check.passed else '-'} {check.name}: {check.text}" for check in line.verdict.checks)]


def diff_text(diff: VersionDiff) -> str:
    """Return the difference of two versions, as text."""
    a, b = diff.a, diff.b
    spans = ", ".join(f"{n}: {lo}..{hi}" for n, (lo, hi) in enumerate(diff.offsets) if lo != hi)
    rows = [
        ("samples", f"{a.samples} -> {b.samples} ({b.samples - a.samples:+})"),
        ("offsets", spans or "the same"),
        ("prequential", _pair(a.prequential, b.prequential)),
        ("held-out", _pair(a.held_out, b.held_out)),
        ("job", diff.changes or "the same"),
    ]
    for name, (change, length) in diff.distances.items():
        share = f", {change / length:.2%} of its length" if length else ""
        rows.append(("weights", f"{name}: changed by {change:.4g}{share}"))
    rows += [("table", f"{name}: {_rows_text(change)}") for name, change in diff.tables.items()]
    return "\n".join([f"from version {a.version} to {b.version}", *(f"  {row}" for row in aligned(rows, "<"))])


def _rows_text(change: TableChange) -> str:
    """Return a text such as `3 of 40 rows differ, by 0.5 at most, most of all 7 (0.71), 12 (0.5); 2 new, 1 gone`."""
    text = f"{change.changed} of {change.rows} rows differ"
    if change.most:
        most = ", ".join(f"{number} ({length:.4g})" for number, length in change.most)
        text += f", by {change.largest:.4g} at most, most of all {most}"
    parts = [f"{count} {what}" for count, what in ((change.new, "new"), (change.gone, "gone")) if count]
    return f"{text}; {', '.join(parts)}" if parts else text


def _pair(a: Mapping[str, float], b: Mapping[str, float]) -> str:
    names = [name for name in a if name in b]
    return ", ".join(f"{name} {_number(a[name])} -> {_number(b[name])}" for name in names) or "not known of both"


def _numbers(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in values.items()) or "not known"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
