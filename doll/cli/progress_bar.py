"""A progress bar on standard error for commands that compute for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


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
