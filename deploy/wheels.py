"""Query the registry for packages of requirements.lock with a wheel for the image's Python on arm64.

    .venv/bin/python deploy/wheels.py       # writes wheels.txt

The Dockerfile installs wheels only, and builds the packages of its stage `compile` from source. A package of the lock
without a wheel for arm64 would break the build on every Mac and Graviton, unnoticed on x86-64. So the answers are in
the repository, and tests/unit/test_dependencies.py compares them with the lock without network access.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from packaging.markers import Marker

ROOT: Final = Path(__file__).parents[1]
LOCK: Final = ROOT / "requirements.lock"
TABLE: Final = Path(__file__).with_suffix(".txt")
PLATFORM: Final = "aarch64-manylinux_2_28"  # Debian 12, the image's, has 2.36; torch is built for 2.28
PYTHON: Final = "3.11"
ENVIRONMENT: Final = {
    "implementation_name": "cpython", "os_name": "posix", "platform_machine": "aarch64",
    "platform_python_implementation": "CPython", "platform_system": "Linux", "python_full_version": f"{PYTHON}.14",
    "python_version": PYTHON, "sys_platform": "linux",
}  # fmt: skip


def pins(lock: str) -> Iterator[tuple[str, str]]:
    """Name and version of each package of the lock for Linux on arm64."""
    for name, version, marker in re.findall(r"^([a-z0-9.-]+)==([^ ]+)(?: ; (.*))? \\$", lock, re.MULTILINE):
        if not marker or Marker(marker).evaluate(ENVIRONMENT):
            yield name, version


def parse_table(table: str) -> dict[str, str]:
    """`wheel` or `source` by name==version, from the table."""
    return dict(line.split() for line in table.splitlines() if line and not line.startswith("#"))


def has_wheel(pin: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "one.txt"
        requirements.write_text(f"{pin}\n")
        result = subprocess.run(
            [
                str(Path(sys.executable).with_name("uv")), "pip", "compile", "--quiet", "--no-deps", "--no-build",
                "--python-platform", PLATFORM, "--python-version", PYTHON, str(requirements),
            ],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if (
        result.returncode != 0
        and "no usable wheels" not in result.stderr
        and "matching platform tag" not in result.stderr
    ):
        raise SystemExit(f"cannot determine whether {pin} has a wheel:\n{result.stderr}")
    return result.returncode == 0


def main() -> None:
    lines = [f"# Packages of requirements.lock for Python {PYTHON} on {PLATFORM}, by deploy/wheels.py."]
    for name, version in pins(LOCK.read_text()):
        pin = f"{name}=={version}"
        lines.append(f"{pin} {'wheel' if has_wheel(pin) else 'source'}")
    TABLE.write_text("\n".join(lines) + "\n")
    print(
        f"{TABLE.name}: {len(lines) - 1} packages, from source: {[line for line in lines if line.endswith('source')]}"
    )


if __name__ == "__main__":
    main()
