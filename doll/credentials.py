"""Read secrets from the environment: from a variable, or from a file whose path is in a variable."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from doll.errors import ConfigError

_FILE_SUFFIX: Final = "_FILE"
_MAX_SECRET_BYTES: Final = 64_000


def secret(name: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the secret in the environment variable `name`. If this variable is not set, return the content of the file
    whose path is in the variable `name`_FILE, without the last line break. Return None if neither variable is set.
    Raise ConfigError if both are set or the file cannot be read."""
    value, path = environment.get(name) or None, environment.get(name + _FILE_SUFFIX) or None
    if path is None:
        return value
    if value is not None:
        raise ConfigError(f"expected {name} or {name}{_FILE_SUFFIX}, got both: unset one")
    try:
        data = Path(path).read_bytes()
        if len(data) > _MAX_SECRET_BYTES:
            raise ConfigError(f"{name}{_FILE_SUFFIX}: expected a secret in {path}, got {len(data)} bytes")
        return data.decode().removesuffix("\n").removesuffix("\r") or None
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not text"
        raise ConfigError(f"{name}{_FILE_SUFFIX}: cannot read {path}: {reason}") from None
