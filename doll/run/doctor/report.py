"""A table of judgements. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from doll.amounts import aligned
from doll.records.check import Check, Result

_COUNTED: tuple[Result, ...] = ("failed", "warning", "unknown")


@dataclass(frozen=True)
class Report:
    """All judgements about a job."""

    job: str
    checks: Sequence[Check]

    @property
    def ok(self) -> bool:
        """Nothing has failed."""
        return all(check.result != "failed" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {"job": self.job, "ok": self.ok, "checks": [dataclasses.asdict(check) for check in self.checks]}

    def text(self) -> str:
        """A table, and a line that counts."""
        rows = [("check", "result", "what is there; what to do")]
        rows += [
            (check.name, check.result, "; ".join(filter(None, (check.detail, check.todo)))) for check in self.checks
        ]
        counts = [f"{sum(check.result == result for check in self.checks)} {result}" for result in _COUNTED]
        ended = "can run" if self.ok else "cannot run"
        return "\n".join([*aligned(rows, "<"), f"{self.job} {ended}: {len(self.checks)} checks, {', '.join(counts)}"])
