"""AWS's service models are read once, and fast: each client of a new session would parse megabytes of JSON again."""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from botocore import loaders


@cache
def _content(path: str) -> bytes | None:
    file = Path(path)
    if not file.is_file():
        return None
    return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()


def _load_file(self: Any, full_path: str, open_method: Any) -> Any:
    content = _content(full_path)
    return None if content is None else msgspec.json.decode(content)


def use(patch: pytest.MonkeyPatch) -> None:
    """Replace botocore's reader of its models; what it returns is each caller's own."""
    patch.setattr(loaders.JSONFileLoader, "_load_file", _load_file)
