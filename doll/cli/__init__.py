"""The command line `doll`: commands parse options, call other packages, and print. This module imports none of them."""

from __future__ import annotations

import os
import sys
from typing import Final

from doll.process.platform import print_any_text

FINAL_EXIT_CODE_ENV: Final = "DOLL_FINAL_EXIT_CODE"
STOPPED_EXIT_CODE_ENV: Final = "DOLL_STOPPED_EXIT_CODE"
_FINAL: Final = (2, 3, 4)  # a restart cannot change the result


def main() -> None:
    """Entry point of the `doll` program.

    With `DOLL_FINAL_EXIT_CODE=0`, a role whose failure no restart can fix exits with 0. This is for supervisors that
    restart every process whose exit code is not 0, such as docker's `on-failure`: they would restart the role without
    end. With `DOLL_STOPPED_EXIT_CODE=143`, a role that ends in order after SIGTERM exits with 143. This is for a Job of
    Kubernetes, because it would treat an evicted pod as completed if the exit code were 0.
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
