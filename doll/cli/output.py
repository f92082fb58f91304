"""Output of commands: results on standard output, as text or JSON (`--json`), and progress on standard error."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from doll.process.files import json_safe
from doll.redaction import redacted


def emit(as_json: bool, content: Any, text: str) -> None:
    """Print `content` as JSON if `as_json` is set, otherwise print `text`, to standard output."""
    if as_json:
        is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        text = json.dumps(json_safe(content), indent=2, ensure_ascii=not is_utf8)
    else:
        text = redacted(text)
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()


def emit_result(as_json: bool, result: Any) -> None:
    """Print the `text()` of an object; as JSON, print its `to_dict()`, or its fields if it has no `to_dict()`."""
    content = result.to_dict() if hasattr(result, "to_dict") else dataclasses.asdict(result)
    emit(as_json, content, result.text())


def say(text: str) -> None:
    """Print a line to standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@contextmanager
def progress_bar(description: str, total: float | None) -> Iterator[Callable[..., None]]:
    """Show a progress bar until the end of the context.

    Yield a function that updates the bar. Its arguments: `description`; `completed` (amount done so far, of `total`) or
    `advance` (amount done since the last call).
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        yield functools.partial(bar.update, bar.add_task(description, total=total))
