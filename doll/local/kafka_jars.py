"""The jars of Apache Kafka: fetched once by Maven into a cache shared by all runs of a user, or those of a Kafka that
is there (`DOLL_KAFKA_HOME`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

from doll.errors import ServiceUnavailableError
from doll.local import installing
from doll.process.platform import lock_exclusively

CACHE_ENV: Final = "DOLL_CACHE_DIR"
HOME_ENV: Final = "DOLL_KAFKA_HOME"
MIN_JAVA: Final = 17
_HOMEBREW_JAVA: Final = tuple(f"{prefix}/opt/openjdk/bin/java" for prefix in ("/opt/homebrew", "/usr/local"))
_MAVEN_TIMEOUT_S: Final = 900.0
_VERSION: Final = re.compile(r"<kafka\.version>([^<]+)</kafka\.version>")
_JAVA_VERSION: Final = re.compile(r'version "(\d+)')


def pom_path() -> Path:
    """The Maven file that lists the jars: in the installed package, else in the checkout."""
    packaged = Path(__file__).with_name("kafka-pom.xml")
    return packaged if packaged.is_file() else Path(__file__).parents[2] / "deploy" / "kafka" / "pom.xml"


def version() -> str:
    """The version of Kafka that is fetched."""
    match = _VERSION.search(pom_path().read_text(encoding="utf-8"))
    if match is None:
        raise ServiceUnavailableError(f"expected <kafka.version> in {pom_path()}")
    return match.group(1)


def folder() -> Path:
    """Folder of the jars, which may not exist yet: `libs` of $DOLL_KAFKA_HOME if that is set, else kafka-<version> in
    $DOLL_CACHE_DIR or ~/.cache/doll."""
    if home := os.environ.get(HOME_ENV):
        return Path(home) / "libs"
    root = os.environ.get(CACHE_ENV)
    return (Path(root) if root else Path.home() / ".cache" / "doll") / f"kafka-{version()}"


def find_java() -> str | None:
    """The first Java >= 17 in $JAVA_HOME, PATH and where Homebrew has one, which is not on PATH."""
    home = os.environ.get("JAVA_HOME")
    for candidate in (f"{home}/bin/java" if home else None, "java", *_HOMEBREW_JAVA):
        executable = shutil.which(candidate) if candidate else None
        if executable and java_version(executable) >= MIN_JAVA:
            return executable
    return None


@cache
def java_version(executable: str) -> int:
    """Major version of a `java` program; 0 if it cannot be determined."""
    try:
        completed = subprocess.run([executable, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = _JAVA_VERSION.search(completed.stderr + completed.stdout)
    return int(match.group(1)) if match else 0


def unavailable_reason() -> str | None:
    """None if a local broker can be started here; else what is missing."""
    if find_java() is None:
        return f"no Java >= {MIN_JAVA} on PATH or in JAVA_HOME"
    if os.environ.get(HOME_ENV):
        if not any(folder().glob("kafka_2.13-*.jar")):
            return f"{HOME_ENV}: expected the folder of an Apache Kafka, but {folder()} has no kafka_2.13-*.jar"
    elif not folder().is_dir() and shutil.which("mvn") is None:  # the folder is created atomically
        return f"Kafka's jars are not in {folder()}, and there is no Maven (mvn) on PATH to fetch them"
    return None


def advice() -> str:
    """What to install for a local broker, and what to do without one."""
    return (
        f"{installing.java_and_maven()}; or unpack Apache Kafka {version()} and set {HOME_ENV}=folder, which needs "
        f"only Java; or use a broker that runs, such as `docker run --rm -p 9092:9092 apache/kafka:{version()}`, by "
        "kafka.address in the job file or DOLL_KAFKA=localhost:9092"
    )


def ensure(say: Callable[[str], None]) -> Path:
    """The folder with the jars, fetched by Maven if needed (43 MB). A lock makes concurrent runs fetch them only once.

    Args:
        say: called with one line when a download begins.

    Raises:
        ServiceUnavailableError: Java >= 17 or Maven is missing, or Maven fails.
    """
    problem = unavailable_reason()
    if problem is not None:
        raise ServiceUnavailableError(f"cannot start a local Kafka broker: {problem}; {advice()}")
    target = folder()
    if target.is_dir():
        return target
    with _lock(target.with_name(f"{target.name}.lock"), say):
        if not target.is_dir():
            say(f"fetching the jars of {target.name} with Maven (43 MB, once per user)")
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
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
        libs = Path(temporary) / "libs"
        # Maven uses the user's settings (mirrors, proxies); the temporary folder holds no other project's files.
        command = ["mvn", "--batch-mode", "--quiet", "--strict-checksums", "--file", str(pom_path())]
        command += ["dependency:copy-dependencies", f"-DoutputDirectory={libs}", "-DincludeScope=runtime"]
        try:
            completed = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                errors="replace", timeout=_MAVEN_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as exc:
            raise ServiceUnavailableError(
                f"Maven did not fetch Kafka's jars within {_MAVEN_TIMEOUT_S:g} s: check network and Maven settings"
            ) from exc
        if completed.returncode != 0 or not any(libs.glob("kafka_2.13-*.jar")):
            output = "\n".join(completed.stdout.splitlines()[-15:])
            raise ServiceUnavailableError(
                f"Maven cannot fetch Kafka's jars (exit code {completed.returncode}):\n{output}"
            )
        libs.chmod(0o755)
        libs.rename(target)


def main() -> int:
    """Fill the cache; if Java or Maven is missing, print the consequences and return 0."""

    def say(text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    problem = unavailable_reason()
    if problem is None:
        say(str(ensure(say)))
    else:
        say(
            f"skipped: {problem}. `doll up` then uses librdkafka's mock broker, which keeps 5 MB per partition. "
            f"To have a real one, {advice()}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
