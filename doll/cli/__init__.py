"""The command line `doll`: commands parse options, call `doll.run` and others, and print. Importing this loads none."""

from __future__ import annotations

import os
import sys
from typing import Final

from doll.process.platform import print_any_text

FINAL_EXIT_CODE_ENV: Final = "DOLL_FINAL_EXIT_CODE"
STOPPED_EXIT_CODE_ENV: Final = "DOLL_STOPPED_EXIT_CODE"
_FINAL: Final = (2, 3, 4)  # no restart changes them


def main() -> None:
    """Entry point of the `doll` program.

    A supervisor that restarts whatever does not exit with 0, as docker's `on-failure`, would repeat a refusal:
    with `DOLL_FINAL_EXIT_CODE=0` a role that no restart can help exits with 0. A Job of Kubernetes would take a pod
    that was evicted for one that has ended: with `DOLL_STOPPED_EXIT_CODE=143` a role that ends in order after SIGTERM
    exits with 143.
    """
    from doll.cli.app import app
    from doll.process.signals import was_terminated

    print_any_text()
    try:
        app()
    except SystemExit as exit:
        stopped = os.environ.get(STOPPED_EXIT_CODE_ENV)
        if stopped and not exit.code and was_terminated():
            sys.exit(int(stopped))
        final = os.environ.get(FINAL_EXIT_CODE_ENV)
        if not final or exit.code not in _FINAL:
            raise
        sys.stderr.write(f"doll: a restart cannot help: exit code {final} instead of {exit.code}\n")
        sys.exit(int(final))
