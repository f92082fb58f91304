"""`doll` as a user calls it, in the test's own process."""

from __future__ import annotations

from pathlib import Path

from doll.cli.app import app
from typer.testing import CliRunner, Result


def doll(*arguments: str | Path | float, **env: str) -> Result:
    """Run one command to its end, with these variables of the environment too."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=env)
