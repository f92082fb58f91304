"""The result of checking one thing that a job needs, for `doll doctor`. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Result = Literal["ok", "warning", "failed", "unknown"]


@dataclass(frozen=True)
class Check:
    """A check of one thing, and its result."""

    name: str  # the checked thing, with the role it concerns, if any
    result: Result  # `warning`: the job can run, but later or with less than configured; `unknown`: no answer
    detail: str = ""  # the observed state
    todo: str = ""  # the action that a person should take; "": no action
