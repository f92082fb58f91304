"""The command line `doll`: one program, one sub-command per role. Importing this loads no command."""


def main() -> None:
    """Entry point of the `doll` program."""
    from doll.cli.app import app

    app()
