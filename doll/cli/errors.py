"""How a command fails: one message and an exit code for every `DollError`."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
import typer.core

from doll.errors import DollError

DEBUG_ENV = "DOLL_DEBUG"


class DollGroup(typer.core.TyperGroup):
    """A group that turns a `DollError` into one message on standard error and the exit code of its class.

    `DOLL_DEBUG=1` shows the traceback.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DollError as error:
            if os.environ.get(DEBUG_ENV):
                import traceback

                traceback.print_exc()
            sys.stderr.write(f"doll: {error}\n")
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt:
            sys.stderr.write("doll: interrupted\n")
            raise typer.Exit(1) from None


def usage(message: str) -> typer.BadParameter:
    """The error of a wrong command line: message, hint, exit code 2."""
    return typer.BadParameter(message)
