"""How the command line ends: a clean message and an exit code for every error that DOLL raises on purpose."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import typer
import typer.core

from doll.errors import DollError

DEBUG_ENV = "DOLL_DEBUG"


# Spellings of earlier releases, by command: what is meant now, and what is put after the value.
_DEPRECATED_OPTIONS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "plan": {"--service-s": ("--service", "")},
    "simulate": {
        "--compute-s": ("--service", ""), "--cycle-s": ("--cycle", ""), "--traces": ("--trace", ""),
        "--deadline-s": ("--deadline", ""), "--replan-s": ("--replan", ""), "--boot-s": ("--boot", ""),
        "--seconds": ("--duration", ""),
    },
    "spot": {"--cycle-s": ("--cycle", ""), "--deadline-s": ("--deadline", "")},
    "backtest": {
        "--boot-s": ("--boot", ""), "--tick-s": ("--tick", ""), "--deadline": ("--deadline-ratio", ""),
        "--job-hours": ("--job-length", "h"),
    },
}  # fmt: skip


class DollCommand(typer.core.TyperCommand):
    """A command that still takes the spellings of earlier releases, which its help does not name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        old = _DEPRECATED_OPTIONS.get(ctx.info_name or "", {})
        rewritten: list[str] = []
        waiting = ""
        for at, arg in enumerate(args):
            if arg == "--":
                return super().parse_args(ctx, [*rewritten, *args[at:]])
            name, equals, value = arg.partition("=")
            if name in old:
                new, unit = old[name]
                rewritten.append(f"{new}={value}{unit}" if equals else new)
                waiting = "" if equals else unit
            else:
                rewritten.append(arg + waiting)
                waiting = ""
        return super().parse_args(ctx, rewritten)


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
    """A wrong command line: message, hint, exit code 2."""
    return typer.BadParameter(message)
