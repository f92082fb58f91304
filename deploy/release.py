"""Make everything of a release in dist/, and publish nothing: `make release VERSION=x.y.z`.

    .venv/bin/python deploy/release.py [VERSION]

What is made comes from the last commit, not from the working tree: the wheel and the source archive, the wheel of
doll-lab, the same bytes from the same commit (`SOURCE_DATE_EPOCH` is its time); SHA256SUMS; an image, if a docker
engine answers, else the exit code is 1; RELEASE.txt, which says what was made, what was not, and which commands publish
it. The wheels are installed into a new environment and tried in an empty folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
# Each line runs in an empty folder, in an environment with nothing but the wheels and their dependencies.
SMOKE: Final = (
    "doll --version", "doll --help", "doll example list", "doll example copy digits", "doll config check digits",
    "doll spot market --dry-run",
)  # fmt: skip
_OF_COMPOSE: Final = re.compile(r"\$\{\w+_IMAGE:-([^}]+)\}")
_OF_TERRAFORM: Final = re.compile(r'^variable "\w+_image" \{.*?default += "([^"]+)"', re.MULTILINE | re.DOTALL)


class ReleaseError(Exception):
    """The release cannot be made; the message says what to do."""


def version(root: Path) -> str:
    """The one place of the version: `doll.__version__`."""
    match = re.search(r'^__version__ = "([^"]+)"$', (root / "doll" / "__init__.py").read_text(), re.MULTILINE)
    assert match is not None, "doll/__init__.py has __version__"
    return match[1]


def entry(changelog: str, wanted: str) -> str:
    """The changelog's text on a version; empty where it has none."""
    heading = rf"^## \[{re.escape(wanted)}\] - \d{{4}}-\d\d-\d\d$"
    match = re.search(rf"{heading}\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return match[1].strip() if match else ""


def problems(root: Path, wanted: str) -> list[str]:
    """Why `wanted` cannot be released from the checkout at `root`; each with what to do."""
    here, reasons = version(root), []
    if wanted != here:
        reasons.append(f"VERSION is {wanted}, and doll/__init__.py has {here}: set __version__ there, and commit it")
    if changes := git(root, "status", "--porcelain"):
        reasons.append(f"the working tree differs from the last commit: commit or remove\n{changes}")
    if git(root, "tag", "--list", f"v{wanted}"):
        reasons.append(f"the tag v{wanted} exists: a version is released once; choose the next one")
    if not entry((root / "CHANGELOG.md").read_text(encoding="utf-8"), wanted):
        reasons.append(f"CHANGELOG.md has no '## [{wanted}] - YYYY-MM-DD': move there what stands under Unreleased")
    return reasons


def export(root: Path, folder: Path) -> int:
    """Write the files of the last commit into `folder`; returns the commit's time, in seconds since 1970."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=root, capture_output=True, check=True).stdout
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return int(git(root, "log", "-1", "--format=%ct"))


def build(folder: Path, dist: Path, time_s: int) -> list[Path]:
    """Build the source archive, the wheel from it, and doll-lab's wheel, with the packages of this environment."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist)]
    run([*command, str(folder)], folder, {"SOURCE_DATE_EPOCH": str(time_s)})
    run([*command, "--wheel", str(folder / "lab")], folder, {"SOURCE_DATE_EPOCH": str(time_s)})
    return sorted(dist.glob("doll_*"))


def check_metadata(files: Sequence[Path]) -> None:
    run([sys.executable, "-m", "twine", "check", "--strict", *map(str, files)], ROOT)


def smoke_test(wheels: Sequence[Path], constraints: Path, torch_backend: str) -> None:
    """Install the wheels into a new environment, with the versions of the lock, and try them in an empty folder."""
    uv = str(Path(sys.executable).with_name("uv"))
    with tempfile.TemporaryDirectory(prefix="doll-release-") as temporary:
        environment, empty = Path(temporary) / "environment", Path(temporary) / "empty"
        empty.mkdir()
        run([uv, "venv", "--quiet", "--python", sys.executable, str(environment)], empty)
        command = [uv, "pip", "install", "--quiet", "--python", str(environment), "--constraint", str(constraints)]
        command += ["--torch-backend", torch_backend] if torch_backend else []
        run([*command, *map(str, wheels)], empty)
        for line in SMOKE:
            program, *arguments = line.split()
            run([str(environment / "bin" / program), *arguments], empty, quiet=True)


def checksums(files: Sequence[Path]) -> str:
    """As `sha256sum` writes them and `sha256sum --check` reads them."""
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)


