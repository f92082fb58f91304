"""How a command fails: one message and an exit code for every `DollError`."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, Final

import typer
import typer.core

from doll.errors import DollError

DEBUG_ENV = "DOLL_DEBUG"
_RENAMED_OPTIONS: Final = {"--runs-folder": "--parent-folder"}


class DollGroup(typer.core.TyperGroup):
    """A group that turns a `DollError` into one message on standard error and the exit code of its class.

    `DOLL_DEBUG=1` shows the traceback. Its help shows commands under the title that each has as `rich_help_panel`, in
    the order of their registration, as plain text.
    """

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        commands = {name: self.commands[name] for name in self.list_commands(ctx) if not self.commands[name].hidden}
        width = max(map(len, commands), default=0)
        for name, command in commands.items():
            title = getattr(command, "rich_help_panel", None)
            short_help = command.get_short_help_str(formatter.width - 6 - width)
            sections.setdefault(title if isinstance(title, str) else "Commands", []).append(
                (f"{name:<{width}}", short_help)
            )
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DollError as error:
            if os.environ.get(DEBUG_ENV):
                import traceback

                traceback.print_exc()
            sys.stderr.write(f"doll: {error}\n")
            raise typer.Exit(error.exit_code) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # a reader such as head has ended; click says nothing then
                raise
            if os.environ.get(DEBUG_ENV):
                import traceback

                traceback.print_exc()
            from doll.process.files import unwritable

            sys.stderr.write(f"doll: {unwritable(error)} ({DEBUG_ENV}=1 shows where)\n")
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            sys.stderr.write("doll: interrupted\n")
            raise typer.Exit(1) from None
        except Exception as error:
            if (renamed := _RENAMED_OPTIONS.get(getattr(error, "option_name", ""))) is not None:
                error.possibilities = [renamed]  # type: ignore[attr-defined]  # of NoSuchOption, which typer keeps private
            raise


def usage(message: str) -> typer.BadParameter:
    """The error of a wrong command line: message, hint, exit code 2."""
    return typer.BadParameter(message)
