"""The messages of a run's process to the program that started it: lines of JSON on a pipe."""

from __future__ import annotations

import io
import sys
from typing import TextIO

import msgspec
from rich.console import Console

from doll.config import StopConfig
from doll.monitor.state.progress import JobSnapshot
from doll.monitor.views.display import Display, panel

_EVERY_S = 0.5


class Event(msgspec.Struct, omit_defaults=True):
    """One line; a field that it lacks is as before."""

    say: str = ""  # a message, with its time
    panel: str = ""  # the panel, with ANSI codes of colours
    version: int = 0
    samples: int = 0  # learned
    durable_version: int | None = None
    loss: float | None = None  # before learning
    report: dict[str, object] | None = None  # the run has ended with this
    error: str = ""  # or with this
    error_class: str = ""  # of `doll.errors`


_encoder = msgspec.json.Encoder()
decoder = msgspec.json.Decoder(Event)


class EventDisplay(Display):
    """Sends messages and panels to a pipe."""

    _every_s = _EVERY_S

    def __init__(self, stop: StopConfig, pipe: TextIO, width: int) -> None:
        super().__init__(stop)
        self._pipe = pipe
        self._width = width

    def send(self, event: Event) -> None:
        """Write one line. The program may have gone: the run ends with it then."""
        try:
            self._pipe.write(_encoder.encode(event).decode() + "\n")
            self._pipe.flush()
        except OSError:
            sys.exit(1)

    def _print(self, line: str) -> None:
        self.send(Event(say=line))

    def _draw(self, snapshot: JobSnapshot) -> None:
        text = io.StringIO()
        console = Console(
            file=text, force_terminal=True, color_system="standard", width=self._width, legacy_windows=False
        )
        console.print(panel(snapshot, self._stop))
        self.send(
            Event(
                panel=text.getvalue(),
                version=snapshot.version,
                samples=snapshot.samples,
                durable_version=snapshot.durable_version,
                loss=snapshot.prequential.loss if snapshot.prequential.loss == snapshot.prequential.loss else None,
            )
        )
