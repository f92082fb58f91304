"""The process of a run that a program started: `doll up` in a folder that is there, with its progress as lines of JSON
on a pipe."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Final, TextIO

import msgspec
from rich.console import Console

from doll.config import StopConfig, load
from doll.errors import DollError
from doll.monitor.state.progress import JobSnapshot
from doll.monitor.views.display import Display, panel
from doll.run.folder import JOB, RunFolder
from doll.run.local.up import run_up

_EVERY_S: Final = 0.5


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


def main(arguments: list[str]) -> int:
    """Run the job in a folder.

    Args:
        arguments: the folder, and the width of the panel in characters.
    """
    folder, width = Path(arguments[0]), int(arguments[1])
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as pipe:
        os.dup2(2, 1)  # what anything prints goes to the log
        try:
            config = load(folder / JOB)
        except DollError as error:
            sys.stderr.write(f"doll: {error}\n")
            return error.exit_code
        display = EventDisplay(config.stop, pipe, width)
        try:
            report = run_up(config, folder.parent, folder=RunFolder(folder), display=display)
        except DollError as error:
            display.send(Event(error=str(error), error_class=type(error).__name__))
            return error.exit_code
        except KeyboardInterrupt:
            display.send(Event(error="stopped at once", error_class="DollError"))
            return 1
        display.send(Event(report=json.loads(json.dumps(report))))  # without numpy's numbers
        return int(report["exit_code"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
