"""The child process of `doll.train`. It runs the job of an existing folder, as `doll up` does, and writes its progress
to a pipe as lines of JSON."""

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
from doll.run.local.resume import run_resume
from doll.run.local.up import run_up

_EVERY_S: Final = 0.5


class Event(msgspec.Struct, omit_defaults=True):
    """One line of the pipe. A field that the line does not contain has not changed."""

    say: str = ""  # a message with its time
    panel: str = ""  # the panel, as text with ANSI colour codes
    version: int = 0
    samples: int = 0  # number of samples learned
    durable_version: int | None = None
    loss: float | None = None  # loss of the samples before they were learned
    report: dict[str, object] | None = None  # the report of a run that has ended
    error: str = ""  # the error of a run that has failed
    error_class: str = ""  # name of its class in `doll.errors`


_encoder = msgspec.json.Encoder()
decoder = msgspec.json.Decoder(Event)


class EventDisplay(Display):
    """A display that sends messages and panels to a pipe."""

    _every_s = _EVERY_S

    def __init__(self, stop: StopConfig, pipe: TextIO, width: int) -> None:
        super().__init__(stop)
        self._pipe = pipe
        self._width = width

    def send(self, event: Event) -> None:
        """Write one line. If the parent program has ended, end the run, too."""
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
    """Run the job in a folder, and return the exit code.

    Args:
        arguments: the path of the folder, the width of the panel in characters, and, if the run is to be resumed, the
            settings that change, as for `doll resume --set`.
    """
    folder, width, changes = Path(arguments[0]), int(arguments[1]), arguments[2:]
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as pipe:
        os.dup2(2, 1)  # all other output of this process goes to the log
        try:
            config = load(folder / JOB)
        except DollError as error:
            sys.stderr.write(f"doll: {error}\n")
            return error.exit_code
        display = EventDisplay(config.stop, pipe, width)
        try:
            if changes:
                report = run_resume(folder, changes, display=display)
            else:
                report = run_up(config, folder.parent, folder=RunFolder(folder), display=display)
        except DollError as error:
            display.send(Event(error=str(error), error_class=type(error).__name__))
            return error.exit_code
        except KeyboardInterrupt:
            display.send(Event(error="stopped at once", error_class="DollError"))
            return 1
        display.send(Event(report=json.loads(json.dumps(report))))  # converts numpy numbers to plain ones
        return int(report["exit_code"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
