"""The extras of the distribution: packages that only some commands and jobs need, and the line that names them."""

from __future__ import annotations

import importlib.util
from typing import Final

from doll.errors import ConfigError

_MODULES: Final = {
    "avro": ("fastavro",),
    "protobuf": ("google.protobuf",),
    "provision": ("scipy",),
    "ray": ("ray",),
    "serve": ("starlette", "uvicorn", "httptools"),
}


def lacking(what: str, extra: str) -> ConfigError:
    """The error of `what`, a command or a key of the job file, where a package of an extra is not installed.

    >>> str(lacking("doll serve", "serve"))
    "doll serve needs the extra serve: pip install 'doll-online[serve]'"
    """
    return ConfigError(f"{what} needs the extra {extra}: pip install 'doll-online[{extra}]'")


def is_installed(extra: str) -> bool:
    """Whether the packages of an extra are there. They are not imported, which may take seconds."""
    try:
        return all(importlib.util.find_spec(module) is not None for module in _MODULES[extra])
    except ModuleNotFoundError:  # the package around a module
        return False


def require(what: str, extra: str) -> None:
    """Refuse `what` before it starts; raises ConfigError if a package of the extra is not installed."""
    if not is_installed(extra):
        raise lacking(what, extra)
