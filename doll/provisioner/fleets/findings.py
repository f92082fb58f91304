"""What a fleet's owner says of itself, for `doll doctor`: one line each, with its remedy. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One thing that was asked.

    Attributes:
        what: was asked, "Kubernetes: pods in namespace doll".
        result: `warning`: the job can run, later or with less; `unknown`: nobody said.
        todo: what a person should do; "" where nothing.
    """

    what: str
    result: Literal["ok", "warning", "failed", "unknown"]
    detail: str = ""
    todo: str = ""
