"""Results on standard output, as text or as JSON with `--json`, and progress on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from doll.process.files import json_safe
from doll.redaction import redacted


def emit(as_json: bool, content: Any, text: str) -> None:
    """Print `content` as JSON, or `text`, to standard output."""
    if as_json:
        is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        text = json.dumps(json_safe(content), indent=2, ensure_ascii=not is_utf8)
    else:
        text = redacted(text)
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()


class Advance(Protocol):
    """Shows progress."""

    def __call__(self, *, completed: float | None = None, advance: float | None = None, description: str) -> None:
        """Show what was done in total (`completed`), or what was done more (`advance`)."""


@contextmanager
def progress_bar(description: str, total: float | None) -> Iterator[Advance]:
    """A bar that disappears at the end of the context.

    Args:
        total: what `completed` is measured against.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)

        def advance(*, completed: float | None = None, advance: float | None = None, description: str) -> None:
            bar.update(task, completed=completed, advance=advance, description=description)

        yield advance
