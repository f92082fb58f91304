"""Groups of commands: how a command gets its options, how its help is formatted, and how it reports errors."""

from __future__ import annotations

import errno
import functools
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, Final, NamedTuple, get_type_hints

import typer
import typer.core

from doll import extensions
from doll.errors import DollError
from doll.redaction import redacted

DEBUG_ENV = "DOLL_DEBUG"
_RENAMED_OPTIONS: Final = {"--runs-folder": "--parent-folder"}


class DollGroup(typer.core.TyperGroup):
    """A group that reports a `DollError` as one message on standard error, and exits with the exit code of its class.

    With `DOLL_DEBUG=1` the traceback is shown, too. The help is plain text; it lists commands in their registration
    order.
    """

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        shown = self.lines(formatter.width)
        width = max(map(len, shown), default=0)
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, (title, short_help) in shown.items():
            sections.setdefault(title, []).append((f"{name:<{width}}", short_help))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def lines(self, width: int) -> dict[str, tuple[str, str]]:
        """Return title and help text (less than `width` characters) of each visible command, by name of the command."""
        shown = {name: command for name, command in self.commands.items() if not command.hidden}
        limit = width - 6 - max(map(len, shown), default=0)
        return {name: ("Commands", command.get_short_help_str(limit)) for name, command in shown.items()}

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (DollError, OSError) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # the reader of a pipe has ended; click prints nothing
            if os.environ.get(DEBUG_ENV):
                sys.stderr.write(redacted(traceback.format_exc()))
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


class Listed(NamedTuple):
    """A command that is imported when it is called.

    Attributes:
        title: title of the section of the help that lists the command.
        where: `module:name` in this package: a function, or a group of commands. Empty: a function of doll-lab.
    """

    title: str
    short_help: str
    where: str = ""

    @property
    def is_here(self) -> bool:
        """Whether the package that implements the command is installed."""
        return bool(self.where) or extensions.has_lab()

    def load(self, name: str) -> Any:
        """Return the typer command. If doll-lab is missing, the command accepts any arguments and reports that."""
        module, _, attribute = self.where.partition(":")
        if module:
            command = getattr(importlib.import_module(f"doll.cli.{module}"), attribute)
        else:
            command = extensions.find(extensions.COMMANDS, name)
        settings: dict[str, Any] = {}
        if command is None:
            command = _missing_command(name)
            settings = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
        if not isinstance(command, Commands):
            alone = Commands(help="")
            alone.command(name, short_help=self.short_help, context_settings=settings)(command)
            return typer.main.get_group(alone).commands[name]
        group = typer.main.get_group(command)
        group.name = name
        return group


def _missing_command(name: str) -> Callable[[], None]:
    def missing() -> None:
        raise extensions.lab_is_missing(f"doll {name}")

    return missing


class LazyGroup(DollGroup):
    """A group of commands whose modules are imported when a command is called; showing the help imports none.

    Attributes:
        listed: the commands of the group by name, in the order of the help.
    """

    listed: ClassVar[Mapping[str, Listed]] = {}

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        names: dict[str, Any] = dict.fromkeys(self.listed)
        self.commands = names  # click searches these for a similar name if a name is misspelt

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self.listed[cmd_name].load(cmd_name) if cmd_name in self.listed else None

    def lines(self, width: int) -> dict[str, tuple[str, str]]:
        return {name: (item.title, item.short_help) for name, item in self.listed.items() if item.is_here}


class Commands(typer.Typer):
    """Commands whose parameters may be dataclasses: each field of a dataclass becomes a parameter of the command."""

    def __init__(self, *, help: str, cls: type[DollGroup] = DollGroup, **more: Any) -> None:
        super().__init__(cls=cls, help=help, rich_markup_mode=None, **{"no_args_is_help": True, **more})

    def command(self, *args: Any, **more: Any) -> Callable[[Any], Any]:
        """Register a function as a command. The function itself is not changed."""
        register = super().command(*args, **more)

        def registered(function: Callable[..., None]) -> Callable[..., None]:
            register(_with_fields_as_parameters(function))
            return function

        return registered


def _with_fields_as_parameters(function: Callable[..., None]) -> Callable[..., None]:
    """Return `function` in the form that typer reads, with one parameter for each field of its dataclasses."""
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
