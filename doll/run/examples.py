"""The examples that ship with DOLL, in a clone and in a wheel, by name.

`doll up digits` works in any folder: a name selects a shipped example, unless a file or folder of that name exists.
Each example is a folder with a task, a page, and the job file `job.yaml`. Other job files in the folder are also
examples, and have the names of their files. They run the same task on another stream or on other machines.
"""

from __future__ import annotations

import difflib
import shutil
from pathlib import Path
from typing import Final, NamedTuple

from doll.config import JobConfig, load
from doll.config.fingerprint import PATH_ENDINGS
from doll.config.source import PythonSource
from doll.errors import ConfigError

_SPOT: Final = "market"  # this example runs with `doll spot`, the others with `doll up`
_RENAMED: Final = {"spot": _SPOT, "topics": "lda"}
_JOB: Final = "job.yaml"


class Example(NamedTuple):
    """A shipped job file; `description` is its first line."""

    name: str
    description: str
    files: tuple[Path, ...]  # the files of its folder, the job file first
    command: str

    def lacks_data(self) -> bool:
        """Return whether the job file names files that neither ship with DOLL nor exist."""
        return bool(missing_files(load(self.files[0])))


def folder() -> Path | None:
    """Return the folder of the examples: in the package, or next to it in a clone. None: there are no examples."""
    package = Path(__file__).parents[1]
    candidates = (package / "examples", package.parent / "examples")
    return next((path for path in candidates if (path / "digits" / _JOB).is_file()), None)


def examples() -> list[Example]:
    """Return all shipped examples, sorted by name."""
    return [_example(name, path) for name, path in sorted(_job_files().items())]


def _job_files() -> dict[str, Path]:
    at = folder()
    paths = [] if at is None else at.glob("*/*.yaml")
    return {path.parent.name if path.name == _JOB else path.stem: path for path in paths}


def _example(name: str, path: Path) -> Example:
    first_line = path.read_text(encoding="utf-8").partition("\n")[0]
    beside = sorted(file for file in path.parent.iterdir() if file.is_file() and file != path)
    return Example(name, first_line.lstrip("# "), (path, *beside), _command(name))


def _command(name: str) -> str:
    return f"doll {'spot' if name == _SPOT else 'up'} {name}"


def named(name: Path) -> Path | None:
    """Return the job file of the example of this name; None if `name` is a path or is not an example."""
    return _job_files().get(str(name))


def ships(config: JobConfig) -> bool:
    """Return whether the job file belongs to a shipped example, and not to a copy of it."""
    return config.base_folder.parent == folder()


def hint(path: Path) -> str:
    """Return advice for a job file that does not exist: the example that is probably meant."""
    names, name = list(_job_files()), path.parent.name if path.name == _JOB else path.stem
    if (new_name := _RENAMED.get(name)) is not None:
        return f"; the example is called {new_name} now: {_command(new_name)}"
    if name in names:
        return f"; the example of this name ships with DOLL: use {name} in place of the path"
    if str(path) != path.name:
        return ""
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean the example {near[0]!r}?" if near else "; doll example list names those that ship with DOLL"


def missing_files(config: JobConfig) -> list[tuple[str, Path]]:
    """Return the files that a job file names and that do not exist, with their keys."""
    named_files = [("arrivals.trace", config.arrivals.trace), ("source.path", getattr(config.source, "path", None))]
    if isinstance(source := config.source, PythonSource):
        module = source.of.rpartition(":")[0]
        named_files.append(("source.of", Path(module) if module.endswith(".py") else None))
        paths = {key: value for key, value in source.args.items() if key.endswith(PATH_ENDINGS)}
        named_files += [(f"source.args.{key}", Path(value)) for key, value in paths.items() if isinstance(value, str)]
    return [
        (key, config.path(path)) for key, path in named_files if path is not None and not config.path(path).exists()
    ]


def copy(name: str, to: Path | None = None) -> list[Path]:
    """Copy the folder of an example to a new folder; return the new files, the job file first.

    Args:
        to: path of the new folder. None: a folder with the name of the example in the working directory.

    Raises:
        ConfigError: there is no such example, a file exists already, or the folder cannot be written.
    """
    shipped = {example.name: example for example in examples()}
    name = name.removesuffix(".yaml")
    example = shipped.get(_RENAMED.get(name, name))
    if example is None:
        raise ConfigError(f"expected an example, one of {', '.join(shipped)}; got {name!r}")
    to = to or Path(example.files[0].parent.name)
    targets = [to / file.name for file in example.files]
    existing = [str(path) for path in targets if path.exists()]
    if existing:
        raise ConfigError(f"{', '.join(existing)}: already exists; files are not overwritten")
    try:
        to.mkdir(parents=True, exist_ok=True)
        for file, target in zip(example.files, targets, strict=True):
            shutil.copyfile(file, target)
    except OSError as error:
        raise ConfigError(f"cannot write to {to}: {error.strerror or error}") from error
    return targets
