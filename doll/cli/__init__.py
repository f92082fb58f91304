"""The command line `doll`: commands parse options, call `doll.run` and others, and print. Importing this loads none."""


def main() -> None:
    """Entry point of the `doll` program."""
    from doll.cli.app import app

    app()
