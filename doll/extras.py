"""Check the distribution's extras: packages that only some commands and jobs need; errors state how to install them."""

from __future__ import annotations

import importlib.util
from typing import Final

from doll.errors import ConfigError

_MODULES: Final = {
    "avro": ("fastavro",),
    "drift": ("river",),
    "join": ("rocksdict",),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    "protobuf": ("google.protobuf",),
    "provision": ("scipy",),
    "ray": ("ray",),
    "serve": ("starlette", "uvicorn", "httptools"),
}


def lacking(what: str, extra: str) -> ConfigError:
    """Return the error for `what` (a command or a key of the job file) if a package of the extra is not installed.

    >>> str(lacking("doll serve", "serve"))
    "doll serve needs the extra serve: pip install 'doll-online[serve]'"
    """
    return ConfigError(f"{what} needs the extra {extra}: pip install 'doll-online[{extra}]'")


def is_installed(extra: str) -> bool:
    """Return whether the packages of an extra are installed. They are not imported: that may take seconds."""
    try:
        return all(importlib.util.find_spec(module) is not None for module in _MODULES[extra])
    except ModuleNotFoundError:  # the package around a module
        return False


def require(what: str, extra: str) -> None:
    """Raise ConfigError if a package of the extra is not installed. Call this before `what` starts."""
    if not is_installed(extra):
        raise lacking(what, extra)
