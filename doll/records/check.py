"""One judgement about what a job needs, for `doll doctor`. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Result = Literal["ok", "warning", "failed", "unknown"]


@dataclass(frozen=True)
class Check:
    """A check of one thing, and its result."""

    name: str  # what was looked at, with its role if it concerns one
    result: Result  # `warning`: the job can run, later or with less than its job file asks for; `unknown`: nobody said
    detail: str = ""  # what is there
    todo: str = ""  # what a person should do; "" if nothing
