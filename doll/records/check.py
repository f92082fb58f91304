"""The result of one check of `doll doctor`. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Result = Literal["ok", "warning", "failed", "unknown"]


@dataclass(frozen=True)
class Check:
    """One check: what was checked, and the result."""

    name: str  # the checked thing, with the role it concerns, if any
    result: Result  # `warning`: the job runs later, or with less than configured; `unknown`: no answer
    detail: str = ""  # the observed state
    todo: str = ""  # the action that a person should take; "": no action
