"""What `make bench` must reach, and whether it did. Pure: rows of `benchmarks.report.summarize` in, verdicts out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Rows: TypeAlias = Mapping[tuple[str, str], Mapping[str, Any]]  # by section and name

SHARES = {("cnn", 8): 0.90, ("small", 8): 0.80, ("small", 2): 0.66}
# DOLL's ratio to the bare loops, at least this part of the ratio of that program.
RATIOS = {("cnn", 8): (1.0, "ddp"), ("small", 8): (0.93, "ddp"), ("cnn", 2): (1.0, "redis")}
# Samples/s of one worker, by the end of the row's name.
INTAKE = {"m=64": 400_000.0, "m=1": 100_000.0, "json": 330_000.0, "avro": 100_000.0}
APPLY_SHARE = 0.03
GRANT_TO_GRADIENT_MS = {"p50": 1.0, "p99": 10.0}
UPDATE_RATE = 0.01


class Goal(NamedTuple):
    """One bar. `met` is None where the run does not have what it needs."""

    what: str
    goal: str
    measured: str
    met: bool | None


def goals(rows: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """The goals of all rows that were measured, in the order of the rows."""
    by_name: Rows = {(row["section"], row["name"]): row for row in rows}
    result: list[Goal] = []
    for (section, name), row in by_name.items():
        if section == "A" and name.endswith(" doll"):
            model, group = name.split()[:2]
            result += _throughput(by_name, row, model, int(group.removeprefix("K=")))
        elif section == "B" and (least := next((v for end, v in INTAKE.items() if name.endswith(end)), None)):
            if not name.startswith("live"):  # the source shares the processor
                result.append(at_least(f"intake {name}", row["median"], least, digits=0))
        elif section == "E":
            measured = row["median"]
            met = abs(measured - 1) <= UPDATE_RATE
            result.append(Goal(name, f"1 +- {UPDATE_RATE:g}", f"{measured:.4f}", met))
    return result


def _throughput(rows: Rows, row: Mapping[str, Any], model: str, group: int) -> Iterable[Goal]:
    name = f"{model} K={group}"
    if (bar := RATIOS.get((model, group))) is not None:
        part, other = bar
        reference = rows.get(("A", f"{name} {other}"), {}).get("ratio", {}).get("median")
        of = f"{part:g} x {other}'s" if part != 1.0 else f"{other}'s"
        measured = row["ratio"]["median"]
        if reference is None:
            yield Goal(f"{name} ratio", f">= {of}", f"{measured:.3f}", None)
        else:
            least = part * reference
            yield Goal(f"{name} ratio", f">= {of}: {least:.3f}", f"{measured:.3f}", measured >= least)
    if (share := SHARES.get((model, group))) is not None:
        yield at_least(f"{name} share", row["share"]["median"], share)
    apply_share = row["apply_share"]
    yield Goal(f"{name} apply / compute", f"< {APPLY_SHARE:.0%}", f"{apply_share:.1%}", apply_share < APPLY_SHARE)
    for percentile, most_ms in GRANT_TO_GRADIENT_MS.items():
        value_ms = row[f"grant_to_fetch_{percentile}_ms"]
        met = None if math.isnan(value_ms) else value_ms < most_ms
        yield Goal(f"{name} grant to fetch, {percentile}", f"< {most_ms:g} ms", f"{value_ms:.2f} ms", met)


def at_least(what: str, measured: float, least: float, digits: int = 3) -> Goal:
    """A goal for a figure that must not be lower than `least`."""
    return Goal(what, f">= {least:,.{digits}f}", f"{measured:,.{digits}f}", measured >= least)
