"""`python -m doll` is `doll`."""

from doll.cli import main

if __name__ == "__main__":
    main()
