"""The bill of a job for people: its instances and the services beside them, compared with AWS's report. Pure, except
that the journal is read."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from doll.amounts import duration, usd
from doll.errors import ConfigError
from doll.provisioner.cost_reports import ReportLine, category
from doll.provisioner.prices.shipped import CostLine
from doll.records.bounded import json_object, printable

_MOST_SHOWN: Final = 20
_OTHERS: Final = "(no category)"


class BilledInstance(NamedTuple):
    """An instance that has ended, with its cost by DOLL."""

    id: str
    slot: int
    market: str
    usd: float


class Comparison(NamedTuple):
    """A row of a comparison: by DOLL and by AWS; None: there is no such line."""

    name: str
    doll_usd: float | None
    aws_usd: float | None


@dataclass
class AwsCosts:
    """The lines of a report that belong to a job.

    Attributes:
        by_resource: USD of the machines of workers, by id.
        unknown: USD by product and usage type of lines of the job without a category.
        others, others_usd: number and sum of the lines that do not belong to the job.
    """

    lines: int = 0
    by_resource: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_category: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    unknown: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    others: int = 0
    others_usd: float = 0.0


@dataclass(frozen=True)
class JobBill:
    """The bill of a job from its start to its last decision.

    Attributes:
        instances: ended instances of the journal and the state.
        running_usd: cost of the workers that is not in `instances`: machines that run, and those that ended before the
            journal of this machine.
        services: costs beside the workers.
        aws: what AWS's report says; None: no report is given.
    """

    job: str
    started_s: float
    until_s: float
    instances: Sequence[BilledInstance]
    running_ids: Collection[str]
    running_usd: float
    services: Sequence[CostLine]
    aws: AwsCosts | None = None

    @property
    def workers_usd(self) -> float:
        return math.fsum(instance.usd for instance in self.instances) + self.running_usd

    def by_instance(self) -> list[Comparison]:
        """Return the cost of each instance by DOLL and by AWS, in the order of DOLL's bill."""
        doll_usd: dict[str, float | None] = {}
        for instance in self.instances:  # one that was stopped and started again has two lines
            doll_usd[instance.id] = (doll_usd.get(instance.id) or 0.0) + instance.usd
        doll_usd |= {id_: doll_usd.get(id_) for id_ in self.running_ids}
        aws = {} if self.aws is None else self.aws.by_resource
        rows = [Comparison(id_, amount, aws.get(id_)) for id_, amount in doll_usd.items()]
        return rows + [Comparison(id_, None, amount) for id_, amount in aws.items() if id_ not in doll_usd]

    def by_category(self) -> list[Comparison]:
        """Return the cost of each category by DOLL and by AWS; the last row is the sum."""
        ours: dict[str, float | None] = {"workers": self.workers_usd, **{line.key: line.usd for line in self.services}}
        aws = {} if self.aws is None else self.aws.by_category
        rows = [Comparison(name, amount, aws.get(name)) for name, amount in ours.items()]
        rows += [Comparison(name, None, amount) for name, amount in aws.items() if name not in ours]
        total = math.fsum(amount for amount in ours.values() if amount is not None)
        return [*rows, Comparison("sum", total, None if self.aws is None else math.fsum(aws.values()))]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        aws = self.aws
        return {
            "job": self.job, "started_s": self.started_s, "until_s": self.until_s, "workers_usd": self.workers_usd,
            "running_usd": self.running_usd, "instances": [row._asdict() for row in self.by_instance()],
            "categories": [row._asdict() for row in self.by_category()],
            "services": [line._asdict() for line in self.services],
            "aws": None if aws is None else {
                "lines": aws.lines, "unknown": dict(aws.unknown), "others": aws.others, "others_usd": aws.others_usd,
            },
        }  # fmt: skip

    def text(self) -> str:
        """Return the bill as text for people."""
        lines = [f"{self.job}: costs for {duration(self.until_s - self.started_s)}, by DOLL"]
        if self.aws is None:
            lines += [f"  {row.name}  {_amount(row.doll_usd)} USD" for row in self.by_instance()[:_MOST_SHOWN]]
        else:
            lines[0] += f" and by {self.aws.lines} lines of AWS's report"
            lines += _table("instance", self.by_instance()[:_MOST_SHOWN])
        if (more := len(self.by_instance()) - _MOST_SHOWN) > 0:
            lines.append(f"  ... {more} more instances; --json has all")
        if self.running_usd > 0:
            lines.append(
                f"  of the workers {usd(self.running_usd)} USD are of machines that run, or are not in the journal"
            )
        lines += _table("category", self.by_category()) if self.aws is not None else []
        width = max((len(line.name) for line in self.services), default=18)
        lines += ["Beside the workers, by DOLL:"] if self.services else []
        lines += [line.text(width) for line in self.services]
        if self.aws is None:
            lines.append(f"  {'sum, with workers':<{width}}  {usd(self.by_category()[-1].doll_usd or 0.0):>8} USD")
            return "\n".join(lines)
        lines += [
            f"- no category: {printable(name)}: {usd(amount)} USD"
            for name, amount in sorted(self.aws.unknown.items(), key=lambda item: -abs(item[1]))[:_MOST_SHOWN]
        ]
        lines.append(
            f"- {self.aws.others} lines, {usd(self.aws.others_usd)} USD, are of other resources or times, or have no "
            "tag doll:job or doll:stack of this job: activate these cost allocation tags in AWS's console"
        )
        lines.append("- AWS adds lines for up to 24 hours, and changes a month's lines until its invoice")
        return "\n".join(lines)


