"""The process of a run that a program started: `doll up` in a folder that is there, with its progress on a pipe."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from doll.api.events import Event, EventDisplay
from doll.config import load
from doll.errors import DollError
from doll.run.folder import JOB, RunFolder
from doll.run.local.up import run_up


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
