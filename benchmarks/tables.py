"""Tables of strings, for a terminal and for a document."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Table:
    """Attributes:
    title: says what the rows are.
    columns: their headings; those in `left` are text, all others are numbers.
    rows: a string for each column.
    """

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    left: Sequence[str] = ("", "what", "goal", "process", "thread", "function")

    def text(self, width: int = 160) -> str:
        """For a terminal of `width` characters."""
        from rich.console import Console
        from rich.table import Table as RichTable

        table = RichTable(title=self.title)
        for column in self.columns:
            table.add_column(column, justify="left" if column in self.left else "right")
        for row in self.rows:
            table.add_row(*(cell.replace("**", "") for cell in row))
        console = Console(file=io.StringIO(), width=width)
        console.print(table, markup=False)
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    def markdown(self) -> str:
        """For a document: the title as a sentence before the table."""
        rule = ["---" if column in self.left else "---:" for column in self.columns]
        rows = [self.columns, rule, *self.rows]
        cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
        return "\n".join([f"{self.title}:", "", *("| " + " | ".join(row) + " |" for row in cells)])
