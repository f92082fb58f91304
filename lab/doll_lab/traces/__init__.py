"""Formats of recorded spot markets, each in one module.

To add a format, write a module with a `TraceFormat` (see `doll_lab.traces.form`), add it to `FORMATS`, describe it in
docs/traces.md, and add a small file in this format to tests/unit/provisioner/traces/test_model.py.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from doll.provisioner.traces.recordings import Loader

from doll_lab.traces import bamboo, ec2_prices, google_lifetimes, skypilot
from doll_lab.traces.form import TraceFormat

FORMATS: Sequence[TraceFormat] = (
    skypilot.FORMAT, ec2_prices.FORMAT, google_lifetimes.FORMAT, bamboo.EVENTS, bamboo.COUNTS,
)  # fmt: skip


def loader_of(first_line: str, file_name: str) -> Loader | None:
    """Return the loader for a file by its first line, otherwise by its name without .gz; None: no format fits."""
    line = first_line.strip()
    for known in FORMATS:
        if known.recognises(line):
            return known.load
    for known in FORMATS:
        if fnmatch.fnmatchcase(file_name, known.published_as):
            return known.load
    return None
