"""The command line `doll`: commands parse options, call `doll.run` and others, and print. Importing this loads none."""

from __future__ import annotations

import os
import sys
from typing import Final

FINAL_EXIT_CODE_ENV: Final = "DOLL_FINAL_EXIT_CODE"
_FINAL: Final = (2, 3, 4)  # no restart changes them


def main() -> None:
    """Entry point of the `doll` program.

    A supervisor that restarts whatever does not exit with 0, as docker's `on-failure`, would repeat a refusal:
    with `DOLL_FINAL_EXIT_CODE=0` a role that no restart can help exits with 0.
    """
    from doll.cli.app import app

    try:
        app()
    except SystemExit as exit:
        final = os.environ.get(FINAL_EXIT_CODE_ENV)
        if not final or exit.code not in _FINAL:
            raise
        sys.stderr.write(f"doll: a restart cannot help: exit code {final} instead of {exit.code}\n")
        sys.exit(int(final))
