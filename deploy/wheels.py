"""Query the registry for packages of requirements.lock with a wheel for arm64, on Linux and on macOS.

    .venv/bin/python deploy/wheels.py       # writes wheels.txt

The Dockerfile installs wheels only, and builds the packages of its stage `compile` from source. A package of the lock
without a wheel for Linux on arm64 would break the build on every Mac and Graviton, unnoticed on x86-64; one without a
wheel for macOS would ask a user of pip for a compiler. So the answers are in the repository, and
tests/unit/test_dependencies.py compares them with the lock without network access.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from packaging.markers import Marker

ROOT: Final = Path(__file__).parents[1]
LOCK: Final = ROOT / "requirements.lock"
TABLE: Final = Path(__file__).with_suffix(".txt")
PYTHON: Final = "3.11"
MACOS: Final = "14.0"  # the oldest that torch is built for
_ENVIRONMENT: Final = {
    "implementation_name": "cpython", "os_name": "posix", "platform_python_implementation": "CPython",
    "python_full_version": f"{PYTHON}.14", "python_version": PYTHON,
}  # fmt: skip
# By column of the table: uv's name of the platform, and what markers are evaluated with. Torch is built for glibc 2.28;
# Debian 12, the image's, has 2.36.
PLATFORMS: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "linux": (
        "aarch64-manylinux_2_28",
        {**_ENVIRONMENT, "platform_machine": "aarch64", "platform_system": "Linux", "sys_platform": "linux"},
    ),
    "macos": (
        "aarch64-apple-darwin",
        {**_ENVIRONMENT, "platform_machine": "arm64", "platform_system": "Darwin", "sys_platform": "darwin"},
    ),
}


def pins(lock: str, environment: dict[str, str]) -> list[str]:
    """name==version of each package of the lock in this environment."""
    locked = re.findall(r"^([a-z0-9.-]+)==([^ ]+)(?: ; (.*))? \\$", lock, re.MULTILINE)
    return [
        f"{name}=={version}" for name, version, marker in locked if not marker or Marker(marker).evaluate(environment)
    ]


def parse_table(table: str) -> dict[str, dict[str, str]]:
    """For each platform, `wheel` or `source` by name==version."""
    rows = [line.split() for line in table.splitlines() if line and not line.startswith("#")]
    return {
        platform: {row[0]: row[column] for row in rows if row[column] != "-"}
        for column, platform in enumerate(PLATFORMS, 1)
    }


def without_wheel(pinned: list[str], platform: str) -> list[str]:
    """Those of `pinned` without a wheel: all are asked for at once, and in halves where one is missing."""
    if _has_wheels(pinned, platform):
        return []
    if len(pinned) == 1:
        return pinned
    middle = len(pinned) // 2
    return without_wheel(pinned[:middle], platform) + without_wheel(pinned[middle:], platform)


def _has_wheels(pinned: list[str], platform: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "some.txt"
        requirements.write_text("\n".join(pinned) + "\n")
        result = subprocess.run(
            [
                str(Path(sys.executable).with_name("uv")), "pip", "compile", "--quiet", "--no-deps", "--no-build",
                "--python-platform", platform, "--python-version", PYTHON, str(requirements),
            ],
            capture_output=True, text=True, env={**os.environ, "MACOSX_DEPLOYMENT_TARGET": MACOS}, check=False,
        )  # fmt: skip
    known = ("no usable wheels", "matching platform tag", "no wheels")
    if result.returncode != 0 and not any(words in result.stderr for words in known):
        raise SystemExit(f"cannot determine whether these have wheels: {pinned}\n{result.stderr}")
    return result.returncode == 0


def main() -> None:
    lock = LOCK.read_text()
    here = {platform: pins(lock, environment) for platform, (_, environment) in PLATFORMS.items()}
    missing = {platform: without_wheel(here[platform], tag) for platform, (tag, _) in PLATFORMS.items()}
    tags = ", ".join(tag for tag, _ in PLATFORMS.values())
    lines = [f"# Packages of requirements.lock for Python {PYTHON} on {tags}, by deploy/wheels.py (-: not there)."]
    for pin in sorted(set().union(*here.values())):
        words = ("-" if pin not in here[at] else "source" if pin in missing[at] else "wheel" for at in PLATFORMS)
        lines.append(" ".join((pin, *words)))
    TABLE.write_text("\n".join(lines) + "\n")
    print(f"{TABLE.name}: {len(lines) - 1} packages, from source: {missing}")


if __name__ == "__main__":
    main()
