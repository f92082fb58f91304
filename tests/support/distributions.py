"""Distributions that a test installs into a folder of its own: a wheel that it builds, or one made up by hand."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from pathlib import Path


def install_wheel(source: Path, folder: Path) -> Path:
    """Build the project at `source` into a wheel and unpack it into `folder`, as an installer does; the wheel's path.

    Only what is in the test environment is used: nothing is downloaded.
    """
    wheel = _build_wheel(source, folder.parent / f"{folder.name}-dist")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    return wheel


def environment_with_wheel(source: Path, folder: Path) -> Path:
    """A new environment at `folder` with the wheel of the project at `source`; the folder of its programs.

    It sees the test environment's packages, so that nothing is downloaded, but none that is editable there.
    """
    wheel = _build_wheel(source, folder.parent / f"{folder.name}-dist")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=300)
    programs = folder / "bin"
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "of-the-tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    command = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--offline", "--no-deps"]
    subprocess.run([*command, "--python", str(programs / "python"), str(wheel)], check=True, timeout=300)
    return programs


def _build_wheel(source: Path, dist: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(dist)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=300)
    (wheel,) = dist.glob("*.whl")
    return wheel


def write_distribution(
    folder: Path, name: str, entry_points: Mapping[str, str], *, group: str = "doll.policies", version: str = "1.0"
) -> None:
    """The metadata of an installed distribution with entry points in `group`; its modules are the caller's."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    lines = [f"[{group}]", *(f"{point} = {value}" for point, value in entry_points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
