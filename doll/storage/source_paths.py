"""Which file, folder or URL `training.init_from` names. Free of torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from doll.config.roles import CHECKPOINT_URLS
from doll.errors import ConfigError

if TYPE_CHECKING:
    from doll.config import JobConfig

INIT_FROM: Final = "training.init_from"
SAFETENSORS: Final = ".safetensors"
TORCH: Final = (".pt", ".pth", ".bin", ".ckpt")
_VERSION: Final = re.compile(r"(.+)@([A-Za-z0-9_-]{1,63})")


def find_source(config: JobConfig, source: str) -> tuple[Path | str, str | None]:
    """The file, folder or URL that `training.init_from` names, and the version of a run, as
    `doll.storage.version_marks.resolve_version` takes it; None: its newest.

    Raises:
        ConfigError: there is no such file or folder, or a URL is of no checkpoint store.
    """
    for text, version in _readings(source):
        if "://" in text:
            if not any(form.fullmatch(text) for _, form in CHECKPOINT_URLS.values()):
                forms = " or ".join(form for form, _ in CHECKPOINT_URLS.values())
                raise ConfigError(f"{INIT_FROM}: expected {forms} of a URL, got {source}")
            return text.rstrip("/"), version
        for path in (config.path(Path(text)), Path(text)):
            if path.exists():
                return path.resolve(), version
    raise ConfigError(
        f"{INIT_FROM}: expected a run folder, a folder of checkpoints, s3://bucket/prefix, or a file that ends in "
        f"{', '.join((SAFETENSORS, *TORCH))}; got {source}, and it does not exist in {config.base_folder} or "
        f"{Path.cwd()}"
    )


def _readings(source: str) -> list[tuple[str, str | None]]:
    """With and without a version. A path may have an @ itself."""
    match = _VERSION.fullmatch(source)
    named: list[tuple[str, str | None]] = [] if match is None else [(match[1], match[2])]
    return named if "://" in source and named else [(source, None), *named]