def image_command(tag: str, commit: str) -> list[str]:
    """Builds DOLL's image, in the folder with the commit's files."""
    labels = {"version": tag.partition(":")[2], "revision": commit, "licenses": "Apache-2.0"}
    options = [f"--label=org.opencontainers.image.{name}={value}" for name, value in labels.items()]
    return ["docker", "build", f"--tag={tag}", *options, "."]


def other_images(root: Path) -> list[str]:
    """The images of others that docker-compose.yml and Terraform name by default."""
    images = _OF_COMPOSE.findall((root / "docker-compose.yml").read_text())
    images += _OF_TERRAFORM.findall((root / "deploy" / "terraform" / "variables.tf").read_text())
    return sorted({*images} - {"doll:local"})


def has_docker() -> bool:
    """Whether a docker engine answers."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, timeout=60, check=False).returncode == 0


def report(
    wanted: str, commit: str, files: Sequence[Path], others: Sequence[str], image: Sequence[str], *, built: bool
) -> str:
    """The text of RELEASE.txt."""
    names, tag = [path.name for path in files], f"doll:{wanted}"
    not_built = ["  NOT built: no docker engine answered. In a clone at this commit:", f"  {' '.join(image)}"]
    lines = [
        f"DOLL {wanted}, from commit {commit}. Nothing has been published.", "",
        "Files (their checksums are in SHA256SUMS; the same commit gives the same bytes):",
        *(f"  {name}" for name in names), "",
        f"Image {tag}:", *(["  built, on this machine's docker engine"] if built else not_built), "",
        "Images of others, which docker-compose.yml and Terraform name:", *(f"  {name}" for name in others), "",
        "To publish, as a maintainer:",
        f"  git tag --annotate v{wanted} --message 'DOLL {wanted}' {commit} && git push origin v{wanted}",
        f"  python -m twine upload {' '.join(f'dist/{name}' for name in names)}",
        f"  docker tag {tag} REGISTRY/{tag} && docker push REGISTRY/{tag}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def release(root: Path, wanted: str, torch_backend: str = "") -> tuple[str, bool]:
    """Make it in `root`/dist; returns the text of RELEASE.txt, and whether all was made, the image too.

    Raises:
        ReleaseError: it must not be made from this checkout.
    """
    if reasons := problems(root, wanted):
        raise ReleaseError("\n".join(reasons))
    dist, commit = root / "dist", git(root, "rev-parse", "HEAD")
    shutil.rmtree(dist, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="doll-release-") as temporary:
        folder = Path(temporary) / "doll"
        files = build(folder, dist, export(root, folder))
        check_metadata(files)
        wheels = [path for path in files if path.suffix == ".whl"]
        smoke_test(wheels, _constraints(folder, torch_backend), torch_backend)
        image, built = image_command(f"doll:{wanted}", commit), has_docker()
        if built:
            run(image, folder)
        text = report(wanted, commit, files, other_images(folder), image, built=built)
    (dist / "SHA256SUMS").write_text(checksums(files))
    (dist / "RELEASE.txt").write_text(text)
    return text, built


def _constraints(folder: Path, torch_backend: str) -> Path:
    """The lock; without its torch, where that comes from another index with other hashes."""
    lock = folder / "requirements.lock"
    if not torch_backend:
        return lock
    blocks = re.split(r"^(?=[a-z])", lock.read_text(), flags=re.MULTILINE)
    path = folder / "constraints.txt"
    path.write_text("".join(block for block in blocks if not re.match(r"torch|triton|nvidia-|cuda-", block)))
    return path


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def run(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None, *, quiet: bool = False
) -> None:
    """Run it without what would let it find this checkout.

    Raises:
        ReleaseError: it fails.
    """
    print("$", " ".join(command), flush=True)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "DOLL_"))}
    result = subprocess.run(
        command, cwd=folder, env={**inherited, **(environment or {})}, stdin=subprocess.DEVNULL, text=True,
        stdout=subprocess.PIPE if quiet else None, stderr=subprocess.STDOUT if quiet else None, check=False,
    )  # fmt: skip
    if result.returncode != 0:
        raise ReleaseError(f"exit code {result.returncode} of: {' '.join(command)}\n{result.stdout or ''}")


def main() -> int:
    wanted = sys.argv[1] if len(sys.argv) > 1 else version(ROOT)
    try:
        text, complete = release(ROOT, wanted, os.environ.get("TORCH", ""))
    except ReleaseError as error:
        print(f"no release:\n{error}", file=sys.stderr)
        return 1
    print(text)
    if not complete:
        print(
            "incomplete: the image is not built, see above; start a docker engine and run this again", file=sys.stderr
        )
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
