"""Groups of commands: how a command gets its options, how its help looks, and how it fails."""

from __future__ import annotations

import errno
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, Final, get_type_hints

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
        except (DollError, OSError) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # a reader such as head has ended; click says nothing then
            if os.environ.get(DEBUG_ENV):
                traceback.print_exc()
            if isinstance(error, DollError):
                sys.stderr.write(f"doll: {error}\n")
                raise typer.Exit(error.exit_code) from error
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


class Commands(typer.Typer):
    """Commands, whose parameters may be dataclasses: each field is then an option or an argument of the command."""

    def __init__(self, *, help: str, **more: Any) -> None:
        super().__init__(cls=DollGroup, help=help, rich_markup_mode=None, **{"no_args_is_help": True, **more})

    def command(self, *args: Any, **more: Any) -> Callable[[Any], Any]:
        """Register a function as a command; the function itself stays as it is."""
        register = super().command(*args, **more)

        def registered(function: Callable[..., None]) -> Callable[..., None]:
            register(_with_fields_as_parameters(function))
            return function

        return registered


def _with_fields_as_parameters(function: Callable[..., None]) -> Callable[..., None]:
    """`function` as typer reads it, with a parameter for each field of its dataclasses."""
    hints = get_type_hints(function, include_extras=True)
    dataclasses = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}

    @functools.wraps(function)
    def command(**values: Any) -> None:
        for name, cls in dataclasses.items():
            values[name] = cls(**{field.name: values.pop(field.name) for field in fields(cls)})
        function(**values)

    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        cls = dataclasses.get(parameter.name)
        types = hints if cls is None else get_type_hints(cls, include_extras=True)
        for part in [parameter] if cls is None else inspect.signature(cls).parameters.values():
            parameters.append(part.replace(kind=part.KEYWORD_ONLY, annotation=types[part.name]))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command
