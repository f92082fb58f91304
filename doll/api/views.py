"""Views of the progress of a run: in a terminal, in a notebook, or as lines."""

from __future__ import annotations

import io
import sys
import time
from typing import Any, Final, Self

from rich.console import Console
from rich.text import Text

from doll.monitor.views.display import LivePanel

_LINE_EVERY_S: Final = 5.0
_REDRAW_EVERY_S: Final = 0.5
_MESSAGES: Final = 6  # the newest ones, under the panel of a notebook
WIDTH: Final = 110  # characters of a notebook's panel


class View:
    """A context manager that shows messages and panels; this class shows nothing."""

    def say(self, text: str) -> None:
        """Show a message."""

    def show(self, panel: str, line: str) -> None:
        """Show the state of the run, as a panel with ANSI codes or as one line."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


def make_view(progress: bool) -> View:
    """Return a live panel in a notebook or a terminal, otherwise lines; an empty view if `progress` is False."""
    if not progress:
        return View()
    if in_notebook():
        return _Notebook()
    return _Terminal() if sys.stderr.isatty() else _Lines()


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


class _Lines(View):
    def __init__(self) -> None:
        self._next_s = 0.0

    def say(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")

    def show(self, panel: str, line: str) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LINE_EVERY_S
            self.say(line)


class _Terminal(LivePanel, View):
    def say(self, text: str) -> None:
        self._print(text)

    def show(self, panel: str, line: str) -> None:
        self._live.update(Text.from_ansi(panel), refresh=True)


class _Notebook(View):
    """One output cell that is replaced, so that a long run shows only one panel."""

    def __init__(self) -> None:
        self._messages: list[str] = []
        self._panel = ""
        self._handle: Any = None
        self._drawn_s = 0.0

    def say(self, text: str) -> None:
        self._messages = [*self._messages, text][-_MESSAGES:]
        self._draw()

    def show(self, panel: str, line: str) -> None:
        self._panel = panel
        if time.monotonic() - self._drawn_s >= _REDRAW_EVERY_S:
            self._draw()

    def __exit__(self, *exc: object) -> None:
        self._draw()

    def _draw(self) -> None:
        from IPython.display import HTML, display

        self._drawn_s = time.monotonic()
        page = HTML(html("\n".join([self._panel.rstrip("\n"), *self._messages])))
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)


def html(text: str) -> str:
    """Convert text with ANSI codes to HTML."""
    # In a notebook, rich would also display what it prints.
    console = Console(record=True, file=io.StringIO(), width=WIDTH, force_terminal=True, force_jupyter=False)
    console.print(Text.from_ansi(text), soft_wrap=True)
    code = "<pre style=\"line-height:1.2;font-family:Menlo,'DejaVu Sans Mono',consolas,monospace\">{code}</pre>"
    return console.export_html(inline_styles=True, code_format=code)