def _table(title: str, rows: Sequence[Comparison]) -> list[str]:
    width = max(len(title), *(len(printable(row.name)) for row in rows)) if rows else len(title)
    lines = [f"  {title:<{width}}  {'DOLL':>10}  {'AWS':>10}  {'difference':>10}  USD"]
    for row in rows:
        known = row.doll_usd is not None and row.aws_usd is not None
        difference = _amount((row.aws_usd or 0.0) - (row.doll_usd or 0.0)) if known else "-"
        amounts = f"{_amount(row.doll_usd):>10}  {_amount(row.aws_usd):>10}  {difference:>10}"
        lines.append(f"  {printable(row.name):<{width}}  {amounts}")
    return lines


def _amount(value: float | None) -> str:
    return "-" if value is None else usd(value)


def aws_costs(
    report: Iterable[ReportLine], *, ids: Collection[str], job: str, stack: str, start_s: float, end_s: float
) -> AwsCosts:  # fmt: skip
    """Return the costs of a job in a report. A line belongs to the job by the id of an instance, or by its tags if its
    time overlaps that of the job. `stack`: the value of the tags `doll:stack` and `doll:cluster`; "": none."""
    costs, ids = AwsCosts(), frozenset(ids)
    for line in report:
        tags, is_ours = line.tags, line.resource in ids
        tagged = tags["doll_job"] == job if "doll_job" in tags else bool(stack) and stack in _stacks(tags)
        if not is_ours and not (tagged and line.start_s < end_s and line.end_s > start_s):
            costs.others += 1
            costs.others_usd += line.usd
            continue
        costs.lines += 1
        matched = category(line)
        if is_ours and matched in ("", "workers"):
            matched = "workers"
        if matched == "workers":
            costs.by_resource[line.resource] += line.usd
        elif not matched:
            costs.unknown[f"{line.product} {line.usage}".strip() or "(no usage type)"] += line.usd
        costs.by_category[matched or _OTHERS] += line.usd
    return costs


def _stacks(tags: Mapping[str, str]) -> tuple[str | None, str | None]:
    return tags.get("doll_stack"), tags.get("doll_cluster")


def billed_instances(journal: Path, kept: Mapping[str, Any] | None, started_s: float) -> list[BilledInstance]:
    """Return the instances that ended after `started_s`, from the journal and the saved state. Raises ConfigError if
    one of them has other content."""
    billed: dict[tuple[str, float], BilledInstance] = {}
    saved = (kept or {}).get("billing", {}).get("lines", [])
    try:
        for entry in (*_ended(journal), *saved):
            if entry["ended_s"] is None or entry["ended_s"] > started_s:
                line = BilledInstance(str(entry["id"]), int(entry["slot"]), str(entry["market"]), float(entry["usd"]))
                billed[line.id, float(entry["launched_s"])] = line  # one that came back has a later line
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{journal}: expected lines of this release ({type(error).__name__}: {error})") from error
    return list(billed.values())


def _ended(journal: Path) -> Iterator[dict[str, Any]]:
    try:
        with journal.open("rb") as file:
            for line in file:
                if b'"ended"' not in line[:40]:
                    continue  # decisions are long, and most lines
                try:
                    yield json_object(line)
                except ValueError:
                    continue  # cut off by a crash
    except FileNotFoundError:
        return
